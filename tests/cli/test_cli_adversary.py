"""The command line against edited verdicts, mistyped flags and names that no file can have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import record_builder as rb

from evalq.cli import compare as compare_verb
from evalq.cli import gate as gate_verb
from evalq.cli import main


@pytest.fixture
def passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Arguments of a gate that passes; its verdict is in tmp_path/out."""
    rows = rb.baseline_rows()
    worse = rb.damaged(rows, 0.003)
    rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    rb.write(tmp_path / "c", rb.record("cand", worse), worse)
    arguments = ["--baseline", str(tmp_path / "b"), "--candidate", str(tmp_path / "c"), "--out", str(tmp_path / "out")]
    assert gate_verb.main(arguments) == 0
    assert gate_verb.main(["--verdict", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    return arguments


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "INVALID", "exit_code": 256},  # a process that ends with 256 ends with 0
        {"status": "FAIL", "exit_code": -256},
        {"status": "FAIL", "exit_code": 0},
        {"status": "PASS", "exit_code": 1},
        {"status": "pass"},
        {"checks": []},
        {"checks": [{"status": "FAIL"}]},
        {"checks": [{"status": "GOOD"}]},
        {"warning": True, "policy": {"strict": True}},
        {"summary": "\ud800"},
    ],
)
def test_a_verdict_that_contradicts_itself_releases_nothing(
    tmp_path: Path, passed: list[str], changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / "verdict.json"
    verdict = json.loads(file.read_text())
    first = verdict["checks"][0]
    if "checks" in changes:
        changes = {"checks": [{**first, **check} for check in changes["checks"]]}
    file.write_text(json.dumps({**verdict, **changes}))
    assert gate_verb.main(["--verdict", str(tmp_path / "out")]) == 5
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("out", ["--out DIR", "--out=DIR"])
def test_a_mistyped_flag_leaves_no_earlier_verdict(
    tmp_path: Path, passed: list[str], out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = out.replace("DIR", str(tmp_path / "out")).split()
    with pytest.raises(SystemExit) as caught:
        gate_verb.main([*passed[:4], *given, "--fromat", "json"])
    assert caught.value.code == 2
    assert gate_verb.main(["--verdict", str(tmp_path / "out")]) == 5
    capsys.readouterr()


def test_help_removes_nothing(tmp_path: Path, passed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gate_verb.main([*passed, "--help"])
    assert gate_verb.main(["--verdict", str(tmp_path / "out")]) == 0
    capsys.readouterr()


def test_names_that_no_file_can_have(passed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_verb.main(["a" * 5000, passed[1]]) == 5
    assert "neither a path nor a record id" in capsys.readouterr().err
    assert main(["gate", "--baseline", "a\0b", "--candidate", passed[3]]) == 5
    assert "neither a path" in " ".join(capsys.readouterr().out.split())
