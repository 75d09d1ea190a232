"""What a worker keeps of finished tasks, what it takes up again, and when it stops early."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import record_builder as build

from evalq.errors import MeasurementError, RecordError
from evalq.measure import worker
from evalq.measure.groups import (
    GroupScores,
    left_out,
    read_done,
    shares_prefixes,
    stop_on_implausible,
    write_done,
)
from evalq.measure.spec import Events, WorkerSpec
from evalq.records import Cell, CheckpointId, document_schema, item_schema, read_record, read_table

ROWS = build.baseline_rows(documents=3, items=4)
SCORES = {"wikitext": build.scores(ROWS)["wikitext"]}
IDENTITY: dict[str, Any] = {"dataset.wikitext": "embedded", "truncated.wikitext": 0}


def some_tables() -> dict[str, pa.Table]:
    return {
        name: table.cast(schema)
        for (name, table), schema in zip(build.tables(ROWS).items(), (document_schema(), item_schema()))
    }


def test_finished_group_is_taken_up_as_it_was(tmp_path: Path) -> None:
    write_done(tmp_path, "wikitext", "key", GroupScores(SCORES, IDENTITY, some_tables()))
    found = read_done(tmp_path, "wikitext", "key")
    assert found is not None
    assert found.scores == SCORES
    assert found.identity == IDENTITY
    assert found.tables == some_tables()


def test_nothing_is_taken_up_from_another_measurement(tmp_path: Path) -> None:
    write_done(tmp_path, "wikitext", "key", GroupScores(SCORES, IDENTITY, some_tables()))
    assert read_done(tmp_path, "wikitext", "another key") is None
    assert read_done(tmp_path, "hellaswag", "key") is None


def test_kept_scores_belong_to_these_very_weights() -> None:
    """A checkpoint that was changed between a kill and the next start has scores of its own."""
    made = (CheckpointId("a", "1" * 64, 1), CheckpointId("a", "2" * 64, 1), None)
    owners = {spec(reuse_key="key", checkpoint_id=one).owner for one in made}
    assert len(owners) == 3
    assert all(owner.startswith("key") for owner in owners)


@pytest.mark.parametrize("damage", ["cut json", "no json", "cut table", "no table", "other field", "no folder"])
def test_damaged_leftover_is_scored_anew(tmp_path: Path, damage: str) -> None:
    write_done(tmp_path, "wikitext", "key", GroupScores(SCORES, IDENTITY, some_tables()))
    folder = tmp_path / "done" / "wikitext"
    text = (folder / "scores.json").read_text()
    if damage == "cut json":
        (folder / "scores.json").write_text(text[:-5])
    if damage == "no json":
        (folder / "scores.json").unlink()
    if damage == "cut table":
        (folder / "documents.parquet").write_bytes((folder / "documents.parquet").read_bytes()[:-9])
    if damage == "no table":
        (folder / "items.parquet").unlink()
    if damage == "other field":
        (folder / "scores.json").write_text(text.replace('"window_tokens"', '"windows"'))
    if damage == "no folder":
        folder.rename(tmp_path / "done" / ".wikitext.tmp")
    assert read_done(tmp_path, "wikitext", "key") is None


def test_write_over_an_older_leftover(tmp_path: Path) -> None:
    (tmp_path / "done" / ".wikitext.tmp").mkdir(parents=True)
    (tmp_path / "done" / ".wikitext.tmp" / "junk").write_text("x")
    write_done(tmp_path, "wikitext", "old", GroupScores(SCORES, {}, {}))
    write_done(tmp_path, "wikitext", "key", GroupScores(SCORES, IDENTITY, some_tables()))
    assert read_done(tmp_path, "wikitext", "old") is None
    assert read_done(tmp_path, "wikitext", "key") is not None
    assert [f.name for f in (tmp_path / "done").iterdir()] == ["wikitext"]


def test_nan_never_gets_into_what_is_kept(tmp_path: Path) -> None:
    bad = {"wikitext": dataclasses.replace(SCORES["wikitext"], metrics={"word_perplexity": float("nan")})}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_done(tmp_path, "wikitext", "key", GroupScores(bad, {}, {}))
    assert read_done(tmp_path, "wikitext", "key") is None


def test_record_joins_the_tables_of_all_groups(tmp_path: Path) -> None:
    documents, items = some_tables()["documents"], some_tables()["items"]
    parts = [{"documents": documents}, {"items": items.slice(0, 4)}, {"items": items.slice(4)}]
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "leftover.parquet").write_text("of an earlier attempt")
    written = worker._write(tmp_path, build.record("baseline", ROWS), parts)
    record = read_record(tmp_path / "record")
    assert record == written
    assert read_table(tmp_path / "record", record, "items") == items
    assert not (tmp_path / "record" / "leftover.parquet").exists()
    assert "tokens" not in record.tables


def spec(is_baseline: bool = True, **changes: Any) -> WorkerSpec:
    fields: dict[str, Any] = {
        "run_id": "r", "record_id": "i", "cell": Cell("m", "q", "cpu", "cpu", is_baseline), "config": {}, "checkpoint": "",
        "checkpoint_bytes": None, "identity": {}, "config_hash": "", "reuse_key": "", "work_dir": "", "is_cpu": True,
        "predicted": {},
    }  # fmt: skip
    return WorkerSpec(**{**fields, **changes})


@pytest.mark.parametrize(
    ("value", "stops"), [(30.0, False), (200.0, False), (200.1, True), (1.0, True), (0.0, True), (None, True)]
)
def test_implausible_baseline_stops_the_run(cell_config: Any, value: float | None, stops: bool) -> None:
    """a7: a window without its BOS, or with the wrong tokenizer, shows in a perplexity that no model has."""
    config = cell_config("baseline")
    scored = {"wikitext": dataclasses.replace(SCORES["wikitext"], metrics={"word_perplexity": value})}
    if stops:
        with pytest.raises(MeasurementError, match="BOS rule") as caught:
            stop_on_implausible(config, spec(), scored)
        assert caught.value.kind == "data"
    else:
        stop_on_implausible(config, spec(), scored)
    stop_on_implausible(config, spec(is_baseline=False), scored)


@pytest.mark.parametrize(
    ("quant", "overrides", "shared"),
    [
        ("baseline", [], True),
        ("mixed-4-8", [], True),
        ("fp8-kv", [], False),
        ("fp8-weights-kv", [], False),
        ("baseline", ["tasks.share_prefixes=false"], False),
        ("baseline", ["engine.enable_prefix_caching=false"], False),
    ],
)
def test_prefixes_are_never_shared_through_a_quantised_cache(
    cell_config: Any, quant: str, overrides: list[str], shared: bool
) -> None:
    assert shares_prefixes(cell_config(quant, *overrides)) is shared


def test_left_out_counts_what_was_asked_for_and_not_scored() -> None:
    class Task:
        eval_docs = tuple(range(10))

    assert left_out(Task(), None, 10) == 0
    assert left_out(Task(), 4, 4) == 0
    assert left_out(Task(), 40, 10) == 0
    assert left_out(Task(), None, 7) == 3


def test_progress_lines_are_few_and_the_last_is_sent() -> None:
    stream = io.StringIO()
    events = Events(stream)
    for done in range(1001):
        events.progress(done, 1000, "sequences")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) < 50
    assert lines[-1] == {"event": "progress", "done": 1000, "total": 1000, "unit": "sequences"}


def test_events_to_a_parent_that_is_gone_are_no_error() -> None:
    stream = io.StringIO()
    stream.close()
    Events(stream).send("stage", stage="x", label="y")


def test_stage_seconds_add_up_and_name_the_stage_of_a_failure() -> None:
    events = Events(io.StringIO())
    with events.timed("a", "first"):
        pass
    with events.timed("a", "again"):
        pass
    with pytest.raises(ZeroDivisionError), events.timed("b", "fails"):
        raise ZeroDivisionError
    assert events.stage == "b"
    assert set(events.stage_seconds) == {"a"}


def test_damaged_spec_is_refused(tmp_path: Path) -> None:
    for text in ("{", "{}", '{"run_id": 1}'):
        (tmp_path / "spec.json").write_text(text)
        with pytest.raises(RecordError):
            worker.read_spec(tmp_path / "spec.json")
