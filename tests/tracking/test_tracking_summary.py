from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tracked_records as build
from hypothesis import given
from hypothesis import strategies as st

from evalq.records import read_record
from evalq.tracking import plots, summary
from evalq.tracking.differences import DOCUMENTS, ITEMS, difference_tables
from evalq.tracking.manifest import add_cell, open_manifest, read_manifest
from evalq.tracking.store import store_at


@pytest.fixture
def rows(tmp_path: Path) -> list[summary.Row]:
    store = store_at("sqlite:///mlflow.db", tmp_path, tmp_path / "records", 1.0)
    path = open_manifest(store, "s", "e", "m", "cpu")
    for folder in build.write_study(store.records):
        add_cell(path, store.records, folder, read_record(folder), False)
    return summary.rows_of(read_manifest(path), store.records)


def test_baseline_first_then_by_weights(rows: list[summary.Row]) -> None:
    assert [row.cell for row in rows] == ["baseline", "fp8-kv", "int8-w8a8", "mixed-4-8"]
    assert summary.counts(rows)["pass_cells"] == 1
    assert summary.counts(rows)["fail_cells"] == 2


def test_table_says_what_was_measured(rows: list[summary.Row]) -> None:
    text = summary.markdown(rows)
    assert text.startswith("**fp8-kv** FAIL · **int8-w8a8** PASS · **mixed-4-8** FAIL\n")
    assert "| int8-w8a8 | PASS | +0.65 [+0.45, +0.85] | 32.410 | 0.460 | – | 0.152 | 23,040 | 410 |" in text


def test_files_of_the_parent_run(rows: list[summary.Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    summary.write(tmp_path, "s", rows)
    assert (tmp_path / "accuracy_against_memory.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "summary.json").read_text())["cells"]) == 4


def test_a_ladder_is_drawn_where_there_is_more_than_one_step(rows: list[summary.Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    loads = {f"at{n}": replace(build.load(), name=f"at{n}", concurrency=n) for n in (10, 100, 500)}
    broken = replace(build.load(), concurrency=1000, valid=False)
    steps = plots.steps_of(build.record(loads={"broken": broken, **loads}))
    assert [step.concurrency for step in steps] == [10, 100, 500]
    summary.write(tmp_path, "s", rows)
    assert not (tmp_path / "latency_ladder.png").exists()
    summary.write(tmp_path, "s", [replace(row, steps=steps) for row in rows])
    assert (tmp_path / "latency_ladder.png").read_bytes().startswith(b"\x89PNG")


def test_the_pareto_front_is_named(rows: list[summary.Row]) -> None:
    assert plots.pareto_names(rows) == ["baseline", "int8-w8a8", "mixed-4-8"]
    assert "at once than: baseline, int8-w8a8, mixed-4-8" in summary.markdown(rows)


def test_pareto_by_hand() -> None:
    assert plots.pareto([(3, 1), (1, 3), (2, 2), (2, 4), (3, 3)]) == [(1, 3), (2, 2), (3, 1)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20))
def test_pareto_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    def beaten(p: tuple[int, int]) -> bool:
        return any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)

    assert set(plots.pareto(points)) == {p for p in points if not beaten(p)}


def test_differences_worst_first(tmp_path: Path) -> None:
    from evalq.records import write_record

    baseline, candidate = tmp_path / "b", tmp_path / "c"
    write_record(baseline, build.record(), {"documents": build.documents(), "items": build.items(4)})
    write_record(candidate, build.record("x"), {"documents": build.documents(0.5), "items": build.items(3)})
    tables = difference_tables(baseline, candidate, read_record(candidate))
    assert tables[DOCUMENTS]["doc_id"][0] == 7
    assert tables[DOCUMENTS]["difference_nats_per_token"][0] == pytest.approx(0.035)  # 7 x 0.5 nats over 100 tokens
    assert tables[ITEMS]["difference"] == [-1.0] + [0.0] * 7
    assert tables[ITEMS]["item_id"][0] == 3
