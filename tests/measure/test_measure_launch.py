"""Faults of the worker process: what is accepted, what each failure is called, and that no process is ever left."""

from __future__ import annotations

import _thread
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from stub_worker import TESTS, plan_command

from evalq.errors import ConfigError, EvalqError, InfeasibleError, MeasurementError
from evalq.measure import family
from evalq.measure.launch import run_worker
from evalq.measure.spec import WorkerSpec, read_spec
from evalq.records import Cell, Record


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family.Family.kill, "__defaults__", (0.3,))


class Told:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.steps: list[tuple[int, int]] = []
        self.groups: list[str] = []

    def stage(self, stage: str, label: str) -> None:
        self.stages.append(stage)

    def progress(self, done: int, total: int, unit: str) -> None:
        self.steps.append((done, total))

    def scored(self, group: str, metrics: dict[str, Any]) -> None:
        self.groups.append(group)


def spec_in(folder: Path) -> WorkerSpec:
    return WorkerSpec(
        run_id="this-run-" + os.urandom(4).hex(),
        record_id="the-record",
        cell=Cell("tiny", "baseline", "cpu", "cpu", True),
        config={},
        checkpoint=str(folder),
        checkpoint_bytes=None,
        identity={"model_id": "tiny"},
        config_hash="c" * 64,
        reuse_key="k" * 64,
        work_dir=str(folder / "work"),
        is_cpu=True,
        predicted={},
    )


def run_stub(folder: Path, watcher: Told | None = None, start: float = 20.0, grace: float = 20.0, **act: Any) -> Record:
    command = plan_command(folder / "stub", act)
    return run_worker(spec_in(folder), watcher or Told(), start, start, command, exit_grace_seconds=grace)


def failure_of(folder: Path, **act: Any) -> MeasurementError:
    with pytest.raises(MeasurementError) as caught:
        run_stub(folder, **act)
    return caught.value


def alive(file: Path) -> list[int]:
    """Which of the family's processes are still there; it must have started."""
    left = []
    for pid in json.loads(file.read_text(encoding="utf-8")):
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                left.append(pid)
        except psutil.NoSuchProcess:
            continue
    return left


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """Where the family notes its members; whatever a broken test leaves is ended here."""
    file = tmp_path / "pids.json"
    yield file
    for pid in alive(file) if file.is_file() else []:
        os.kill(pid, signal.SIGKILL)


def wait_for(file: Path, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not file.is_file():
        assert time.monotonic() < deadline, f"{file} did not appear"
        time.sleep(0.02)
    time.sleep(0.05)


def test_good_worker_is_accepted_and_the_watcher_is_told(tmp_path: Path) -> None:
    told = Told()
    record = run_stub(tmp_path, told, act="record")
    assert record.record_id == "the-record"
    assert record.tables.keys() == {"documents", "items"}
    assert told.stages == ["start", "score wikitext"]
    assert told.steps == [(1, 2)]
    assert told.groups == ["wikitext"]


def test_spec_arrives_as_it_was_written(tmp_path: Path) -> None:
    run_stub(tmp_path, act="record")
    spec = read_spec(tmp_path / "work" / "spec.json")
    assert spec.cell == Cell("tiny", "baseline", "cpu", "cpu", True)
    assert spec.identity == {"model_id": "tiny"}


def test_worker_that_never_returns_is_a_timeout(tmp_path: Path) -> None:
    began = time.monotonic()
    error = failure_of(tmp_path, act="never", start=1.0)
    assert error.kind == "timeout"
    assert "no progress for 1 s while starting" in str(error)
    assert "engine.start_timeout_seconds" in str(error)
    assert time.monotonic() - began < 10.0


def test_worker_that_talks_without_progress_is_a_timeout(tmp_path: Path) -> None:
    assert failure_of(tmp_path, act="chatter", start=1.0).kind == "timeout"


@pytest.mark.parametrize("close", [False, True])
def test_record_and_then_no_end_is_a_timeout(tmp_path: Path, close: bool) -> None:
    error = failure_of(tmp_path, act="hang_after_record", close=close, grace=1.0)
    assert error.kind == "timeout"


def test_noise_and_an_alarming_last_line_do_not_spoil_a_good_record(tmp_path: Path) -> None:
    told = Told()
    assert run_stub(tmp_path, told, act="noise").status == "complete"
    assert told.steps == []
    assert "died unexpectedly" in (tmp_path / "work" / "engine.log").read_text()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ({"act": "nothing"}, "without a usable record"),
        ({"act": "nothing", "code": 3}, "exit code 3"),
        ({"act": "foreign"}, "is of run another-run, not of this run"),
        ({"act": "cut_table"}, "documents.parquet is not the table"),
        ({"act": "failed_record"}, "record of a failure"),
        ({"act": "killed"}, "killed by signal 9 (the kernel kills processes that run out of memory"),
        ({"act": "killed", "number": int(signal.SIGSEGV)}, "killed by signal 11 before"),
    ],
)
def test_end_without_a_record_of_this_run_is_incomplete(tmp_path: Path, act: dict[str, Any], words: str) -> None:
    error = failure_of(tmp_path, **act)
    assert error.kind == "incomplete"
    assert words in str(error)


def test_record_of_an_earlier_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    run_stub(tmp_path, act="record")
    assert failure_of(tmp_path, act="nothing").kind == "incomplete"


@pytest.mark.parametrize(
    ("act", "kind", "code"),
    [
        ({"code": 2, "message": "bad key"}, ConfigError, 2),
        ({"code": 4, "message": "not on this device"}, InfeasibleError, 4),
        ({"code": 5, "kind": "oom", "message": "out of memory"}, MeasurementError, 5),
        ({"code": 5, "kind": "no such kind", "message": "strange"}, MeasurementError, 5),
        ({"code": 77, "message": "strange"}, MeasurementError, 5),
    ],
)
def test_told_failures_keep_their_exit_code(tmp_path: Path, act: dict[str, Any], kind: type, code: int) -> None:
    with pytest.raises(EvalqError) as caught:
        run_stub(tmp_path, act="fail", **act)
    assert type(caught.value) is kind
    assert caught.value.exit_code == code
    assert str(caught.value) == act["message"]
    if isinstance(caught.value, MeasurementError):
        assert caught.value.kind == ("oom" if act.get("kind") == "oom" else "engine")


def test_timeout_leaves_no_grandchild(tmp_path: Path, pids: Path) -> None:
    assert failure_of(tmp_path, act="family", pids=str(pids), start=3.0).kind == "timeout"
    assert alive(pids) == []


@pytest.mark.parametrize("then", ["record", "killed"])
def test_end_of_the_worker_leaves_no_grandchild(tmp_path: Path, pids: Path, then: str) -> None:
    """Also when it ends well, and when it is killed before anyone looked at its children."""
    if then == "record":
        run_stub(tmp_path, act="family", pids=str(pids), then=then)
    else:
        assert failure_of(tmp_path, act="family", pids=str(pids), then=then).kind == "incomplete"
    assert alive(pids) == []


def test_ctrl_c_leaves_no_grandchild(tmp_path: Path, pids: Path) -> None:
    def interrupt() -> None:
        wait_for(pids)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_stub(tmp_path, act="family", pids=str(pids))
    assert alive(pids) == []


def test_second_ctrl_c_ends_the_waiting_and_not_the_killing(
    tmp_path: Path, pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family.Family.kill, "__defaults__", (60.0,))

    def interrupt() -> None:
        wait_for(pids)
        _thread.interrupt_main()
        time.sleep(1.5)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_stub(tmp_path, act="family", pids=str(pids))
    assert alive(pids) == []
    assert time.monotonic() - began < 30.0


PARENT = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}, {tests!r} + "/measure"]
from test_measure_launch import run_stub
run_stub(Path({folder!r}), act={act!r}, pids={pids!r})
"""


@pytest.mark.parametrize("act", ["family", "die_with_parent"])
def test_death_of_the_parent_leaves_nobody(tmp_path: Path, pids: Path, act: str) -> None:
    """SIGKILL to evalq: the guard ends the worker and its grandchildren, whatever session they are in."""
    where = {"root": str(TESTS.parent), "tests": str(TESTS), "folder": str(tmp_path), "act": act, "pids": str(pids)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(**where)])
    wait_for(pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 15.0
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(pids) == []


def test_worker_dies_with_its_parent_without_any_guard(tmp_path: Path) -> None:
    """PR_SET_PDEATHSIG, the second line of defence."""
    note = tmp_path / "pid"
    child = (
        f"import sys; sys.path.insert(0, {str(TESTS.parent)!r})\n"
        "from evalq.measure.worker import die_with_parent\n"
        "import os, time\n"
        "die_with_parent()\n"
        f"open({str(note)!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"]
    )
    wait_for(note)
    pid = int(note.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_files_in_the_current_folder_are_no_modules(
    tmp_path: Path, cell_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real worker, started in a folder whose files have the names of modules; it ends at the missing data."""
    for name in ("json", "random", "psutil", "evalq"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken for a module')")
    monkeypatch.chdir(tmp_path)
    config = dataclasses.asdict(cell_config("baseline", "data=local", "data.root=/no/such/folder"))
    with pytest.raises(ConfigError, match=r"data.root=/no/such/folder is not a folder"):
        run_worker(dataclasses.replace(spec_in(tmp_path), config=config), Told(), 60.0, 60.0)


def test_strangers_are_never_members() -> None:
    """A process number that is used again belongs to someone else."""
    stranger = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        kin = family.Family(stranger.pid, "no-such-mark")
        assert [process.pid for process in kin.members()] == [stranger.pid]
        kin._born += 1.0
        assert kin.members() == []
    finally:
        stranger.kill()
        stranger.wait()
