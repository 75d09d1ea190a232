"""A job is one measurement that a sweep needs; several cells may wait for the same one. Its outcome is a record or an error."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from evalq.errors import ConfigError, EvalqError, InfeasibleError, MeasurementError
from evalq.pipeline import Measured, disk_error
from evalq.preparation import Prepared


@dataclass(frozen=True)
class Job:
    """One measurement. Equal `key` = the same one; `rank` says what comes first."""

    key: str
    name: str  # for people, no other job of the sweep has it
    cell: Prepared
    rank: int = 0
    since: float | None = None  # a stored record made at or after this time will do (Unix seconds); None = none will
    hint: str = ""  # id of the record that an earlier start of this sweep made

    @property
    def devices(self) -> int:
        """GPUs that it takes; 1 on the CPU."""
        engine = self.cell.config.engine
        return 1 if self.cell.is_cpu else engine.tensor_parallel_size * engine.pipeline_parallel_size


@dataclass
class Outcome:
    """How a job ended. `lost`: its process or machine went away, which says nothing about the cell."""

    measured: Measured | None = None
    error: EvalqError | None = None
    trace: str = ""
    lost: bool = False


# What one cell wants, one after the other; several flows that want the same job get the same outcome.
Flow = Generator[Job, Outcome, None]


@dataclass(frozen=True)
class Event:
    """Something a job did: a line of its process, or its end."""

    job: Job
    told: dict[str, Any]
    outcome: Outcome | None = None


class Executor(Protocol):
    """Where jobs run. `wait` returns what happened, after `seconds` at the latest."""

    def room(self, job: Job) -> bool: ...
    def start(self, job: Job) -> None: ...
    def wait(self, seconds: float) -> list[Event]: ...
    def close(self) -> None: ...


def attempt(action: Callable[[], Measured]) -> Outcome:
    """Whatever goes wrong in a measurement is its own outcome; only an interrupt ends the sweep."""
    outcome = Outcome()
    try:
        outcome.measured = action()
    except Exception as error:
        outcome.error, outcome.trace = known_error(error), traceback.format_exc()
    return outcome


def known_error(error: Exception) -> EvalqError:
    """The error in one sentence."""
    if isinstance(error, EvalqError):
        return error
    if isinstance(error, OSError):
        return disk_error(error)
    return MeasurementError(
        f"an unexpected {type(error).__name__} ended this cell: {error}; please report it with its trace", "engine"
    )


def told_error(message: str, exit_code: int, kind: str) -> EvalqError:
    """An error that another process told about."""
    if exit_code == InfeasibleError.exit_code:
        return InfeasibleError(message)
    if exit_code == ConfigError.exit_code:
        return ConfigError(message)
    with contextlib.suppress(ValueError):
        return MeasurementError(message, kind)
    return MeasurementError(message, "engine")


def failure_folder(error: EvalqError | None) -> Path | None:
    """The folder of the failed record that pipeline.measure noted on the error."""
    for note in getattr(error, "__notes__", []):
        if note.startswith("record: ") and note != "record: None":
            return Path(note.removeprefix("record: "))
    return None
