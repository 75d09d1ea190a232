"""The command line against edited verdicts, mistyped flags and names that no file can have."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import record_builder as rb
from stub_worker import in_process, plan_command, starts

from evalq import pipeline, records, sweep
from evalq.cli import compare as compare_verb
from evalq.cli import gate as gate_verb
from evalq.cli import main
from evalq.cli.fetch import shown
from evalq.errors import ConfigError, MeasurementError
from evalq.records import read_verdict
from evalq.report.progress import QuietWatcher


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", "+model=smollm2-135m", "+quant=glob(zzz*)", "gpu=cpu"], "name no cell"),
        (["-m", "--cfg", "job", "+model=smollm2-135m", "+quant=w4a16", "gpu=cpu"], "leave one of them out"),
    ],
)
def test_a_sweep_of_nothing_is_no_success(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert json.loads(captured.out.splitlines()[-1])["released"] is False


def test_a_later_look_that_fails_leaves_the_verdict_of_the_earlier_one(
    tmp_path: Path, cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the first look must not be judged again, against the baseline of the second."""
    unclear = {"act": "record", "increase": 0.0149, "noise": 0.02, "documents": 20}
    command = plan_command(tmp_path / "stub", {"act": "record", "documents": 20}, w4a16=unclear)
    worker = in_process(command)

    def failing_later(spec: Any, *rest: Any, **more: Any) -> Any:
        if spec.cell.quant == "w4a16" and "w4a16" in starts(tmp_path / "stub"):
            raise MeasurementError("out of memory", "oom")
        return worker(spec, *rest, **more)

    monkeypatch.setattr(pipeline, "run_worker", failing_later)
    config = cell_config("w4a16", "gate.looks=[20,40]", "gate.extend=true")
    cell = sweep.run([config], QuietWatcher(), command).cells[0]
    assert cell.exit_code == 5
    assert cell.verdict is None
    verdicts = [read_verdict(file) for file in (tmp_path / "root").rglob("verdict.json")]
    assert [verdict.status for verdict in verdicts] == ["INCONCLUSIVE"]


@pytest.mark.parametrize(
    ("quant", "override", "words"),
    [
        ("w4a16", "quant.name=baseline", "scheme baseline is not the unquantised model"),
        ("fp8-kv", "quant.kv_cache_dtype=bfloat16", "changes nothing"),
    ],
)
def test_a_scheme_is_what_it_does(cell_config: Any, no_checkpoint: Path, quant: str, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sweep.run([cell_config(quant, override)], QuietWatcher(), ("false",))


def test_a_store_that_is_a_file_is_one_sentence(
    tmp_path: Path, cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cell_config("w4a16")
    (tmp_path / "file").write_text("")
    config.paths.root = str(tmp_path / "file")
    cell = sweep.run([config], QuietWatcher(), ("false",)).cells[0]
    assert cell.exit_code == 5
    assert "EVALQ_HOME" in str(cell.error)
    assert "report" not in str(cell.error)


def test_an_error_of_the_disk_is_no_defect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/some/file")

    monkeypatch.setattr("evalq.app.collect", full)
    assert main(["+model=smollm2-135m", "+quant=w4a16"]) == 5
    captured = capsys.readouterr()
    assert "/some/file cannot be used (No space left on device)" in captured.err
    assert "defect" not in captured.err
    assert json.loads(captured.out.splitlines()[-1])["released"] is False


def test_a_verdict_beside_a_sealed_one_is_not_sealed(
    tmp_path: Path, passed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its seal is of verdict.json: a forgery beside it must not borrow it."""
    monkeypatch.setenv("EVALQ_SEAL_KEY", "k" * 32)
    assert gate_verb.main(passed) == 5  # the records carry no seal, and that verdict is sealed
    file = tmp_path / "out" / "verdict.json"
    assert gate_verb.main(["--verdict", str(file)]) == 5
    (tmp_path / "out" / "forged.json").write_text(file.read_text().replace("INVALID", "PASS").replace(": 5", ": 0"))
    capsys.readouterr()
    assert gate_verb.main(["--verdict", str(tmp_path / "out" / "forged.json")]) == 5
    assert "is no verdict; give the folder of an earlier --out" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--policy", "--out", "--verdict", "--records", "--tracking-uri", "--review"])
def test_an_empty_option_is_not_one_that_was_left_out(
    tmp_path: Path, passed: list[str], option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset variable in a CI file; nothing is written to a folder without a name either."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for value in ("", "  "):
        assert gate_verb.main([*passed[:4], option, value, "--format", "json"]) == 2
        assert f"{option} is empty" in capsys.readouterr().out
    assert not list((tmp_path / "here").iterdir())


def test_a_review_without_its_figures_is_one_sentence(
    tmp_path: Path, passed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    content = {
        "schema_version": 1, "review_id": "r", "baseline_id": "baseline-id", "candidate_id": "cand-id", "prompts": 2,
        "identical": 0, "reviewers": ["a"], "answers": 2, "margin": 0.25, "sign_p": None, "wilcoxon_p": None,
    }  # fmt: skip
    (tmp_path / "review.json").write_text(json.dumps(content))
    assert gate_verb.main([*passed, "--review", str(tmp_path / "review.json"), "--format", "json"]) == 5
    found = capsys.readouterr()
    assert "has no candidate_preferred, coherence_difference_points" in found.out
    assert not found.err


def test_a_key_of_bytes_that_are_no_text_is_a_key(
    passed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVALQ_SEAL_KEY", "\udcff" * 20)
    assert gate_verb.main([*passed, "--format", "json"]) == 5
    found = capsys.readouterr()
    assert "it has no record.seal" in found.out
    assert not found.err


def test_a_table_that_may_not_be_read_is_one_sentence(
    passed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(records, "file_sha256", refuse)
    assert gate_verb.main([*passed, "--format", "json"]) == 5
    found = capsys.readouterr()
    assert "documents.parquet may not be read (Permission denied)" in found.out
    assert not found.err


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n{"run":{"data":[]}}',
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000,
    ],
)
def test_whatever_answers_in_place_of_mlflow_is_one_sentence(
    passed: list[str], answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        named = ["--baseline", passed[1], "--candidate", "a" * 32, "--tracking-uri", uri, "--format", "json"]
        assert gate_verb.main(named) == 5
        thread.join()
    found = capsys.readouterr()
    assert "is the tracking URI right?" in found.out
    assert not found.err


@pytest.mark.parametrize("uri", ["http://a b/", "http://user:secret@", "http://user:secret@127.0.0.1:1/x"])
def test_an_address_that_is_none_says_so_without_its_password(
    passed: list[str], uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--baseline", passed[1], "--candidate", "a" * 32, "--tracking-uri", uri, "--format", "json"]
    assert gate_verb.main(named) == 5
    found = capsys.readouterr()
    assert "is the tracking URI right?" in found.out
    assert "secret" not in found.out
    assert not found.err
    assert shown("sqlite:////tmp/x.db") == "sqlite:////tmp/x.db"


@pytest.mark.parametrize("option", ["--limit", "--output-tokens"])
def test_a_review_of_no_prompts_is_refused(
    tmp_path: Path, passed: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("0", "-1"):
        assert main(["review", "make", *passed[:4], "--out", str(tmp_path / "review"), option, value]) == 2
        assert f"{option} {value} must be 1 or more" in capsys.readouterr().err
