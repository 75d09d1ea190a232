"""`evalq report` and `evalq inspect` from the shell's side."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import record_builder as build
import study_builder

from evalq.cli import main
from evalq.records import read_record, write_text


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return study_builder.write_study(tmp_path / "records")


def test_a_folder_of_records_becomes_a_page(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["report", str(study), "--out", str(out), "--title", "My study"]) == 0
    assert capsys.readouterr().out.strip() == str(out / "index.html")
    assert "<h1>My study</h1>" in (out / "index.html").read_text()
    assert (out / "report.md").read_text().startswith("# My study")


def test_records_one_by_one_and_by_id(study: Path, tmp_path: Path) -> None:
    given = [str(study / "baseline"), "fp8-kv-id", "--records", str(study)]
    assert main(["report", *given, "--out", str(tmp_path / "out")]) == 0
    assert "1 scheme<" in (tmp_path / "out" / "index.html").read_text()


def test_a_study_by_name(study: Path, tmp_path: Path) -> None:
    cells = [{"folder": name} for name in ("baseline", "w4a16")]
    write_text(study / "studies" / "n.json", json.dumps({"study": "tonight", "cells": cells}))
    assert main(["report", "tonight", "--records", str(study), "--out", str(tmp_path / "out")]) == 0
    assert "keep the unquantised model" in (tmp_path / "out" / "index.html").read_text()


def test_judged_where_no_verdict_is_kept(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for scheme in study_builder.SCHEMES:
        (study / scheme / "verdict.json").unlink()
    assert main(["report", str(study), "--out", str(tmp_path / "out")]) == 0
    assert "w4a16 was judged when this report was made, by the policy default" in capsys.readouterr().err
    assert "1 PASS, 1 PASS (warning), 1 FAIL" in (tmp_path / "out" / "index.html").read_text()


def test_edited_verdict_is_not_shown(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = study / "w4a16" / "verdict.json"
    file.write_text(file.read_text().replace('"status": "FAIL"', '"status": "PASS"', 1))
    assert main(["report", str(study), "--out", str(tmp_path / "out")]) == 0
    assert "not believed" in capsys.readouterr().err
    assert "1 FAIL" in (tmp_path / "out" / "index.html").read_text()


def test_a_failed_cell_is_in_the_report(study: Path, tmp_path: Path) -> None:
    rows = build.baseline_rows(3, 4)
    from evalq.records import write_record

    write_record(study / "died", build.failed("died", rows), {})
    assert main(["report", str(study), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert "failed (oom)" in text
    assert "the engine died" in text


def test_random_weights_are_measured_and_never_judged(study: Path, tmp_path: Path) -> None:
    """Their stored verdict is INVALID, which would read as if something had gone wrong."""
    for name in ("baseline", "w4a16"):
        file = study / name / "record.json"
        file.write_text(file.read_text().replace('"load_format": "auto"', '"load_format": "dummy"'))
    given = [str(study / "baseline"), str(study / "w4a16")]
    assert main(["report", *given, "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert "These records measured memory and speed only" in text
    assert "1 not judged" in text


def test_no_path_of_the_machine_is_in_the_report(study: Path, tmp_path: Path) -> None:
    (study / "fp8-kv" / "tokens.parquet").unlink()
    (study / "fp8-weights" / "record.json").write_text("{")
    (study / "w4a16" / "verdict.json").write_text("{")
    assert main(["report", str(study), "--out", str(tmp_path / "out")]) == 0
    for name in ("index.html", "report.md"):
        text = (tmp_path / "out" / name).read_text()
        assert "tokens.parquet is missing" in text
        assert str(tmp_path) not in text


@pytest.mark.parametrize("arguments", [["", "--out", "here"], ["records", "--out", " "]])
def test_an_empty_name_is_not_the_current_folder(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An unset variable in a script."""
    assert main(["report", *arguments]) == 2
    assert "a name is empty" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["empty", "nowhere"])
def test_nothing_to_report_is_one_sentence(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    name = str(tmp_path / "empty") if what == "empty" else "nowhere"
    assert main(["report", name, "--out", str(tmp_path / "out"), "--records", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no record" in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_inspect_shows_answers_and_tokens(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(study / "w4a16")]) == 0
    out = capsys.readouterr().out
    assert "w4a16-id against baseline-id" in out
    assert "right to wrong" in out
    assert "⟦" in out
    assert "Question" in out


@pytest.mark.parametrize("form", ["json", "markdown"])
def test_inspect_for_programs_and_pages(study: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert main(["inspect", str(study / "w4a16"), "--format", form, "--items", "2", "--tokens", "1"]) == 0
    out = capsys.readouterr().out
    if form == "json":
        data = json.loads(out)
        assert len(data["tokens"]) == 1
        assert len(data["documents"]) == study_builder.DOCUMENTS
    else:
        assert "## What changed most" in out


def test_inspect_finds_a_comparable_baseline_without_a_verdict(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (study / "fp8-kv" / "verdict.json").unlink()
    assert main(["inspect", str(study / "fp8-kv")]) == 0
    assert "against baseline-id" in capsys.readouterr().out


def test_inspect_text_of_records_is_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_builder.write_study(tmp_path, "[bold red]x[/]\x1b[31m")
    assert main(["inspect", str(study / "w4a16")]) == 0
    out = capsys.readouterr().out
    assert "[bold red]x[/]" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["baseline"], "is a baseline"),
        (["fp8-kv", "--items", "-1"], "--items -1 is below 0"),
        (["gone"], "no record"),
    ],
)
def test_inspect_refuses_in_one_sentence(
    study: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = arguments
    assert main(["inspect", str(study / name), *rest]) == 2
    assert says in capsys.readouterr().err


def test_inspect_without_a_baseline(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (study / "baseline" / "record.json").unlink()
    assert read_record(study / "fp8-kv")
    assert main(["inspect", str(study / "fp8-kv"), "--records", str(study)]) == 2
    assert "--against" in capsys.readouterr().err


def test_a_full_disk_names_the_file(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("evalq.records.os.fsync", full)
    assert main(["report", str(study), "--out", str(tmp_path / "out")]) == 5
    message = capsys.readouterr().err
    assert "No space left on device" in message
    assert str(tmp_path / "out" / "index.html") in message
    assert list((tmp_path / "out").iterdir()) == []
