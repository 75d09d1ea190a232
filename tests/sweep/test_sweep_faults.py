"""Sweeps that die: at every kind of moment, by every kind of death, and go on with what is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from stub_cell import cell_command
from stub_worker import TESTS, in_process, plan_command, starts

from evalq import checkpoints, identity, pipeline, preparation, sweep
from evalq.records import read_record, write_text
from evalq.report.progress import QuietWatcher
from evalq.sweep.journal import Entry, read_entries, read_plan

POINTS, SEED = 25, 20261130


class Told(QuietWatcher):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.states: list[tuple[str, str]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def state(self, cell: str, state: str, detail: str = "") -> None:
        self.states.append((cell, state))


def records(root: Path) -> list[tuple[str, str]]:
    found = [read_record(file) for file in (root / "records").glob("[!.]*/record.json")]
    return sorted((record.cell.quant, record.status) for record in found)


def entries(root: Path) -> dict[str, Entry]:
    return {entry.name.split()[-1]: entry for entry in read_entries(next((root / "sweeps").glob("*/")))}


@pytest.fixture
def run(tmp_path: Path, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, cell_config: Any) -> Callable[..., Any]:
    """run("fp8-kv", "w4a16", w4a16=act): a sweep with state on disk, stubs in this process."""

    def go(*schemes: str, watcher: Told | None = None, overrides: tuple[str, ...] = (), **acts: Any) -> Any:
        command = plan_command(tmp_path / "stub", {"act": "record"}, **acts)
        monkeypatch.setattr(pipeline, "run_worker", in_process(command))
        return sweep.run([cell_config(name, *overrides) for name in schemes], watcher or Told(), command)

    return go


def test_killed_at_25_random_points_and_resumed_it_ends_like_the_undisturbed_one(
    tmp_path: Path, no_checkpoint: Path
) -> None:
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS / "judge")))
    done = subprocess.run(
        [sys.executable, str(TESTS / "kill_points.py"), str(no_checkpoint), str(tmp_path), str(SEED), str(POINTS)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    undisturbed, *stores = [json.loads(line) for line in done.stdout.splitlines()]
    assert undisturbed["starts"] == ["baseline", "fp8-kv", "w4a16"]
    assert len(undisturbed["records"]) == 3
    deaths = [point for store in stores for point in store["point"]]
    assert len(deaths) == POINTS
    assert len(set(deaths)) > POINTS // 2
    for store in stores:
        assert store["status"] == 0, store
        assert store["records"] == undisturbed["records"], store
        assert (store["states"], store["done"], store["left"]) == (["done"] * 3, [2], []), store
        again = len(store["starts"]) - len(undisturbed["starts"])
        assert 0 <= again <= len(store["point"]), "a death costs one measurement at most, the one it was in"


def test_same_sweep_again_runs_nothing_and_says_the_same(tmp_path: Path, run: Any) -> None:
    first = run("fp8-kv", "w4a16", w4a16={"act": "record", "increase": 0.05})
    told = Told()
    second = run("w4a16", "fp8-kv", watcher=told)
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv", "w4a16"]
    assert second.exit_code == first.exit_code == 1
    assert second.folder == first.folder
    assert any("2 of 2 cells are measured" in text for text in told.said)
    run("fp8-kv", "w4a16", overrides=("executor.resume=false",))
    assert starts(tmp_path / "stub")[3:] == ["fp8-kv", "w4a16"], (
        "asked for, all is measured anew; the baseline is stored"
    )


def test_only_what_failed_runs_again(tmp_path: Path, run: Any) -> None:
    result = run("fp8-kv", "w4a16", "int8-w8a8", w4a16={"act": "killed"}, int8_w8a8={"act": "fail", "kind": "oom"})
    assert (result.exit_code, result.done) == (5, 1)
    state = entries(tmp_path / "root")
    assert {name: entry.state for name, entry in state.items()} == {
        "baseline": "done", "fp8-kv": "done", "w4a16": "failed", "int8-w8a8": "failed",
    }  # fmt: skip
    assert (state["int8-w8a8"].kind, state["w4a16"].kind) == ("oom", "incomplete")
    again = run("fp8-kv", "w4a16", "int8-w8a8")
    assert starts(tmp_path / "stub")[4:] == ["w4a16", "int8-w8a8"]
    assert (again.exit_code, again.done) == (0, 3)
    assert entries(tmp_path / "root")["w4a16"].attempt == 2
    plan = read_plan(Path(again.folder))
    assert plan is not None
    assert (plan.exit_code, plan.done) == (0, 3)


def test_policy_may_change_between_two_starts(tmp_path: Path, run: Any) -> None:
    """What was measured is judged again, by the policy of now."""
    assert run("fp8-kv", "w4a16", w4a16={"act": "record", "increase": 0.012}).exit_code == 0
    strict = run("fp8-kv", "w4a16", overrides=("gate.limit=1.0%", "gate.target=0.5%"))
    assert strict.exit_code == 1
    assert len(starts(tmp_path / "stub")) == 3


def test_new_versions_are_measured_anew(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run("fp8-kv", "w4a16")
    monkeypatch.setattr(identity, "installed_versions", lambda: {"vllm": "99.0"})
    run("fp8-kv", "w4a16")
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv", "w4a16"] * 2


def test_interrupt_says_what_is_missing(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = Told()
    calls = []

    def interrupted(cell: Any, source: Path, watcher: Any) -> Path:
        calls.append(cell.config.quant.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return source

    monkeypatch.setattr(checkpoints, "cell_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("fp8-kv", "w4a16", watcher=told)
    assert any("interrupted with 1 of 2 cells done" in text for text in told.said)
    assert entries(tmp_path / "root")["w4a16"].state == "running"
    assert run("fp8-kv", "w4a16").done == 2
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv", "w4a16"]


def test_full_disk_fails_the_cells_and_the_next_start_ends_the_sweep(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the records nor the sweep's own state can be written for a while."""
    real = pipeline.keep_record
    full = [False]

    def keep(*arguments: Any) -> Path:
        if arguments[2].cell.quant == "w4a16":
            full[0] = True
        if full[0]:
            raise OSError(28, "No space left on device", "/records/x")
        return real(*arguments)

    def write(path: Path, text: str) -> None:
        if full[0]:
            raise OSError(28, "No space left on device", str(path))
        write_text(path, text)

    monkeypatch.setattr(pipeline, "keep_record", keep)
    monkeypatch.setattr("evalq.sweep.journal.write_text", write)
    told = Told()
    result = run("fp8-kv", "w4a16", watcher=told)
    assert result.exit_code == 5
    assert result.cells[1].error.kind == "disk"
    assert sum("the state of the sweep cannot be written" in text for text in told.said) == 1
    full[0] = False
    monkeypatch.setattr(pipeline, "keep_record", real)
    assert run("fp8-kv", "w4a16").exit_code == 0
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv", "w4a16", "w4a16"]
    assert entries(tmp_path / "root")["w4a16"].state == "done"


def wait_for(there: Callable[[], Any], seconds: float = 90.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := there()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)
    return found


def started(tmp_path: Path, checkpoint: Path, *schemes: str, **acts: Any) -> subprocess.Popen[str]:
    """The command line as a process: two cells at once, each in a process of its own, stubs for engines."""
    plan_command(tmp_path / "stub", {"act": "record"}, **acts)
    arguments = [f"+quant={','.join(schemes)}", "+model=smollm2-135m", "gpu=cpu", "tracking=off", "executor.workers=2"]
    return subprocess.Popen(
        [sys.executable, str(TESTS / "stub_cli.py"), str(checkpoint), str(tmp_path / "stub" / "plan.json"), "sweep",
         *arguments, f"paths.root={tmp_path / 'root'}"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), "CI": "1"},
    )  # fmt: skip


def alive(pids: Path) -> list[int]:
    found = []
    for pid in json.loads(pids.read_text()):
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            found.append(pid)
    return found


def test_sigkill_to_the_sweep_and_to_a_cell_leaves_nobody_and_loses_nothing(
    tmp_path: Path, no_checkpoint: Path
) -> None:
    """First the process of a cell is killed, then the whole sweep; then the same command ends it. b4, with grandchildren."""
    pids, root = tmp_path / "pids", tmp_path / "root"
    hang = {"act": "family", "pids": str(pids)}
    first = started(tmp_path, no_checkpoint, "fp8-kv", "w4a16", fp8_kv=hang)
    wait_for(lambda: pids.exists() and pids.read_text())
    cell = wait_for(lambda: (entry := entries(root).get("fp8-kv")) and entry.log and entry.owner)
    os.kill(cell.pid, signal.SIGKILL)
    out, _ = first.communicate(timeout=90)
    assert first.returncode == 5
    answer = json.loads(out.splitlines()[-1])
    assert (answer["expected"], answer["done"]) == (2, 1)
    assert "was killed by signal 9 before it told of its end" in answer["cells"][0]["summary"]
    assert alive(pids) == []
    pids.unlink()
    second = started(tmp_path, no_checkpoint, "fp8-kv", "w4a16", fp8_kv=hang)
    wait_for(lambda: pids.exists() and pids.read_text())
    second.kill()
    second.communicate()
    wait_for(lambda: not alive(pids))
    third = started(tmp_path, no_checkpoint, "fp8-kv", "w4a16")
    out, _ = third.communicate(timeout=120)
    assert json.loads(out.splitlines()[-1])["done"] == 2
    first_cell, *started_ = starts(tmp_path / "stub")
    assert (first_cell, sorted(started_[:2]), started_[2:]) == ("baseline", ["fp8-kv", "w4a16"], ["fp8-kv", "fp8-kv"])
    assert [entry for entry in records(root) if entry[1] == "complete"] == [
        (name, "complete") for name in ("baseline", "fp8-kv", "w4a16")
    ]


def test_two_sweeps_at_once_share_what_they_share(tmp_path: Path, no_checkpoint: Path, cell_config: Any) -> None:
    """The same sweep twice: the second waits and measures nothing. Locks die with their owners, so neither waits for a ghost."""
    first = started(tmp_path, no_checkpoint, "fp8-kv", "w4a16")
    second = started(tmp_path, no_checkpoint, "fp8-kv", "w4a16")
    answers = [json.loads(process.communicate(timeout=180)[0].splitlines()[-1]) for process in (first, second)]
    assert [answer["done"] for answer in answers] == [2, 2]
    assert sorted(starts(tmp_path / "stub")) == ["baseline", "fp8-kv", "w4a16"]
    assert {cell["record"] for cell in answers[0]["cells"]} == {cell["record"] for cell in answers[1]["cells"]}


def test_cell_processes_measure_what_the_asking_process_would(
    tmp_path: Path, cell_config: Any, no_checkpoint: Path
) -> None:
    """The key that a cell's own process computes is that of this one: a sweep may go on with another number of workers."""
    command = plan_command(tmp_path / "stub", {"act": "record"})
    cells = [cell_config(name, "executor.workers=2") for name in ("fp8-kv", "w4a16")]
    sweep.run(cells, Told(), command, cell_command(no_checkpoint))
    keys = {read_record(f).reuse_key for f in (tmp_path / "root" / "records").glob("[!.]*/record.json")}
    prepared = [preparation.prepare(cell_config(name)) for name in ("fp8-kv", "w4a16")]
    here = {pipeline.identify(cell, QuietWatcher()).key for cell in (*prepared, preparation.as_baseline(prepared[0]))}
    assert keys == here
