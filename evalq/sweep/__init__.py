"""Sweeps: cells by model, scheme, GPU and engine; baselines first and shared, everything resumable, one table at the end.

check.py      refusals, duplicates          flow.py       what each cell needs, in order
schedule.py   each job once, to all waiters journal.py    the state on disk
rounds.py     loads once more, in reverse
inline.py     in this process               local.py      processes of this machine      raycluster.py   a Ray cluster

A single run is a sweep of one cell without state on disk.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

from evalq.config import ExecutorConfig, RunConfig
from evalq.errors import ConfigError
from evalq.measure.device import gpu_ids
from evalq.measure.launch import WORKER
from evalq.preparation import Prepared
from evalq.report.progress import QuietWatcher
from evalq.sweep.cell import CELL
from evalq.sweep.check import Checked, cell_key, check_cells
from evalq.sweep.flow import Group, groups_of, track
from evalq.sweep.inline import InlineExecutor
from evalq.sweep.jobs import Executor, Job, Outcome
from evalq.sweep.journal import SWEEPS, Journal, PlannedCell, open_journal, when
from evalq.sweep.local import ProcessExecutor
from evalq.sweep.results import SEVERITY, CellResult, SweepResult, severity, summary
from evalq.sweep.rounds import load_again, refuse_rounds_elsewhere
from evalq.sweep.schedule import Scheduler
from evalq.tracking import Study, Tracker, open_tracker

__all__ = ["SEVERITY", "CellResult", "SweepResult", "run", "severity", "summary"]


def run(
    configs: Sequence[RunConfig],
    watcher: QuietWatcher,
    command: Sequence[str] = WORKER,
    cell_command: Sequence[str] = CELL,
    kept: bool | None = None,
    argv: Sequence[str] = (),
) -> SweepResult:
    """Run all cells. `kept`: with state on disk, to be resumed; None = when there are several cells.

    Errors: ConfigError before anything starts; failures of single cells are in the result.
    """
    executor_config = one_executor(configs)
    checked = check_cells(configs, elsewhere=executor_config.name == "ray")
    for text in checked.duplicates:
        watcher.say(text)
    result = SweepResult(checked.results, messages=list(checked.duplicates))
    if not checked.cells:
        return result
    refuse_rounds_elsewhere(checked.cells, executor_config.name, local_workers(checked.cells)[1])
    kept = len(configs) > 1 if kept is None else kept
    journal = _journal(checked, kept, argv, watcher)
    result.folder = str(journal.folder or "")
    studies = Studies(checked.cells, watcher)
    executor: Executor | None = None
    try:
        executor = make_executor(checked.cells, journal, watcher, command, cell_command)
        watcher.expect(list(checked.names.values()))
        _schedule(checked, journal, executor, studies, watcher)
        load_again(checked.cells, [checked.of_cell[id(c.config)] for c in checked.cells], watcher, command, studies.of)
    except BaseException as error:
        if executor is not None:
            executor.close()
        journal.end(None, result.done)
        studies.abandon()
        if kept and not isinstance(error, ConfigError):
            watcher.say(
                f"interrupted with {result.done} of {len(result.cells)} cells done; "
                "the same command goes on with the others"
            )
        raise
    executor.close()
    journal.end(result.exit_code, result.done)
    where, messages = studies.finish("FAILED" if any(cell.error for cell in result.cells) else "FINISHED")
    result.where = where
    result.messages.extend(messages)
    return result


def one_executor(configs: Sequence[RunConfig]) -> ExecutorConfig:
    """The executor of a sweep. Errors: ConfigError when its cells name several."""
    found = {json.dumps(dataclasses.asdict(config.executor), sort_keys=True) for config in configs}
    if len(found) > 1:
        raise ConfigError("a sweep has one executor, and its cells name several; leave executor out of the lists")
    return configs[0].executor if configs else ExecutorConfig()


def planned_cells(checked: Checked) -> list[PlannedCell]:
    """The cells as they are written into the sweep's plan."""
    found = []
    for cell in checked.cells:
        config, key = cell.config, cell_key(cell)
        names = (config.model.name, config.quant.name, config.gpu.name, config.engine.name)
        found.append(PlannedCell(key, checked.names[key], *names, cell.is_baseline))
    return found


def make_executor(
    cells: Sequence[Prepared],
    journal: Journal,
    watcher: QuietWatcher,
    command: Sequence[str],
    cell_command: Sequence[str],
) -> Executor:
    """Where the cells run: this process when one fits at a time, processes when several do, Ray when asked for."""
    config = cells[0].config.executor
    logs = (journal.folder or cells[0].places.root / SWEEPS) / "logs"
    if config.name == "ray":
        from evalq.sweep.raycluster import RayExecutor

        return RayExecutor(config, cells[0].places, watcher.say, command, cell_command)
    devices, workers = local_workers(cells)
    if workers == 1:
        return InlineExecutor(watcher, command, journal)
    return ProcessExecutor(workers, devices, command, cell_command, logs)


def local_workers(cells: Sequence[Prepared]) -> tuple[int, int]:
    """Devices of this machine, and how many cells run on them at once."""
    asked = cells[0].config.executor.workers
    if all(cell.is_cpu for cell in cells):
        return asked or 1, asked or 1
    devices = max(1, len(gpu_ids()))
    smallest = min(Job("", "", cell).devices for cell in cells)
    return devices, max(1, min(asked or devices, devices // smallest, len(cells)))


class Studies:
    """One MLflow study per model and GPU, opened when its first record is there."""

    def __init__(self, cells: Sequence[Prepared], watcher: QuietWatcher) -> None:
        self._cells = cells
        self._watcher = watcher
        self._open: dict[tuple[str, str], Study] = {}

    def of(self, cell: Prepared) -> Study:
        names = (cell.config.model.name, cell.config.gpu.name)
        if names not in self._open:
            paths = dataclasses.replace(cell.config.paths, root=str(cell.places.root))
            tracker: Tracker = open_tracker(cell.config.tracking, paths, self._watcher.say)
            quants = [c.config.quant.name for c in self._cells if (c.config.model.name, c.config.gpu.name) == names]
            self._watcher.say(tracker.where)
            self._open[names] = tracker.start_study(*names, quants)
        return self._open[names]

    def abandon(self) -> None:
        for study in self._open.values():
            study.finish("KILLED")

    def finish(self, status: str) -> tuple[str, list[str]]:
        """Where the studies are, and what there is to say of them."""
        where, messages = "", list[str]()
        for study in self._open.values():
            outcome = study.finish(status)
            where = outcome.where
            messages.extend(outcome.messages)
        return where, messages


def _journal(checked: Checked, kept: bool, argv: Sequence[str], watcher: QuietWatcher) -> Journal:
    if not kept:
        return Journal(None, say=watcher.say)
    first = checked.cells[0]
    executor = first.config.executor
    journal = open_journal(
        first.places.root,
        planned_cells(checked),
        argv,
        executor.name,
        executor.resume,
        watcher.say,
        str(first.places.records),
    )
    left = [cell.key for cell in planned_cells(checked) if journal.record_of(cell.key)]
    if journal.resumed:
        watcher.say(
            f"going on with a sweep that began {when(journal.began)} UTC: {len(left)} of {len(checked.cells)} cells are "
            "measured (executor.resume=false measures them anew)"
        )
    return journal


def _schedule(checked: Checked, journal: Journal, executor: Executor, studies: Studies, watcher: QuietWatcher) -> None:
    def finished(job: Job, outcome: Outcome) -> None:
        if job.cell.is_baseline:  # a candidate is handed over with its verdict, by its own flow
            track(studies.of(job.cell), job.name, outcome.measured, outcome.error, watcher)

    def study_of(cell: Prepared) -> Callable[[], Study]:
        return lambda: studies.of(cell)

    groups = [
        Group(rank, cells, checked, journal, watcher, study_of(cells[0]))
        for rank, cells in enumerate(groups_of(checked.cells))
    ]
    for group in groups:
        group.study()  # MLflow starts in the background while the first engine does
    scheduler = Scheduler(executor, journal, watcher, finished, checked.cells[0].config.executor.retries)
    scheduler.run(flow for group in groups for flow in group.flows())
