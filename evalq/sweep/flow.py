"""What each cell needs, in order: its baseline, its own measurement, the verdict; more documents while it is INCONCLUSIVE.

Flows are generators that ask for jobs and get outcomes. They know nothing of processes; evalq.sweep.schedule runs them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from evalq.errors import ConfigError, EvalqError, InfeasibleError, MeasurementError
from evalq.judge.floor import aa_floor, read_floor, write_floor
from evalq.load_stage import load_failure
from evalq.pipeline import Measured, judge_cell
from evalq.preparation import Prepared, as_baseline
from evalq.report.progress import QuietWatcher
from evalq.sweep.check import Checked, baseline_key, cell_key
from evalq.sweep.jobs import Flow, Job, Outcome, attempt, failure_folder
from evalq.sweep.journal import Journal
from evalq.sweep.results import CellResult
from evalq.tracking import Study


@dataclasses.dataclass
class Group:
    """The cells that share one baseline. `rank` orders groups: one is finished before the next begins, where there is a choice."""

    rank: int
    cells: list[Prepared]
    checked: Checked
    journal: Journal
    watcher: QuietWatcher
    study: Callable[[], Study]

    def flows(self) -> Iterator[Flow]:
        """One for the yardstick, then one for each candidate."""
        yield self._yardstick()
        for cell in self.cells:
            if not cell.is_baseline:
                yield self._candidate(cell)

    def result(self, cell: Prepared) -> CellResult:
        return self.checked.of_cell[id(cell.config)]

    @functools.cached_property
    def _own_baseline(self) -> Prepared | None:
        """The baseline, where it was asked for as a cell of its own."""
        return next((cell for cell in self.cells if cell.is_baseline), None)

    @functools.cached_property
    def _wants_floor(self) -> bool:
        return any(cell.config.aa for cell in self.cells)

    def _first_limit(self) -> int | None:
        config = self.cells[0].config
        return config.gate.looks[0] if config.gate.extend and config.gate.looks else config.tasks.perplexity_limit

    def _yardstick(self) -> Flow:
        """The baseline of the first look, measured once for all; with `aa`, its A/A floor too."""
        for cell in self.cells:
            for warning in cell.warnings:
                self.watcher.cell(self.checked.names[cell_key(cell)])
                self.watcher.say(f"warning: {warning}")
        outcome = yield self._baseline_job(self._first_limit())
        own = self.result(self._own_baseline) if self._own_baseline else None
        if own is not None:
            own.measured, own.error, own.trace = outcome.measured, outcome.error, outcome.trace
            own.error = own.error or load_failure(own.measured)
        if self._wants_floor and outcome.measured is not None:
            again = yield self._again_job()
            if again.measured is not None:
                self._keep_floor(outcome.measured, again.measured)

    def _candidate(self, cell: Prepared) -> Flow:
        """Measure and judge one candidate; with gate.extend, on more documents for as long as it is INCONCLUSIVE.

        Every look is one of the planned gate.looks, whose intervals hold together (evalq.judge.sequential).
        """
        gate, result = cell.config.gate, self.result(cell)
        plan = list(gate.looks) if gate.extend and gate.looks else [cell.config.tasks.perplexity_limit]
        for limit in plan:
            baseline = yield self._baseline_job(limit)
            result.baseline = baseline.measured
            if baseline.error is not None or baseline.measured is None:
                result.error = without_baseline(baseline)
                self.journal.failed(cell_key(cell), self.checked.names[cell_key(cell)], result.error)
                return
            if self._wants_floor and limit == plan[0]:
                yield self._again_job()
            at_look = with_documents(cell, limit)
            result.measured = result.verdict = None  # an earlier look must not be judged again when this one fails
            outcome = yield self._job(at_look, self._name(cell, limit, plan[0]), self._anew(at_look))
            result.measured, result.error, result.trace = outcome.measured, outcome.error, outcome.trace
            if result.measured is not None:
                self._judge(result, at_look, baseline.measured, result.measured)
            # What was scored stands and is judged; that a load is missing is said all the same.
            result.error = result.error or load_failure(result.measured) or load_failure(baseline.measured)
            track(self.study(), result.name, result.measured, result.error, self.watcher)
            if result.error is not None or result.verdict is None or result.verdict.status != "INCONCLUSIVE":
                return
            if limit != plan[-1]:
                self.watcher.cell(result.name)
                self.watcher.say(f"inconclusive after {limit} documents; measuring more of them, as gate.extend asks")

    def _name(self, cell: Prepared, limit: int | None, first: int | None) -> str:
        name = self.checked.names[cell_key(cell)]
        return name if limit == first else f"{name} ({limit} documents)"

    def _baseline_job(self, limit: int | None) -> Job:
        yardstick = with_documents(as_baseline(self.cells[0]), limit)
        own = self._own_baseline
        name = self.checked.names[cell_key(own)] if own else self._baseline_name(yardstick)
        anew = own is not None or not yardstick.config.reuse_baseline
        since = self._anew(yardstick) if anew and limit == self._first_limit() else 0.0
        return self._job(yardstick, name if limit == self._first_limit() else f"{name} ({limit} documents)", since)

    def _baseline_name(self, yardstick: Prepared) -> str:
        """Baselines of several groups of one model are told apart by their engine, else by their key."""
        return yardstick.name if self.rank == 0 else f"{yardstick.name} {baseline_key(yardstick)[:6]}"

    def _again_job(self) -> Job:
        """The baseline once more, in reverse order and in smaller batches; what differs is the A/A floor."""
        yardstick = with_documents(as_baseline(self.cells[0]), self._first_limit())
        engine, load = yardstick.config.engine, yardstick.config.load
        changed = dataclasses.replace(
            yardstick.config,
            tasks=dataclasses.replace(yardstick.config.tasks, request_order="reverse", divergence="none"),
            engine=dataclasses.replace(engine, max_num_batched_tokens=max(256, engine.max_num_batched_tokens // 2)),
            load=dataclasses.replace(load, enabled=load.enabled and load.start == "scoring"),
        )
        again = dataclasses.replace(yardstick, config=changed)
        return self._job(again, f"{self._baseline_name(yardstick)} (A/A)", 0.0)

    def _job(self, cell: Prepared, name: str, since: float | None) -> Job:
        key = cell_key(cell)
        return Job(key, name, cell, self.rank, since, self.journal.record_of(key) if self.journal.resumed else "")

    def _anew(self, cell: Prepared) -> float | None:
        """None = measure it; a time = a record that this very sweep left behind, when it was interrupted in this cell, will do."""
        key = cell_key(cell)
        left = self.journal.may_have_left_a_record(key) or bool(self.journal.record_of(key))
        return self.journal.began if self.journal.resumed and left else None

    def _keep_floor(self, baseline: Measured, again: Measured) -> None:
        config, records = self.cells[0].config, self.cells[0].places.records
        metric = config.gate.metric
        try:
            floor = aa_floor(
                baseline.record, baseline.folder, again.record, again.folder, metric, config.gate.confidence
            )
        except EvalqError as error:
            self.watcher.say(f"warning: no A/A floor: {error}")
            return
        file = write_floor(records, baseline.record, floor, metric)
        self.watcher.say(
            f"A/A floor of {metric}: {floor.value:+.4%} [{floor.low:+.4%}, {floor.high:+.4%}], kept in {file}"
        )

    def _judge(self, result: CellResult, cell: Prepared, baseline: Measured, measured: Measured) -> None:
        def judged() -> Measured:
            result.floor = read_floor(cell.places.records, baseline.record, cell.config.gate.metric)
            result.verdict = judge_cell(cell, baseline, measured, result.floor)
            return measured

        outcome = attempt(judged)
        if outcome.error is not None:
            result.error, result.trace = outcome.error, outcome.trace
            self.watcher.cell(result.name)
            self.watcher.say(f"failed: {outcome.error}")


def groups_of(cells: Sequence[Prepared]) -> list[list[Prepared]]:
    """Cells by the baseline they share, in the order asked for."""
    groups: dict[str, list[Prepared]] = {}
    for cell in cells:
        groups.setdefault(baseline_key(cell), []).append(cell)
    return list(groups.values())


def with_documents(cell: Prepared, limit: int | None) -> Prepared:
    """The cell on the first `limit` perplexity documents."""
    tasks = dataclasses.replace(cell.config.tasks, perplexity_limit=limit)
    return dataclasses.replace(cell, config=dataclasses.replace(cell.config, tasks=tasks))


def without_baseline(baseline: Outcome) -> EvalqError:
    """What the failure of a baseline means for the cells that need it."""
    error = baseline.error
    text = f"no baseline to compare with: {error}"
    if isinstance(error, InfeasibleError):
        return InfeasibleError(text)
    if isinstance(error, ConfigError):
        return ConfigError(text)
    return MeasurementError(text, error.kind if isinstance(error, MeasurementError) else "incomplete")


def track(study: Study, name: str, measured: Measured | None, error: EvalqError | None, watcher: QuietWatcher) -> None:
    """Hand the record over; nothing that goes wrong here touches what was measured."""
    folder = measured.folder if measured else failure_folder(error)
    if folder is None:
        return
    try:
        study.log_cell(folder, reused=bool(measured and measured.reused))
    except (EvalqError, OSError) as problem:
        watcher.say(f"warning: {name} was not handed to MLflow: {problem}; run evalq sync later")
