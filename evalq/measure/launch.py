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
from evalq.loads.results import LoadResult
from evalq.measure.family import MARK, Family, start_guard, stop_guard
from evalq.measure.spec import LOAD_FILE, RECORD_FOLDER, WorkerSpec
from evalq.records import Record, from_mapping, parse_json, read_record, read_table, write_text

WORKER = (sys.executable, "-P", "-m", "evalq.measure.worker")  # -P: files of the current folder are no modules
EXIT_GRACE_SECONDS = 120.0  # from the record event to the end of the process


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
    limits = (start_timeout_seconds, stall_timeout_seconds, exit_grace_seconds)
    return _accept(spec, _run_to_end(spec, watcher, limits, command))


def run_load_worker(
    spec: WorkerSpec,
    watcher: Watcher,
    start_timeout_seconds: float,
    stall_timeout_seconds: float,
    command: Sequence[str] = WORKER,
    exit_grace_seconds: float = EXIT_GRACE_SECONDS,
) -> LoadResult:
    """Run the worker's load stage to its end; as run_worker, and the product is a load result of this very run."""
    (Path(spec.work_dir) / LOAD_FILE).unlink(missing_ok=True)
    limits = (start_timeout_seconds, stall_timeout_seconds, exit_grace_seconds)
    returncode = _run_to_end(spec, watcher, limits, command)
    if returncode != 0:
        raise MeasurementError(
            f"{_how_it_ended(returncode)} before the load was measured; read engine.log", "incomplete"
        )
    file = Path(spec.work_dir) / LOAD_FILE
    try:
        found = parse_json(file.read_text(encoding="utf-8"), str(file))
        result: LoadResult = from_mapping(LoadResult, found["result"], str(file))
    except (OSError, KeyError, TypeError, RecordError) as error:
        raise MeasurementError(f"the worker ended without a usable load result: {error}", "incomplete") from error
    if found["run_id"] != spec.run_id:
        raise MeasurementError(f"{file} is of run {found['run_id']}, not of {spec.run_id}; run it again", "incomplete")
    return result


def _run_to_end(spec: WorkerSpec, watcher: Watcher, limits: tuple[float, float, float], command: Sequence[str]) -> int:
    """The worker's exit code; whatever it started is gone afterwards. Raises the failure that it told."""
    work = Path(spec.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    spec_file = work / "spec.json"
    write_text(spec_file, json.dumps(asdict(spec), allow_nan=False))
    with open(work / "engine.log", "ab") as log:
        process = subprocess.Popen(
            [*command, str(spec_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={**_environment(), "PYTHONUNBUFFERED": "1", "PYTHONPATH": _module_path(), MARK: spec.run_id},
        )
    family = Family(process.pid, spec.run_id)
    guard = start_guard(process.pid, spec.run_id)
    try:
        failure = _follow(process, watcher, *limits)
    finally:
        family.kill()
        process.wait()
        stop_guard(guard)
    if failure is not None:
        raise failure
    return process.returncode


def _environment() -> dict[str, str]:
    """Without the key that seals records: the worker may run a model's own code."""
    return {name: value for name, value in os.environ.items() if name != "EVALQ_SEAL_KEY"}


def _module_path() -> str:
    """Where this evalq is, and what the caller set: the worker must be of the same evalq from whatever folder."""
    here = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


def _follow(
    process: subprocess.Popen[bytes],
    watcher: Watcher,
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
    ended = False
    while True:
        try:
            event = events.get(timeout=min(1.0, max(0.05, deadline - time.monotonic())))
        except queue.Empty:
            if ended:  # silent for a while after its end: a descendant holds its standard output open
                return failure
            ended = process.poll() is not None
            event = {}
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
        elif time.monotonic() > deadline:
            raise MeasurementError(
                f"the engine made no progress for {limit:g} s while {doing}; read engine.log, or raise "
                "engine.start_timeout_seconds or engine.stall_timeout_seconds",
                "timeout",
            )


def _read_events(stream: IO[bytes], events: queue.Queue[dict[str, Any] | None]) -> None:
    with stream:
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
        raise MeasurementError(
            f"{_how_it_ended(returncode)} before its record was complete; read engine.log, then run it again: "
            "finished tasks are kept",
            "incomplete",
        )
    try:
        record = read_record(folder)
        for table in record.tables:
            read_table(folder, record, table)
    except RecordError as error:
        raise MeasurementError(f"the worker ended without a usable record: {error}", "incomplete") from error
    if (record.run_id, record.record_id) != (spec.run_id, spec.record_id):
        raise MeasurementError(
            f"the record in {folder} is of run {record.run_id}, not of this run {spec.run_id}; run it again",
            "incomplete",
        )
    if record.status == "failed":
        raise MeasurementError("the worker ended well and wrote a record of a failure; run it again", "incomplete")
    return record


def _how_it_ended(returncode: int) -> str:
    how = f"was killed by signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}"
    known = " (the kernel kills processes that run out of memory with signal 9)"
    return f"the engine's process {how}{known if returncode == -signal.SIGKILL else ''}"
