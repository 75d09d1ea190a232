"""Tracking as the pipeline sees it: start a study, hand its records over, end it. Nothing waits for MLflow."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from evalq.config import PathsConfig, TrackingConfig
from evalq.errors import MissingExtraError
from evalq.records import read_record
from evalq.tracking.manifest import add_cell, end_manifest, mark_pending, open_manifest, read_manifest
from evalq.tracking.process import ChildProcess
from evalq.tracking.store import Store, redact, resolve_store

Say = Callable[[str], None]
NOT_YET = "the upload had not ended when evalq did"


@dataclass
class Outcome:
    """What became of a study's uploads. `messages` are sentences for people."""

    where: str = "MLflow: off"
    uploaded: int = 0
    pending: int = 0
    experiment_id: str | None = None
    run_id: str | None = None
    seconds: float = 0.0  # that the end of the study waited
    messages: list[str] = field(default_factory=list)


class Study(Protocol):
    """An open study; as a context manager it ends FINISHED, FAILED (exception) or KILLED (Ctrl-C, SIGTERM)."""

    def log_cell(self, folder: Path, *, reused: bool = False) -> None: ...

    def finish(self, status: str = "FINISHED") -> Outcome: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tracker(Protocol):
    """Where studies are logged. `where` is the start line for people."""

    where: str

    def start_study(self, model: str, gpu: str, quants: list[str]) -> Study: ...


def open_tracker(config: TrackingConfig, paths: PathsConfig, say: Say = lambda text: None) -> Tracker:
    """The tracker of a config. MLflow missing is a warning through `say`, never a failure. Errors: ConfigError."""
    if not config.enabled:
        return NullTracker("MLflow: off")
    store = resolve_store(config, paths)
    if importlib.util.find_spec("mlflow") is None:
        reason = str(MissingExtraError("Tracking in MLflow", "mlflow", "measure"))
        say(f"warning: {reason}; records stay local, `evalq sync` can upload them later")
        return NullTracker(f"MLflow: not installed; records stay in {store.records}", store, config, reason)
    return MlflowTracker(config, store, say)


def log_study(
    tracker: Tracker, model: str, gpu: str, folders: list[Path], reused: tuple[Path, ...] = (), status: str = "FINISHED"
) -> Outcome:
    """Log a whole study whose records exist already."""
    study = tracker.start_study(model, gpu, [read_record(folder).cell.quant for folder in folders])
    for folder in folders:
        study.log_cell(folder, reused=folder in reused)
    return study.finish(status)


class _Ending:
    """Ends a study by how its `with` block ended."""

    def finish(self, status: str = "FINISHED") -> Outcome:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish("FINISHED")
        else:
            self.finish("FAILED" if issubclass(kind, Exception) else "KILLED")


class MlflowTracker:
    """Logs to an MLflow store through a process of its own."""

    def __init__(self, config: TrackingConfig, store: Store, say: Say = lambda text: None) -> None:
        self._config = config
        self._store = store
        self._say = say
        self.where = store.where

    def start_study(self, model: str, gpu: str, quants: list[str]) -> Study:
        """Returns at once; MLflow starts in the background while the engine does."""
        path = _begin(self._config, self._store, model, gpu, quants)
        return MlflowStudy(self._store, path, self._config.finish_limit_seconds, self._say)


class MlflowStudy(_Ending):
    """One open study. Every record is marked sync_pending before MLflow hears of it."""

    def __init__(self, store: Store, path: Path, limit_seconds: float, say: Say) -> None:
        self._store = store
        self._path = path
        self._limit_seconds = limit_seconds
        self._say = say
        self._folders: dict[str, Path] = {}
        self._done: set[str] = set()
        self._outcome = Outcome(store.where)
        self._ended = False
        self._child = ChildProcess(store)
        self._child.send(do="open", manifest=str(path))

    def log_cell(self, folder: Path, *, reused: bool = False) -> None:
        """Hand a written record over, after its verdict where it has one. Returns at once. Errors: RecordError."""
        record = read_record(folder)
        manifest = add_cell(self._path, self._store.records, folder, record, reused)
        mark_pending(folder, self._store, manifest.study, NOT_YET)
        self._folders[record.record_id] = folder
        self._done.discard(record.record_id)
        self._child.send(do="cell", record_id=record.record_id)
        self._take_events(0.0)

    def finish(self, status: str = "FINISHED") -> Outcome:
        """End the study; waits for uploads under way, at most `tracking.finish_limit_seconds` (less when killed)."""
        if self._ended:
            return self._outcome
        self._ended = True
        began = time.monotonic()
        self._child.send(do="finish", status=status)
        limit = self._limit_seconds if status != "KILLED" else min(self._limit_seconds, self._store.timeout_seconds)
        finished = self._take_events(limit)
        if finished:
            self._child.end()
        else:
            self._child.kill()
            end_manifest(self._path, status)
        self._report(finished, limit)
        self._outcome.seconds = time.monotonic() - began
        return self._outcome

    def _take_events(self, wait_seconds: float) -> bool:
        """Note what the child said; True once it has finished the study."""
        deadline = time.monotonic() + wait_seconds
        while (event := self._child.next_event(deadline - time.monotonic())) is not None:
            kind = event["event"]
            if kind == "finished":
                return True
            if kind == "ended":
                self._message("the process that talks to MLflow ended by itself; its log is beside the studies")
                return False
            self._note(kind, event)
        return False

    def _note(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "opened":
            self._outcome.experiment_id, self._outcome.run_id = event["experiment"], event["run"]
        elif kind == "cell" and event["state"] in ("uploaded", "present"):
            self._done.add(event["record_id"])
        elif kind == "cell":
            self._message(f"record {event['record_id']}: {event['reason']}")
        elif kind == "unreachable":
            self._message(f"MLflow does not take runs now: {event['reason']}; records stay local until `evalq sync`")
        elif kind == "note":
            self._message(event["text"])

    def _message(self, text: str) -> None:
        if text not in self._outcome.messages:
            self._outcome.messages.append(text)
            self._say(text)

    def _report(self, finished: bool, limit: float) -> None:
        left = set(self._folders) - self._done
        self._outcome.uploaded, self._outcome.pending = len(self._done), len(left)
        if left and not finished:
            self._message(f"MLflow at {redact(self._store.uri)} was not done after {limit:g} s and was left alone")
        if left:
            self._message(f"{len(left)} of {len(self._folders)} records are not whole in MLflow yet; run: evalq sync")


class NullTracker:
    """Logs nothing. With a store it still writes down which records belong together, for a later `evalq sync`."""

    def __init__(
        self, where: str, store: Store | None = None, config: TrackingConfig | None = None, reason: str = ""
    ) -> None:
        self.where = where
        self._store = store
        self._config = config or TrackingConfig()
        self._reason = reason

    def start_study(self, model: str, gpu: str, quants: list[str]) -> Study:
        if self._store is None:
            return NullStudy(Outcome(self.where))
        path = _begin(self._config, self._store, model, gpu, quants)
        return LocalStudy(self._store, path, Outcome(self.where, messages=[self._reason]))


class NullStudy(_Ending):
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def log_cell(self, folder: Path, *, reused: bool = False) -> None:
        return

    def finish(self, status: str = "FINISHED") -> Outcome:
        return self._outcome


class LocalStudy(_Ending):
    """A study that is only written down on disk."""

    def __init__(self, store: Store, path: Path, outcome: Outcome) -> None:
        self._store = store
        self._path = path
        self._outcome = outcome

    def log_cell(self, folder: Path, *, reused: bool = False) -> None:
        manifest = add_cell(self._path, self._store.records, folder, read_record(folder), reused)
        mark_pending(folder, self._store, manifest.study, self._outcome.messages[0])

    def finish(self, status: str = "FINISHED") -> Outcome:
        end_manifest(self._path, status)
        self._outcome.pending = len(read_manifest(self._path).cells)
        return self._outcome


def _begin(config: TrackingConfig, store: Store, model: str, gpu: str, quants: list[str]) -> Path:
    study, experiment = names_of(config, model, gpu, quants)
    return open_manifest(store, study, experiment, model, gpu, join=config.study is not None)


def names_of(config: TrackingConfig, model: str, gpu: str, quants: list[str]) -> tuple[str, str]:
    """Names of study and experiment. A study that was given no name gets its cells and the time."""
    experiment = config.experiment or f"{model} on {gpu}"
    if config.study:
        return config.study, experiment
    shown = ", ".join(quants[:4]) + (f" and {len(quants) - 4} more" if len(quants) > 4 else "")
    stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{shown} {stamp}", experiment
