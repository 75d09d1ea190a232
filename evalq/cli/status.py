"""`evalq status`: where the sweeps of a store are: what is done, what runs and since when, what failed and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalq.errors import EXIT_INCONCLUSIVE, EXIT_MEASUREMENT, EXIT_PASS, ConfigError

if TYPE_CHECKING:
    from evalq.sweep.journal import Entry, Plan

EPILOG = """exit codes: 0 every cell of the shown sweeps is done, 2 there is no such sweep, 3 a sweep is still running,
5 cells are missing or failed."""


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = argparse.ArgumentParser(prog="evalq status", description=__doc__, epilog=EPILOG)
    made.add_argument("sweep", nargs="?", help="a sweep's name or the beginning of one (default: the newest)")
    made.add_argument("--root", metavar="DIR", help="the store (default: $EVALQ_HOME, else runs in this project)")
    made.add_argument("--all", action="store_true", help="every sweep of the store, one line each")
    made.add_argument("--json", action="store_true", help="one JSON document")
    return made


@dataclasses.dataclass(frozen=True)
class State:
    """One sweep as it stands."""

    folder: Path
    plan: Plan
    entries: list[Entry]
    running: bool

    def rows(self) -> list[dict[str, Any]]:
        """One row per measurement; cells without an entry are planned, and running ones of a dead sweep are lost."""
        known = {entry.key: entry for entry in self.entries}
        planned = [(cell.key, cell.name) for cell in self.plan.cells if cell.key not in known]
        rows = [self._row(entry) for entry in self.entries]
        return rows + [{"key": key, "name": name, "state": "planned", "detail": ""} for key, name in planned]

    def _row(self, entry: Entry) -> dict[str, Any]:
        from evalq.report.live import tail

        state, detail = entry.state, entry.message or ""
        if state == "running":
            who = f"pid {entry.owner.pid} on {entry.owner.host}" if entry.owner else ""
            since = time.time() - (entry.began_at or time.time())
            line = tail(Path(entry.log)) if entry.log else ""
            detail = f"{who}, for {since:.0f} s" + (f": {line}" if line else "")
            if not self.running:
                state, detail = "lost", f"{who} is gone; the same command runs it again"
        elif state == "done":
            took = (entry.ended_at or 0.0) - (entry.began_at or entry.ended_at or 0.0)
            detail = f"{entry.record}" + (" (stored)" if entry.reused else f", {took:.0f} s")
        elif state == "failed":
            detail = f"{entry.kind}: {entry.message}"
        return {"key": entry.key, "name": entry.name, "state": state, "detail": detail, "attempt": entry.attempt}

    @property
    def done(self) -> int:
        """Cells that are measured, of those that were asked for."""
        finished = {entry.key for entry in self.entries if entry.state == "done"}
        return sum(cell.key in finished for cell in self.plan.cells)

    @property
    def word(self) -> str:
        if self.running:
            return "running"
        return "complete" if self.done == len(self.plan.cells) else "incomplete"

    @property
    def exit_code(self) -> int:
        return {"running": EXIT_INCONCLUSIVE, "complete": EXIT_PASS}.get(self.word, EXIT_MEASUREMENT)


def main(argv: list[str]) -> int:
    """Show; returns the exit code. Errors: ConfigError when the store has no such sweep."""
    arguments = parser().parse_args(argv)
    root = _root(arguments.root)
    states = read_states(root)
    if not states:
        raise ConfigError(
            f"no sweep under {root} (a single run is not listed); evalq sweep or python -m evalq -m starts one, "
            "--root names another store"
        )
    if arguments.sweep:
        states = [state for state in states if state.plan.sweep.startswith(arguments.sweep)]
        if not states:
            raise ConfigError(f"no sweep called {arguments.sweep} under {root}; evalq status --all lists them")
    shown = states if arguments.all else states[-1:]
    if arguments.json:
        print(json.dumps([_data(state) for state in shown], indent=1))
    else:
        for state in shown:
            _show(state, brief=arguments.all)
    return max((state.exit_code for state in shown), default=EXIT_PASS)


def read_states(root: Path) -> list[State]:
    """All sweeps of a store, the one that began last at the end."""
    from evalq.sweep.journal import SWEEPS, is_running, read_entries, read_plan

    found = []
    for folder in (root / SWEEPS).glob("*/"):
        plan = read_plan(folder)
        if plan is not None:
            found.append(State(folder, plan, read_entries(folder), is_running(folder)))
    return sorted(found, key=lambda state: state.plan.owner.started)


def _root(given: str | None) -> Path:
    if given:
        return Path(given)
    home = os.environ.get("EVALQ_HOME")
    if home:
        return Path(home)
    from evalq.app import default_root

    return default_root()


def _show(state: State, brief: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from evalq.sweep.journal import when

    console = Console()
    began = when(state.plan.began_at)
    console.print(
        f"{state.plan.sweep}: {state.word}, {state.done} of {len(state.plan.cells)} cells done; began {began} UTC, "
        f"executor {state.plan.executor}",
        markup=False,
        highlight=False,
    )
    if brief:
        return
    colours = {"done": "green", "failed": "red", "lost": "red", "running": "cyan"}
    table = Table()
    for name in ("measurement", "state", "detail"):
        table.add_column(name)
    for row in state.rows():
        table.add_row(row["name"], Text(row["state"], style=colours.get(row["state"], "dim")), Text(row["detail"]))
    console.print(table)
    if state.word == "incomplete" and state.plan.command:
        console.print(f"go on with: {' '.join(state.plan.command)}", markup=False, highlight=False)


def _data(state: State) -> dict[str, Any]:
    return {
        "sweep": state.plan.sweep,
        "folder": str(state.folder),
        "state": state.word,
        "expected": len(state.plan.cells),
        "done": state.done,
        "exit_code": state.exit_code,
        "measurements": state.rows(),
    }
