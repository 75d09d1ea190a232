"""Records and policies made to look better than they are, or damaged so that reading them falls over."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import record_builder as rb

from evalq.config import GateConfig
from evalq.errors import ConfigError, RecordError
from evalq.judge.floor import floor_file, read_floor
from evalq.judge.gate import judge
from evalq.judge.policy import checked_policy, read_policy
from evalq.loads.results import Level, LoadResult, Spread
from evalq.measure.cells import find_baseline
from evalq.records import Record, Verdict, file_sha256, read_record, write_record

Change = Callable[[Record], Record]


def same(record: Record) -> Record:
    return record


def judged(
    tmp_path: Path,
    first: Change = same,
    second: Change = same,
    policy: GateConfig | None = None,
    increase: float = 0.003,
) -> Verdict:
    """A candidate that passes, unless one of the records is changed."""
    rows = rb.baseline_rows()
    worse = rb.damaged(rows, increase)
    one = rb.write(tmp_path / "b", first(rb.record("baseline", rows)), rows)
    two = rb.write(tmp_path / "c", second(rb.record("cand", worse)), worse)
    return judge(one, tmp_path / "b", two, tmp_path / "c", policy or GateConfig())


def with_fingerprint(**fields: Any) -> Change:
    return lambda r: dataclasses.replace(r, fingerprint={**r.fingerprint, **fields})


def test_a_second_baseline_is_no_candidate(tmp_path: Path) -> None:
    """The baseline measured once more with another load has another config hash and, of course, no increase."""
    rows = rb.baseline_rows()
    first = rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    again = dataclasses.replace(rb.record("baseline", rows), record_id="again", config_hash="other")
    second = rb.write(tmp_path / "c", again, rows)
    verdict = judge(first, tmp_path / "b", second, tmp_path / "c", GateConfig())
    assert verdict.status == "INVALID"
    assert "was measured as a baseline" in verdict.summary


@pytest.mark.parametrize("value", [None, "", "DROP"])
@pytest.mark.parametrize("name", ["weights_hash", "tokenizer_hash", "gpu", "engine_version"])
def test_two_records_that_keep_silent_are_not_equal(tmp_path: Path, name: str, value: str | None) -> None:
    def silent(record: Record) -> Record:
        kept = {key: found for key, found in record.fingerprint.items() if key != name}
        return dataclasses.replace(record, fingerprint=kept if value == "DROP" else {**kept, name: value})

    verdict = judged(tmp_path, silent, silent)
    assert verdict.status == "INVALID"
    assert f"does not say {name}" in verdict.summary


def test_the_word_for_absent_is_not_absence(tmp_path: Path) -> None:
    assert judged(tmp_path, second=with_fingerprint(extra="(absent)")).status == "INVALID"


@pytest.mark.parametrize("field", ["left_out", "truncated"])
def test_negative_counts_are_refused(tmp_path: Path, field: str) -> None:
    def negative(record: Record) -> Record:
        scores = dataclasses.replace(record.tasks["wikitext"], **{field: -1})
        return dataclasses.replace(record, tasks={**record.tasks, "wikitext": scores})

    verdict = judged(tmp_path, negative, negative)
    assert verdict.status == "INVALID"
    assert "negative count" in verdict.summary


def rewritten(folder: Path, record: Record, change: Callable[[pa.Table], pa.Table], times: int = 1) -> Record:
    """The record with another documents table whose hash fits."""
    file = folder / "documents.parquet"
    pq.write_table(change(pq.ParquetFile(file).read()), file)
    scores = dataclasses.replace(record.tasks["wikitext"], n=record.tasks["wikitext"].n * times)
    tables = {**record.tables, "documents": file_sha256(file)}
    return dataclasses.replace(record, tables=tables, tasks={**record.tasks, "wikitext": scores})


def doubled(table: pa.Table) -> pa.Table:
    """Every text twice, under new ids."""
    ids = pa.array([i + 1000 for i in table["doc_id"].to_pylist()], pa.int64())
    return pa.concat_tables([table, table.set_column(table.schema.names.index("doc_id"), "doc_id", ids)])


def test_a_text_that_the_data_holds_twice_is_one_document(tmp_path: Path) -> None:
    """The interval of 62 texts, each twice, is that of 62 documents and not of 124."""
    rows = rb.baseline_rows()
    worse = rb.damaged(rows, 0.0149)
    first = rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    second = rb.write(tmp_path / "c", rb.record("cand", worse), worse)
    once = judge(first, tmp_path / "b", second, tmp_path / "c", GateConfig()).checks[0].estimate
    first = rewritten(tmp_path / "b", first, doubled, 2)
    second = rewritten(tmp_path / "c", second, doubled, 2)
    twice = judge(first, tmp_path / "b", second, tmp_path / "c", GateConfig()).checks[0].estimate
    assert once is not None
    assert twice is not None
    assert (twice.n, twice.value, twice.low, twice.high) == pytest.approx((once.n, once.value, once.low, once.high))


@pytest.mark.parametrize(
    ("name", "kind"), [("nll_nats", pa.string()), ("words", pa.string()), ("doc_id", pa.string()), ("task", pa.int64())]
)
def test_a_column_of_another_type_is_refused_in_words(tmp_path: Path, name: str, kind: pa.DataType) -> None:
    rows = rb.baseline_rows()
    first = rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    worse = rb.damaged(rows, 0.003)
    second = rb.write(tmp_path / "c", rb.record("cand", worse), worse)

    def retyped(table: pa.Table) -> pa.Table:
        values = [1] * len(table) if kind == pa.int64() else [str(x) for x in table[name].to_pylist()]
        return table.set_column(table.schema.names.index(name), name, pa.array(values, kind))

    verdict = judge(first, tmp_path / "b", rewritten(tmp_path / "c", second, retyped), tmp_path / "c", GateConfig())
    assert verdict.status == "INVALID"
    assert f"have {name} as {kind}" in verdict.summary


SPEED = GateConfig(conditions=["output_tokens_per_second@offline >= 50%"])


def with_load(**changes: Any) -> Change:
    return lambda r: dataclasses.replace(r, loads={"offline": dataclasses.replace(r.loads["offline"], **changes)})


def test_speeds_of_unlike_loads_are_not_compared(tmp_path: Path) -> None:
    assert judged(tmp_path / "like", policy=SPEED).status == "PASS"
    for name in ("requests", "input_tokens_per_request", "output_tokens_per_request", "concurrency"):
        verdict = judged(tmp_path / name, second=with_load(**{name: 7}), policy=SPEED)
        assert verdict.status == "INVALID", name
        assert f"not one load: {name}" in verdict.summary


def test_a_speed_outside_its_own_repeats_is_refused(tmp_path: Path) -> None:
    backwards = with_load(output_tokens_per_second_low=200.0, output_tokens_per_second_high=1.0)
    verdict = judged(tmp_path, backwards, policy=SPEED)
    assert verdict.status == "INVALID"
    assert "outside its repeats" in verdict.summary


def test_wikitext_has_no_margin() -> None:
    """It would be ignored, and whoever wrote it would believe in it."""
    with pytest.raises(ConfigError, match=r"gate\.target and gate\.limit"):
        checked_policy(GateConfig(required_margins=["wikitext"], task_margins={"wikitext": "0.1%"}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("limit: 1.5%\nlimit: 50%\n", "the key limit twice"),
        ("task_margins: {hellaswag: 1%, hellaswag: 99%}\n", "the key hellaswag twice"),
        ("confidence: .nan\n", "expected a number"),
        ("[" * 5000, "not YAML"),
        ("allow: &a [*a]\n", "a list of names"),
        ('name: "\\uD800"\n', "half characters"),
        ('allow: ["\\uD800"]\n', "half characters"),
    ],
)
def test_policies_with_a_trick_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_policy(file)


def test_a_policy_with_too_long_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="File name too long"):
        read_policy("a" * 300)


def damaged_json(record: Record, how: str) -> str:
    data = json.loads(json.dumps(dataclasses.asdict(record)))
    if how == "number":
        data["tasks"]["wikitext"]["seconds"] = 10**400
    if how == "half character":
        data["cell"]["quant"] = "\ud800"
    return "[" * 100_000 if how == "nesting" else json.dumps(data)


@pytest.mark.parametrize("how", ["number", "half character", "nesting"])
def test_damage_that_python_itself_stumbles_over(tmp_path: Path, how: str) -> None:
    """It is a RecordError, and no reason to refuse the good record beside it."""
    rows = rb.baseline_rows(12, 10)
    good = rb.write(tmp_path / "good", rb.record("baseline", rows), rows)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "record.json").write_text(damaged_json(good, how))
    with pytest.raises(RecordError):
        read_record(bad)
    found = find_baseline(tmp_path, good.reuse_key)
    assert found is not None
    assert found[1].name == "good"


def test_a_record_without_tables_passes_nothing(tmp_path: Path) -> None:
    rows = rb.baseline_rows()
    first = rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    second = write_record(tmp_path / "c", rb.record("cand", rb.damaged(rows, 0.003)), {})
    assert judge(first, tmp_path / "b", second, tmp_path / "c", GateConfig()).status == "INVALID"
    assert np.isfinite(rows.nll).all()


def test_a_scheme_called_baseline_is_still_suspect_with_identical_values(tmp_path: Path) -> None:
    rows = rb.baseline_rows()
    first = rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    made = rb.record("cand", rows)
    named = dataclasses.replace(made, cell=dataclasses.replace(made.cell, quant="baseline"))
    second = rb.write(tmp_path / "c", named, rows)
    assert judge(first, tmp_path / "b", second, tmp_path / "c", GateConfig()).status == "SUSPECT"


def served(kind: str, rate: float | None, start: str = "serving") -> LoadResult:
    label = f"{rate:g} requests/s"
    figures = {"output_tokens_per_second": Spread(100.0, 99.0, 101.0, 1.0)}
    level = Level(label, None, rate, 100, 64.0, 32.0, figures, {}, [], None, None, True, [])
    return LoadResult("rate", kind, start, "client", [level], None, {}, {}, "NVIDIA H200")


def test_speeds_at_other_rates_are_not_compared(tmp_path: Path) -> None:
    """Requests that arrive more often are answered more often: that says nothing about the scheme."""
    policy = GateConfig(conditions=["output_tokens_per_second@rate >= 50%"])

    def with_rate(result: LoadResult) -> Change:
        load = rb.load("rate", 100.0, concurrency=0)
        return lambda r: dataclasses.replace(r, loads={"rate": load}, load_results={"rate": result})

    first = with_rate(served("rate", 1.0))
    assert judged(tmp_path / "like", first, with_rate(served("rate", 1.0)), policy).status == "PASS"
    for number, (other, words) in enumerate(
        [
            (served("rate", 16.0), "rate_per_second is 1.0 in one cell and 16.0 in the other"),
            (served("trace", 1.0), "kind is rate in one cell and trace"),
            (served("rate", 1.0, "scoring"), "start is serving in one cell and scoring"),
        ]
    ):
        verdict = judged(tmp_path / str(number), first, with_rate(other), policy)
        assert verdict.status == "INVALID"
        assert words in verdict.summary


@pytest.mark.parametrize(
    "text",
    [
        "target: 2024-13-45\n",
        "name: 2020-02-31\n",
        "min_documents: " + "9" * 5000 + "\n",
        "min_documents: !!int abc\n",
        "confidence: !!float abc\n",
        "strict: !!bool maybe\n",
        "name: !!timestamp abc\n",
    ],
)
def test_values_that_only_yaml_knows_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is not YAML"):
        read_policy(tmp_path / "policy.yaml")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"[]", b'{"name": NaN}', None])
def test_a_damaged_floor_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    record = rb.record("baseline", rb.baseline_rows())
    file = floor_file(tmp_path, record, "word_perplexity")
    file.parent.mkdir(parents=True)
    if content is None:
        file.symlink_to(file)
        assert read_floor(tmp_path, record) is None
        return
    file.write_bytes(content)
    with pytest.raises(RecordError):
        read_floor(tmp_path, record)
