"""The parent's side of one measurement: start the worker in its own process group, follow it, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Protocol

from evalq.errors import (
    EXIT_CONFIG,
    EXIT_INFEASIBLE,
    ConfigError,
    EvalqError,
    InfeasibleError,
    MeasurementError,
    RecordError,
)
from evalq.measure.worker import RECORD_FOLDER, WorkerSpec
from evalq.records import Record, read_record, write_text

WORKER = (sys.executable, "-m", "evalq.measure.worker")
EXIT_GRACE_SECONDS = 120.0  # from the record event to the end of the process
KILL_GRACE_SECONDS = 5.0


class Watcher(Protocol):
    """Who is told what the worker does; report.progress has the terminal's."""

    def stage(self, stage: str, label: str) -> None: ...
    def progress(self, done: int, total: int, unit: str) -> None: ...
    def scored(self, group: str, metrics: dict[str, Any]) -> None: ...


def run_worker(
    spec: WorkerSpec,
    watcher: Watcher,
    start_timeout_seconds: float,
    stall_timeout_seconds: float,
    command: Sequence[str] = WORKER,
    exit_grace_seconds: float = EXIT_GRACE_SECONDS,
) -> Record:
    """Run the worker to its end. Success is exit 0 and a complete record of this very run; all else raises.

    Errors: MeasurementError, InfeasibleError or ConfigError in one sentence; KeyboardInterrupt after everything was killed.
    """
    work = Path(spec.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    spec_file = work / "spec.json"
    write_text(spec_file, json.dumps(asdict(spec), allow_nan=False))
    process = subprocess.Popen(
        [*command, str(spec_file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=open(work / "engine.log", "ab"),  # noqa: SIM115 - the child owns it
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    family = Family(process.pid)
    try:
        failure = _follow(process, watcher, family, start_timeout_seconds, stall_timeout_seconds, exit_grace_seconds)
    finally:
        family.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
    if failure is not None:
        raise failure
    return _accept(spec, process.returncode)


def _follow(
    process: subprocess.Popen[bytes],
    watcher: Watcher,
    family: Family,
    start_timeout: float,
    stall_timeout: float,
    exit_grace: float,
) -> EvalqError | None:
    """Read events until the worker ends; returns the failure it told, or raises a time-out."""
    events: queue.Queue[dict[str, Any] | None] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=_read_events, args=(process.stdout, events), daemon=True).start()
    failure: EvalqError | None = None
    limit, doing = start_timeout, "starting"
    deadline = time.monotonic() + limit
    while True:
        try:
            event = events.get(timeout=min(1.0, max(0.05, deadline - time.monotonic())))
        except queue.Empty:
            family.look()
            if process.poll() is not None and events.empty():
                return failure
            if time.monotonic() > deadline:
                raise MeasurementError(
                    f"the engine made no progress for {limit:g} s while {doing}; read engine.log, or raise "
                    "engine.start_timeout_seconds or engine.stall_timeout_seconds",
                    "timeout",
                ) from None
            continue
        if event is None:
            # Standard output closed: the worker is ending; what is left is its exit.
            try:
                process.wait(timeout=exit_grace)
            except subprocess.TimeoutExpired:
                raise MeasurementError(
                    f"the worker wrote its last word and did not end within {exit_grace:g} s; it was killed", "timeout"
                ) from None
            return failure
        name = event.get("event")
        if name == "failure":
            failure = _failure(event)
        if name in ("started", "scored"):
            limit = stall_timeout
        if name == "record":
            limit = exit_grace
        if name in ("stage", "progress", "started", "scored", "record"):
            deadline = time.monotonic() + limit
            doing = str(event.get("label", doing))
            _tell(watcher, event)


def _read_events(stream: IO[bytes], events: queue.Queue[dict[str, Any] | None]) -> None:
    for line in stream:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                events.put(event)
    events.put(None)


def _tell(watcher: Watcher, event: dict[str, Any]) -> None:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if event["event"] == "stage":
            watcher.stage(str(event["stage"]), str(event["label"]))
        elif event["event"] == "progress":
            watcher.progress(int(event["done"]), int(event["total"]), str(event["unit"]))
        elif event["event"] == "scored":
            watcher.scored(str(event["group"]), event["metrics"])


def _failure(event: dict[str, Any]) -> EvalqError:
    message, code = str(event.get("message", "the worker failed")), event.get("exit_code")
    if code == EXIT_INFEASIBLE:
        return InfeasibleError(message)
    if code == EXIT_CONFIG:
        return ConfigError(message)
    try:
        return MeasurementError(message, str(event.get("kind") or "engine"))
    except ValueError:
        return MeasurementError(message, "engine")


def _accept(spec: WorkerSpec, returncode: int) -> Record:
    """The record, when it is complete and answers this run; MeasurementError otherwise."""
    folder = Path(spec.work_dir) / RECORD_FOLDER
    if returncode != 0:
        how = f"was killed by signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}"
        oom = (
            " (the kernel kills processes that run out of memory with signal 9)"
            if returncode == -signal.SIGKILL
            else ""
        )
        raise MeasurementError(
            f"the engine's process {how}{oom} before its record was complete; read engine.log, then run it again: "
            "finished tasks are kept",
            "incomplete",
        )
    try:
        record = read_record(folder)
    except RecordError as error:
        raise MeasurementError(f"the worker ended without a usable record: {error}", "incomplete") from error
    if record.run_id != spec.run_id:
        raise MeasurementError(
            f"the record in {folder} is of run {record.run_id}, not of this run {spec.run_id}; run it again",
            "incomplete",
        )
    return record


class Family:
    """A process group with all its descendants, also those that left the group."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self._seen: dict[int, float] = {}  # pid -> start time, so that a reused pid is never killed

    def look(self) -> None:
        """Remember the descendants that exist now."""
        import psutil

        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(self.leader)
            for child in leader.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    self._seen[child.pid] = child.create_time()

    def kill(self) -> None:
        """SIGTERM to the group, then SIGKILL to whatever of the family is left."""
        self.look()
        if not self._alive():
            return
        _signal_group(self.leader, signal.SIGTERM)
        deadline = time.monotonic() + KILL_GRACE_SECONDS
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.05)
            self.look()
        _signal_group(self.leader, signal.SIGKILL)
        for pid in self._alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _alive(self) -> list[int]:
        import psutil

        alive = []
        for pid in [self.leader, *self._seen]:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                same = pid == self.leader or process.create_time() == self._seen[pid]
                if same and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(pid)
        return alive


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
