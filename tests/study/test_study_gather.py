"""Which records make a study: newest of each scheme, verdicts that can be believed, each candidate with its baseline."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import record_builder as build
import study_builder

from evalq.errors import RecordError
from evalq.records import read_record, to_json, write_text
from evalq.study.gather import Found, bundle, comparable_baseline, read_all, record_folders, study_folders

ROWS = build.baseline_rows(documents=3, items=4)


def found(name: str, **changes: object) -> Found:
    return Found(build.record(name, ROWS, **changes), Path(name))


def test_hidden_work_is_no_record(tmp_path: Path) -> None:
    for place in ("one", "deep/two", ".work/half/record"):
        build.write(tmp_path / place, build.record(place, ROWS), ROWS)
    assert record_folders(tmp_path) == [tmp_path / "deep/two", tmp_path / "one"]
    assert record_folders(tmp_path / "one") == [tmp_path / "one"]


def test_damaged_record_is_left_out_with_its_reason(tmp_path: Path) -> None:
    study_builder.write_study(tmp_path)
    (tmp_path / "w4a16" / "record.json").write_text("{")
    notes: list[str] = []
    assert len(read_all(record_folders(tmp_path), notes)) == 3
    assert "w4a16" in notes[0]
    with pytest.raises(RecordError, match="none of the places"):
        read_all([tmp_path / "w4a16"], [])


@pytest.mark.parametrize("change", ["edited", "of another", "broken"])
def test_verdicts_that_cannot_be_believed(tmp_path: Path, change: str) -> None:
    study_builder.write_study(tmp_path)
    file = tmp_path / "w4a16" / "verdict.json"
    if change == "edited":
        file.write_text(file.read_text().replace('"status": "FAIL"', '"status": "PASS"', 1))
    if change == "of another":
        file.write_text((tmp_path / "fp8-kv" / "verdict.json").read_text())
    if change == "broken":
        file.write_text("{}")
    notes: list[str] = []
    records = {one.record.record_id: one for one in read_all(record_folders(tmp_path), notes)}
    assert records["w4a16-id"].verdict is None
    assert "not believed" in notes[0]


def test_newest_complete_record_of_a_scheme_is_shown() -> None:
    notes: list[str] = []
    times = {"created_at": "2026-01-02T00:00:00+00:00"}
    records = [
        found("baseline"),
        found("old", quant="w4a16"),
        found("new", quant="w4a16", **times),
        Found(
            dataclasses.replace(build.failed("died", ROWS), cell=found("old", quant="w4a16").record.cell), Path("died")
        ),
    ]
    (home,) = bundle(records, notes)
    assert [one.record.record_id for one in home.candidates] == ["new-id"]
    assert notes == ["2 older or unfinished records of the same schemes are not shown"]


def test_repeat_in_reverse_order_is_the_floor_and_no_scheme() -> None:
    again = found("again", quant="baseline", fingerprint={"request_order": "reverse"})
    first = found("baseline", fingerprint={"request_order": "forward"})
    (home,) = bundle([first, again, found("c", fingerprint={"request_order": "forward"})], [])
    assert [one.record.record_id for one in home.repeats] == ["again-id"]
    assert home.baseline is not None
    assert home.baseline.record.record_id == "baseline-id"


def test_each_candidate_goes_with_the_baseline_of_its_fingerprint() -> None:
    short, long = (found(f"base{w}", quant="baseline", fingerprint={"window_tokens.wikitext": w}) for w in (1024, 2048))
    candidate = found("c", fingerprint={"window_tokens.wikitext": 1024})
    notes: list[str] = []
    (home,) = bundle([short, long, candidate], notes)
    assert home.baseline is not None
    assert home.baseline.record.record_id == "base1024-id"
    assert notes == ["1 baseline records without candidates are not shown"]


def test_candidates_without_any_baseline_are_kept() -> None:
    (home,) = bundle([found("c")], [])
    assert home.baseline is None
    assert len(home.candidates) == 1


def test_study_by_its_name(tmp_path: Path) -> None:
    manifest = {"study": "night", "cells": [{"folder": "a"}, {"folder": "b"}]}
    write_text(tmp_path / "studies" / "night-1.json", json.dumps(manifest))
    write_text(tmp_path / "studies" / "broken.json", "{")
    assert study_folders(tmp_path, "night") == [tmp_path / "a", tmp_path / "b"]
    assert study_folders(tmp_path, "day") == []


def test_newest_comparable_baseline(tmp_path: Path) -> None:
    study_builder.write_study(tmp_path)
    candidate = read_record(tmp_path / "w4a16")
    found_one = comparable_baseline(candidate, tmp_path)
    assert found_one is not None
    assert found_one[0].record_id == "baseline-id"
    other = dataclasses.replace(candidate, fingerprint={**candidate.fingerprint, "gpu": "another"})
    assert comparable_baseline(other, tmp_path) is None
    write_text(tmp_path / "fp8-kv" / "record.json", to_json(other))
