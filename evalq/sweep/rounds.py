"""Further rounds of a sweep's loads: every other one in reverse (A B B A), so that drift falls on all cells alike.

They run in this process, one cell at a time, after every cell has been measured; candidates are judged anew afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evalq.errors import ConfigError
from evalq.judge.floor import read_floor
from evalq.load_stage import with_load
from evalq.pipeline import Measured, judge_cell
from evalq.preparation import Prepared, as_baseline
from evalq.report.progress import QuietWatcher
from evalq.sweep.flow import track
from evalq.sweep.jobs import attempt
from evalq.sweep.results import CellResult
from evalq.tracking import Study


@dataclass
class Loaded:
    """A record of the sweep and the cell it is of; `results` are the cells it is the measurement or the baseline of."""

    cell: Prepared
    measured: Measured
    results: list[CellResult]


def refuse_rounds_elsewhere(cells: Sequence[Prepared], executor: str, workers: int) -> None:
    """Errors: ConfigError when cells would run beside each other or on other machines: there is no order to turn round."""
    if any(cell.config.load.rounds > 1 for cell in cells) and (executor != "local" or workers > 1):
        raise ConfigError(
            "load.rounds above 1 turns the order of the cells round, so they run one after the other on one machine; "
            "give executor=local executor.workers=1, or load.rounds=1"
        )


def loaded_cells(cells: Sequence[Prepared], results: Sequence[CellResult]) -> list[Loaded]:
    """Every record of the sweep that has a load, in the order in which they were measured: a baseline before its candidates."""
    found: dict[str, Loaded] = {}
    for cell, result in zip(cells, results, strict=True):
        for own, measured in ((as_baseline(cell), result.baseline), (cell, result.measured)):
            if measured is not None and measured.record.load_results:
                entry = found.setdefault(measured.record.record_id, Loaded(own, measured, []))
                entry.results.append(result)
    return list(found.values())


def load_again(
    cells: Sequence[Prepared],
    results: Sequence[CellResult],
    watcher: QuietWatcher,
    command: Sequence[str],
    study: Callable[[Prepared], Study],
) -> None:
    """Rounds 2 to load.rounds. A round that fails leaves the earlier ones, and the cell says so."""
    loaded = loaded_cells(cells, results)
    for round_ in range(2, max((cell.config.load.rounds for cell in cells), default=1) + 1):
        for entry in loaded[::-1] if round_ % 2 == 0 else loaded:
            if round_ <= entry.cell.config.load.rounds:
                _run_round(entry, round_, watcher, command)
    for cell, result in zip(cells, results, strict=True):
        if cell.config.load.rounds > 1 and result.measured is not None:
            _judge_anew(cell, result)
            track(study(cell), result.name, result.measured, result.error, watcher)


def _run_round(entry: Loaded, round_: int, watcher: QuietWatcher, command: Sequence[str]) -> None:
    watcher.cell(f"{entry.cell.name} (round {round_})")
    outcome = attempt(lambda: with_load(entry.cell, entry.measured, watcher, command, round_))
    for result in entry.results:
        if outcome.error is not None:
            result.error, result.trace = result.error or outcome.error, result.trace or outcome.trace
        elif result.measured is not None and result.measured.folder == entry.measured.folder:
            result.measured = outcome.measured
        else:
            result.baseline = outcome.measured
    if outcome.measured is not None:
        entry.measured = outcome.measured
    else:
        watcher.say(f"failed: {outcome.error}")


def _judge_anew(cell: Prepared, result: CellResult) -> None:
    baseline, measured = result.baseline, result.measured
    if baseline is None or measured is None or result.verdict is None:
        return
    result.floor = read_floor(cell.places.records, baseline.record, cell.config.gate.metric)
    result.verdict = judge_cell(cell, baseline, measured, result.floor)
