"""Studies on disk, and the marker of records that MLflow does not have."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tracked_records as build

from evalq.errors import RecordError
from evalq.tracking import manifest as m
from evalq.tracking.store import Store, store_at


@pytest.fixture
def place(tmp_path: Path) -> Store:
    return store_at("sqlite:///mlflow.db", tmp_path, tmp_path / "records", 1.0)


def test_a_named_study_is_joined_and_an_unnamed_one_is_numbered(place: Store) -> None:
    first = m.open_manifest(place, "s", "e", "model", "cpu")
    assert m.open_manifest(place, "s", "e", "model", "cpu") == first
    other = m.open_manifest(place, "s", "e", "model", "cpu", join=False)
    assert m.read_manifest(other).study == "s (2)"
    assert m.open_manifest(place, "s", "another experiment", "model", "cpu") != first


def test_a_record_is_one_cell(place: Store) -> None:
    path = m.open_manifest(place, "s", "e", "model", "cpu")
    made = build.record()
    folder = build.write(place.records / "baseline", made)
    m.add_cell(path, place.records, folder, made, False)
    cells = m.add_cell(path, place.records, folder, made, True).cells
    assert cells == [m.StudyCell("baseline", made.record_id, True)]


def test_the_first_end_stands(place: Store) -> None:
    path = m.open_manifest(place, "s", "e", "model", "cpu")
    m.end_manifest(path, "KILLED")
    m.end_manifest(path, "FINISHED")
    assert m.read_manifest(path).status == "KILLED"


def test_marker_keeps_studies_and_stores_apart(place: Store, tmp_path: Path) -> None:
    folder = tmp_path / "records" / "baseline"
    server = dataclasses.replace(place, uri="http://h:5000")
    m.mark_pending(folder, place, "one", "why")
    m.mark_pending(folder, server, "one", "down")
    m.mark_pending(folder, server, "one", "still down")
    assert [entry["reason"] for entry in m.read_pending(folder)] == ["why", "still down"]
    m.clear_pending(folder, place, "one")
    assert [entry["uri"] for entry in m.read_pending(folder)] == ["http://h:5000"]
    m.clear_pending(folder, server, "one")
    assert not (folder / m.PENDING_FILE).exists()


def test_gone_processes(place: Store) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = m.this_process()
    owner = dataclasses.replace(me, pid=child.pid, started=m.process_started(child.pid))
    assert me.pid == os.getpid()
    assert not m.is_gone(me)
    assert not m.is_gone(owner)
    child.kill()
    child.wait()
    assert m.is_gone(owner)
    assert m.is_gone(dataclasses.replace(me, started=me.started - 100)), "the number was given to another process"
    assert not m.is_gone(dataclasses.replace(owner, host="elsewhere")), "nobody can tell from here"


def test_damaged_manifest_is_one_sentence(place: Store) -> None:
    path = m.open_manifest(place, "s", "e", "model", "cpu")
    path.write_text('{"schema_version": 9}')
    with pytest.raises(RecordError, match="schema version 9"):
        m.read_manifest(path)
    path.write_text("{")
    with pytest.raises(RecordError, match="not valid JSON"):
        m.read_manifest(path)


def test_records_of_no_study(place: Store) -> None:
    build.write(place.records / "a" / "b", build.record(record_id="known"))
    loose = build.write(place.records / "c", build.record(record_id="loose"))
    (place.records / "broken").mkdir()
    (place.records / "broken" / "record.json").write_text("{")
    assert [folder for folder, _ in m.records_without_study(place.records, {"known"})] == [loose]
