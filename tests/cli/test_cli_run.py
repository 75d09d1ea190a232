"""The run's command line: what it prints, every exit code, and how it ends when it is interrupted. Workers are stubs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from stub_worker import TESTS, in_process, plan_command, starts

from evalq import pipeline
from evalq.cli import main

CELL = ["+model=smollm2-135m", "gpu=cpu", "tracking=off"]
FEW = {"act": "record", "documents": 5}
Answer = tuple[int, str, str]


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """main() takes SIGTERM over; give it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def call(
    tmp_path: Path, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """call("+quant=fp8-kv", fp8_kv=act): exit code, standard output, standard error."""

    def go(*arguments: str, fixed: bool = True, **acts: dict[str, Any]) -> Answer:
        monkeypatch.setattr(pipeline, "run_worker", in_process(plan_command(tmp_path / "stub", **acts)))
        code = main([*arguments, *([*CELL, f"paths.root={tmp_path / 'root'}"] if fixed else [])])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return go


def last_json(out: str) -> dict[str, Any]:
    answer = json.loads(out.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize(
    ("code", "status", "acts"),
    [
        (0, "PASS", {}),
        (1, "FAIL", {"fp8_kv": {"act": "record", "increase": 0.05}}),
        (3, "INCONCLUSIVE", {"fp8_kv": {"act": "record", "increase": 0.012, "noise": 0.05}}),
        (3, "INCONCLUSIVE", {"baseline": FEW, "fp8_kv": FEW}),
        (4, "FAILED", {"fp8_kv": {"act": "fail", "code": 4, "message": "no kernel for it"}}),
        (5, "FAILED", {"fp8_kv": {"act": "killed"}}),
        (5, "INVALID", {"fp8_kv": {"act": "record", "status": "invalid"}}),
        (3, "SUSPECT", {"fp8_kv": {"act": "record", "increase": -0.4}}),
    ],
)  # fmt: skip
def test_every_exit_code_with_its_json_line(
    call: Any, tmp_path: Path, code: int, status: str, acts: dict[str, Any]
) -> None:
    given, out, _ = call("+quant=fp8-kv", **acts)
    answer = last_json(out)
    assert given == code == answer["exit_code"]
    assert answer["cells"][0]["status"] == status
    assert answer["released"] is (code == 0)
    if answer["cells"][0]["record"]:
        verdict = json.loads((Path(answer["cells"][0]["record"]) / "verdict.json").read_text())
        assert (verdict["status"], verdict["exit_code"]) == (status, code)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+quant=fp8-kvv"], "did you mean fp8-kv?"),
        (["+quant=fp8-kv", "engine.max_num_seq=3"], "did you mean max_num_seqs?"),
        (["+quant=fp8-kv", "gate.target=1.5"], "ambiguous"),
        (["+quant=fp8-kv", "data=local", "data.root=/no/such/folder"], "/no/such/folder is not a folder"),
        ([], "no quant given; add +quant=NAME with one of: baseline"),
    ],
)
def test_bad_requests_end_with_2_and_one_sentence(call: Any, tmp_path: Path, arguments: list[str], words: str) -> None:
    code, out, err = call(*arguments)
    assert code == 2
    assert words in err
    assert last_json(out) == {"exit_code": 2, "released": False, "error": last_json(out)["error"], "cells": []}
    assert starts(tmp_path / "stub") == []


def test_gpu_that_is_not_here_ends_with_4(call: Any, tmp_path: Path) -> None:
    code, out, _ = call(
        "+quant=fp8-kv", "gpu=h200", "+model=smollm2-135m", "tracking=off", f"paths.root={tmp_path}", fixed=False
    )
    assert code == 4
    assert "gpu=h200 was asked for and this machine has cpu" in out


def test_sweep_prints_one_table_names_the_failed_and_ends_with_the_worst(call: Any, tmp_path: Path) -> None:
    code, out, err = call(
        "-m", "+quant=fp8-kv,int8-w8a8,w4a16",
        fp8_kv={"act": "killed"}, int8_w8a8={"act": "fail", "code": 5, "kind": "oom", "message": "out of memory"},
    )  # fmt: skip
    assert code == 5
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv", "int8-w8a8", "w4a16"]
    assert out.count("evalq: cells") == 1
    assert "smollm2-135m fp8-kv: the engine's process was killed by signal 9" in out
    assert "smollm2-135m int8-w8a8: out of memory" in out
    assert out.count("Traceback (most recent call last)") == 2
    assert [cell["exit_code"] for cell in last_json(out)["cells"]] == [5, 5, 0]
    assert "smollm2-135m w4a16" in err


def test_second_run_says_that_the_baseline_is_stored(call: Any, tmp_path: Path) -> None:
    call("+quant=fp8-kv")
    code, out, err = call("+quant=w4a16")
    assert code == 0
    assert "using the stored record" in err
    assert last_json(out)["cells"][0]["baseline_reused"] is True
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv", "w4a16"]


def test_relative_paths_are_the_callers(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "data" / "wikitext2").mkdir(parents=True)
    (tmp_path / "here" / "data" / "wikitext2" / "test.jsonl").write_text('{"page": "a b c"}\n')
    monkeypatch.chdir(tmp_path / "here")
    code, out, _ = call(
        "+quant=fp8-kv", *CELL, "data=local", "tasks=perplexity", "data.root=data", "paths.root=out", fixed=False
    )
    assert Path(last_json(out)["cells"][0]["record"]).parent == tmp_path / "here" / "out" / "records"
    spec = yaml.safe_load((Path(last_json(out)["cells"][0]["record"]) / "config.yaml").read_text())
    assert spec["data"]["root"] == str(tmp_path / "here" / "data")
    assert code == 0


def test_no_arguments_print_the_choices_and_end_with_2(call: Any) -> None:
    code, out, err = call(fixed=False)
    assert code == 2
    assert out == ""
    for word in ("mixed-4-8", "smollm2-135m", "h200", "+model=NAME", "Exit codes"):
        assert word in err


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_ends_with_0(call: Any, flag: str) -> None:
    code, out, _ = call(flag, fixed=False)
    assert code == 0
    assert "mixed-4-8" in out
    assert "Exit codes" in out


def test_cfg_job_prints_the_composed_config_and_starts_nothing(call: Any, tmp_path: Path) -> None:
    code, out, _ = call("--cfg", "job", "+quant=mixed-4-8")
    assert code == 0
    composed = yaml.safe_load(out)
    assert composed["quant"]["name"] == "mixed-4-8"
    assert composed["quant"]["groups"]["feed_forward"]["weights"]["num_bits"] == 4
    assert composed["engine"]["name"] == "cpu"
    assert starts(tmp_path / "stub") == []


def test_unknown_verb_ends_with_2(call: Any) -> None:
    code, _, err = call("pln", fixed=False)
    assert code == 2
    assert "there is no verb 'pln'; did you mean plan?" in err


def test_unexpected_error_is_5_never_the_1_of_python_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: Any, elsewhere: bool = False) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr("evalq.sweep.check.prepare", broken)
    assert main(["+quant=fp8-kv", *CELL]) == 5
    said = capsys.readouterr()
    assert last_json(said.out)["exit_code"] == 5
    assert "RuntimeError: a bug" in said.err


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["nonsense"], 2), (["plan", "--help"], 0)])
def test_as_a_process(tmp_path: Path, arguments: list[str], code: int) -> None:
    environment = {"PYTHONPATH": str(TESTS.parent), "PATH": "/usr/bin:/bin"}
    answer = subprocess.run(
        [sys.executable, "-m", "evalq", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert answer.returncode == code
    assert "Traceback" not in answer.stderr
    assert not list(tmp_path.iterdir()), "asking for help leaves nothing behind"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_nothing_and_says_so(tmp_path: Path, no_checkpoint: Path, number: int) -> None:
    pids = tmp_path / "pids.json"
    plan = plan_command(tmp_path / "stub", baseline={"act": "family", "pids": str(pids)})[-1]
    arguments = [str(no_checkpoint), plan, "+quant=fp8-kv", *CELL, f"paths.root={tmp_path / 'root'}"]
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "stub_cli.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
            "PATH": "/usr/bin:/bin",
            "EVALQ_LEASES": str(tmp_path / "leases"),
        },
    )
    try:
        deadline = time.monotonic() + 60.0
        while not pids.is_file():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.1)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()  # a test that fails leaves nobody behind either
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("evalq: interrupted; the engine was stopped and no half record was kept")
    assert "Traceback" not in err
    assert last_json(out) == {"exit_code": 130, "released": False, "error": "interrupted", "cells": []}
    for pid in json.loads(pids.read_text()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not list((tmp_path / "root").rglob("record.json"))
