"""What a person sees while a cell is measured: bars with an ETA on a terminal, plain lines elsewhere. All on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_EVERY_SECONDS = 30.0


class QuietWatcher:
    """Says nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def cell(self, name: str) -> None: ...

    def stage(self, stage: str, label: str) -> None: ...

    def progress(self, done: int, total: int, unit: str) -> None: ...

    def scored(self, group: str, metrics: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def expect(self, cells: list[str]) -> None:
        """The cells that the sweep was asked for."""

    def state(self, cell: str, state: str, detail: str = "") -> None:
        """A measurement is planned, running, done or failed."""

    def log(self, cell: str, file: str | None) -> None:
        """Where the engine of a running measurement writes its log."""

    def line(self, text: str) -> None:
        """The last line of an engine's log that lies on another machine."""


class PlainWatcher(QuietWatcher):
    """One line per stage, and one every half minute in long stages: for logs and CI."""

    def __init__(self) -> None:
        self._cell = ""
        self._stage_began = self._last = time.monotonic()
        self._label = ""

    def cell(self, name: str) -> None:
        self._cell = name

    def stage(self, stage: str, label: str) -> None:
        self._stage_began = self._last = time.monotonic()
        self._label = label
        self.say(f"{label} ...")

    def progress(self, done: int, total: int, unit: str) -> None:
        if done == 0 and unit.startswith(
            "waiting"
        ):  # told once by whoever waits; nothing else would be printed meanwhile
            self.say(unit)
        now = time.monotonic()
        if now - self._last >= PLAIN_EVERY_SECONDS and 0 < done < total:
            self._last = now
            left = (now - self._stage_began) * (total - done) / done
            self.say(f"{self._label}: {done} of {total} {unit}, about {left:.0f} s left")

    def scored(self, group: str, metrics: dict[str, Any]) -> None:
        self.say(f"{group}: {in_short(metrics)}")

    def say(self, text: str) -> None:
        print(f"[{self._cell}] {text}" if self._cell else text, file=sys.stderr, flush=True)


class BarWatcher(QuietWatcher):
    """Bars with an ETA: one for the current stage."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bars: Progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task: TaskID | None = None
        self._cell = ""
        self._label = ""
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish_stage()
        self._bars.stop()

    def cell(self, name: str) -> None:
        self._finish_stage()
        self._cell = name

    def stage(self, stage: str, label: str) -> None:
        self._finish_stage()
        self._label, self._began = label, time.monotonic()
        self._task = self._bars.add_task(f"{self._cell}  {label}", total=None, unit="")

    def progress(self, done: int, total: int, unit: str) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total, unit=unit)

    def scored(self, group: str, metrics: dict[str, Any]) -> None:
        self.say(f"{group}: {in_short(metrics)}")

    def say(self, text: str) -> None:
        self._bars.console.print(f"{self._cell}  {text}" if self._cell else text, markup=False, highlight=False)

    def _finish_stage(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._bars.console.print(
                f"{self._cell}  {self._label}: {time.monotonic() - self._began:.1f} s", markup=False, highlight=False
            )
            self._task = None


def watcher(wanted: bool) -> QuietWatcher:
    """Bars on a terminal, lines elsewhere, nothing when not wanted."""
    if not wanted:
        return QuietWatcher()
    return BarWatcher() if sys.stderr.isatty() else PlainWatcher()


def in_short(metrics: dict[str, Any]) -> str:
    """ "acc 0.500, acc_norm 0.460" for one group of tasks."""
    parts = []
    for task, values in metrics.items():
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, int | float))
        parts.append(f"{task} {shown}" if len(metrics) > 1 else shown)
    return "; ".join(parts)
