"""Jobs as processes of this machine, several at once. Which GPU each has is settled by leases (evalq.measure.lease)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import evalq
from evalq.errors import MeasurementError, RecordError
from evalq.measure.family import KILL_GRACE_SECONDS, Family
from evalq.pipeline import Measured
from evalq.records import read_record
from evalq.sweep.cell import CELL
from evalq.sweep.jobs import Event, Job, Outcome, told_error
from evalq.tracking.store import slug

CELL_MARK = "EVALQ_CELL"
QUIET_SECONDS = 1.0  # a process that ended and says nothing for this long has said all


class CellProcess:
    """A running cell process: its lines as they come, its end, and nothing left of it afterwards."""

    def __init__(self, request: dict[str, Any], log: Path, command: Sequence[str] = CELL) -> None:
        self._token = secrets.token_hex(8)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as errors:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": module_path(), CELL_MARK: self._token},
            )
        self._family = Family(self.process.pid, self._token, CELL_MARK)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._rest = b""
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request, allow_nan=False).encode() + b"\n")
            self.process.stdin.flush()

    def lines(self) -> tuple[list[dict[str, Any]], bool]:
        """What it said since the last call, and whether it closed its output."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                block = os.read(self.output, 1 << 16)
            except BlockingIOError:
                return found, False
            if not block:
                return found, True
            *whole, self._rest = (self._rest + block).split(b"\n")
            for line in whole:
                with contextlib.suppress(ValueError):
                    told = json.loads(line)
                    if isinstance(told, dict):
                        found.append(told)

    def terminate(self) -> None:
        """Ask it to stop its engine and end."""
        self.process.terminate()

    def end(self, patience_seconds: float = KILL_GRACE_SECONDS) -> int:
        """Its exit code; it, its engine and all their children are gone afterwards."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_seconds)
        self._family.kill(0.0)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        return self.process.wait()


def module_path() -> str:
    """Where this evalq is, and what the caller set: the process must be of the same evalq from whatever folder."""
    here = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


class ProcessExecutor:
    """As many cell processes at once as `workers` and `devices` allow."""

    def __init__(
        self, workers: int, devices: int, command: Sequence[str], cell_command: Sequence[str], logs: Path
    ) -> None:
        self._workers = workers
        self._devices = devices
        self._command = list(command)
        self._cell_command = cell_command
        self._logs = logs
        self._running: dict[int, tuple[Job, CellProcess]] = {}
        self._last: dict[int, dict[str, Any]] = {}  # the event that says how the job ended
        self._heard: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()

    def room(self, job: Job) -> bool:
        if not self._running:
            return True
        in_use = sum(running.devices for running, _ in self._running.values())
        return len(self._running) < self._workers and in_use + job.devices <= self._devices

    def start(self, job: Job) -> None:
        process = CellProcess(request_of(job, self._command), self._logs / f"{slug(job.name)}.log", self._cell_command)
        self._running[process.output] = (job, process)
        self._heard[process.output] = time.monotonic()
        self._selector.register(process.output, selectors.EVENT_READ)

    def wait(self, seconds: float) -> list[Event]:
        events: list[Event] = []
        ready = {key.fd for key, _ in self._selector.select(seconds)}
        for output in list(self._running):
            job, process = self._running[output]
            told, closed = process.lines() if output in ready else ([], False)
            if told:
                self._heard[output] = time.monotonic()
            for event in told:
                if event.get("event") in ("ended", "failed", "known"):
                    self._last[output] = event
                else:
                    events.append(Event(job, event))
            silent = time.monotonic() - self._heard[output] > QUIET_SECONDS
            if closed or (silent and process.process.poll() is not None):
                events.append(Event(job, {}, self._end(output)))
        return events

    def _end(self, output: int) -> Outcome:
        _, process = self._running.pop(output)
        self._selector.unregister(output)
        del self._heard[output]
        return outcome_of(self._last.pop(output, None), process.end())

    def close(self) -> None:
        """End what still runs: asked first, all at once, then made to."""
        for _, process in self._running.values():
            process.terminate()
        deadline = time.monotonic() + 2 * KILL_GRACE_SECONDS
        for output in list(self._running):
            _, process = self._running.pop(output)
            process.end(max(0.0, deadline - time.monotonic()))
        self._selector.close()


def request_of(job: Job, command: Sequence[str]) -> dict[str, Any]:
    """What the cell process is asked for."""
    return {
        "config": dataclasses.asdict(job.cell.config),
        "version": evalq.__version__,
        "since": job.since,
        "hint": job.hint,
        "command": list(command),
    }


def outcome_of(last: dict[str, Any] | None, code: int) -> Outcome:
    """The outcome that the last event tells of; a process that ended without one was lost."""
    if last is None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        text = f"the cell's process {how} before it told of its end; run it again: finished tasks are kept"
        return Outcome(error=MeasurementError(text, "incomplete"), lost=True)
    if last["event"] == "failed":
        error = told_error(str(last.get("message")), int(last.get("exit_code", 5)), str(last.get("kind")))
        error.add_note(f"record: {last.get('folder')}")
        return Outcome(error=error, trace=str(last.get("trace", "")))
    folder = Path(str(last["folder"]))
    try:
        return Outcome(Measured(read_record(folder), folder, reused=bool(last.get("reused"))))
    except RecordError as error:
        return Outcome(error=MeasurementError(f"the cell ended without a usable record: {error}", "incomplete"))
