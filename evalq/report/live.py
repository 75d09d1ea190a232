"""A sweep on a terminal: one table that is drawn again and again, with every cell's state, ETA and the last line of its log.

Elsewhere one line per change of a cell's state; in CI nothing between these.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from evalq.report.progress import PlainWatcher, QuietWatcher, in_short

if TYPE_CHECKING:
    from rich.console import RenderableType

ROWS = 20  # cells shown at once: those that run first, then the latest that ended, then the next ones
COLOURS = {"done": "green", "failed": "red", "running": "cyan"}
TAIL_BYTES = 2048


@dataclass
class Row:
    """One measurement as it is shown."""

    name: str
    state: str = "planned"
    detail: str = ""
    label: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    line: str = ""
    log: Path | None = None
    began: float = 0.0
    stage_began: float = 0.0
    ended: float = 0.0

    def eta(self) -> str:
        """Of the stage it is in, from what is done of it."""
        if self.state != "running" or not 0 < self.done < self.total:
            return ""
        left = (time.monotonic() - self.stage_began) * (self.total - self.done) / self.done
        return clock(left)


def clock(seconds: float) -> str:
    """ "1:02:03", "2:03"."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class Rows:
    """What a view knows of a sweep."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.began = time.monotonic()

    def row(self, name: str) -> Row:
        return self.rows.setdefault(name, Row(name))

    def set_state(self, name: str, state: str, detail: str) -> None:
        row, now = self.row(name), time.monotonic()
        row.state, row.detail = state, detail
        if state == "running":
            row.began = row.stage_began = now
        if state in ("done", "failed"):
            row.ended = now

    def counts(self) -> dict[str, int]:
        found = {"done": 0, "failed": 0, "running": 0, "planned": 0}
        for row in self.rows.values():
            found[row.state] += 1
        return found

    def eta_seconds(self) -> float | None:
        """Of the whole: the mean of what was measured here, for what is left, with as many at once as run now."""
        took = [row.ended - row.began for row in self.rows.values() if row.state == "done" and row.detail != "stored"]
        counts = self.counts()
        left = counts["planned"] + counts["running"]
        if not took or not left:
            return None
        spent = sum(time.monotonic() - row.began for row in self.rows.values() if row.state == "running")
        return max(0.0, left * sum(took) / len(took) - spent) / max(1, counts["running"])

    def shown(self) -> list[Row]:
        order = {"running": 0, "failed": 1, "done": 2, "planned": 3}
        rows = list(self.rows.values())
        if len(rows) <= ROWS:
            return rows
        latest = sorted(rows, key=lambda row: (order[row.state], -row.ended))
        kept = {id(row) for row in latest[: ROWS - 3]} | {
            id(row) for row in [r for r in rows if r.state == "planned"][:3]
        }
        return [row for row in rows if id(row) in kept]


class LiveWatcher(QuietWatcher):
    """The live table, on standard error."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self.rows = Rows()
        self._name = ""
        self._console = Console(stderr=True)
        self._live = Live(
            console=self._console,
            get_renderable=self.table,
            refresh_per_second=2,
            transient=True,
            redirect_stdout=False,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def cell(self, name: str) -> None:
        self._name = name

    def expect(self, cells: list[str]) -> None:
        for name in cells:
            self.rows.row(name)

    def state(self, cell: str, state: str, detail: str = "") -> None:
        self.rows.set_state(cell, state, detail)

    def log(self, cell: str, file: str | None) -> None:
        self.rows.row(cell).log = Path(file) if file else None

    def line(self, text: str) -> None:
        self.rows.row(self._name).line = text

    def stage(self, stage: str, label: str) -> None:
        row = self.rows.row(self._name)
        row.label, row.done, row.total, row.stage_began = label, 0, 0, time.monotonic()

    def progress(self, done: int, total: int, unit: str) -> None:
        row = self.rows.row(self._name)
        row.done, row.total, row.unit = done, total, unit

    def scored(self, group: str, metrics: dict[str, Any]) -> None:
        self.say(f"{group}: {in_short(metrics)}")

    def say(self, text: str) -> None:
        self._console.print(f"{self._name}  {text}" if self._name else text, markup=False, highlight=False)

    def table(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        counts, left = self.rows.counts(), self.rows.eta_seconds()
        title = f"evalq sweep: {counts['done']} done, {counts['running']} running, {counts['planned']} to go"
        title += f", {counts['failed']} failed" if counts["failed"] else ""
        title += f"; {clock(time.monotonic() - self.rows.began)} so far"
        title += f", about {clock(left)} left" if left is not None else ""
        table = Table(title=title, title_justify="left", expand=True)
        for name, ratio in (("cell", 3), ("state", 1), ("doing", 3), ("ETA", 1), ("engine log", 5)):
            table.add_column(name, ratio=ratio, no_wrap=True, overflow="ellipsis")
        for row in self.rows.shown():
            doing = row.label if row.state == "running" else row.detail
            if row.state == "running" and row.total:
                doing += f" {row.done}/{row.total} {row.unit}"
            log = (tail(row.log) or row.line) if row.state == "running" else ""
            table.add_row(row.name, Text(row.state, style=COLOURS.get(row.state, "dim")), doing, row.eta(), log)
        return table


def tail(file: Path | None) -> str:
    """The last line of a log that lies on this machine."""
    if file is None:
        return ""
    try:
        with open(file, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


class StateWatcher(QuietWatcher):
    """For CI: a line when a cell starts, ends or fails, and what the sweep itself has to say."""

    def __init__(self) -> None:
        self.rows = Rows()
        self._name = ""

    def cell(self, name: str) -> None:
        self._name = name

    def expect(self, cells: list[str]) -> None:
        for name in cells:
            self.rows.row(name)

    def state(self, cell: str, state: str, detail: str = "") -> None:
        self.rows.set_state(cell, state, detail)
        if state == "planned":
            return
        counts = self.rows.counts()
        row = self.rows.row(cell)
        took = f" after {clock(row.ended - row.began)}" if state in ("done", "failed") and row.began else ""
        text = f"{cell}: {state}{took}{f' ({detail})' if detail else ''}"
        print(f"{text} [{counts['done']} of {len(self.rows.rows)} done]", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        print(f"[{self._name}] {text}" if self._name else text, file=sys.stderr, flush=True)


class SweepLines(PlainWatcher):
    """For a file or a pipe: the lines of a single run, and one at each cell's end."""

    def state(self, cell: str, state: str, detail: str = "") -> None:
        if state in ("done", "failed"):
            self.cell(cell)
            self.say(f"{state}{f' ({detail})' if detail else ''}")


def sweep_watcher(wanted: bool) -> QuietWatcher:
    """The live table on a terminal, a line per state in CI, lines elsewhere, nothing when not wanted."""
    if not wanted:
        return QuietWatcher()
    if os.environ.get("CI"):
        return StateWatcher()
    return LiveWatcher() if sys.stderr.isatty() else SweepLines()
