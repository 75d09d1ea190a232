"""Cells, one after the other: baselines first and shared, a failing cell does not stop the others, one table at the end.

A single run is a sweep of one cell. Where cells run is an executor's business; here is the local one, in sequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalq.config import RunConfig, measured_part
from evalq.errors import (
    EXIT_CONFIG,
    EXIT_INCONCLUSIVE,
    EXIT_INFEASIBLE,
    EXIT_MEASUREMENT,
    EXIT_PASS,
    EXIT_QUALITY_FAIL,
    ConfigError,
    EvalqError,
    InfeasibleError,
    MeasurementError,
)
from evalq.measure.launch import WORKER
from evalq.pipeline import (
    Measured,
    Prepared,
    as_baseline,
    baseline_scheme,
    disk_error,
    effective_scheme,
    judge_cell,
    measure,
    prepare,
)
from evalq.records import Estimate, Verdict
from evalq.report.progress import QuietWatcher
from evalq.tracking import Study, Tracker, open_tracker

# From harmless to worst. An infrastructure failure outranks a quality failure: of that cell nothing is known.
SEVERITY = (EXIT_PASS, EXIT_INCONCLUSIVE, EXIT_INFEASIBLE, EXIT_QUALITY_FAIL, EXIT_CONFIG, EXIT_MEASUREMENT)


@dataclass
class CellResult:
    """What became of one cell."""

    name: str
    config: RunConfig
    measured: Measured | None = None
    baseline: Measured | None = None
    verdict: Verdict | None = None
    error: EvalqError | None = None
    trace: str = ""
    is_baseline: bool = False
    floor: Estimate | None = None  # A/A floor of this engine, where one is kept

    @property
    def exit_code(self) -> int:
        if self.error is not None:
            return self.error.exit_code
        if self.verdict is not None:
            return self.verdict.exit_code
        return EXIT_PASS if self.is_baseline and self.measured is not None else EXIT_MEASUREMENT


@dataclass
class SweepResult:
    """All cells of a sweep, in the order asked for, and where they were tracked."""

    cells: list[CellResult] = field(default_factory=list)
    where: str = ""
    messages: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return max((cell.exit_code for cell in self.cells), key=severity, default=EXIT_CONFIG)


def severity(exit_code: int) -> int:
    """Rank of an exit code; unknown ones are the worst."""
    return SEVERITY.index(exit_code) if exit_code in SEVERITY else len(SEVERITY)


def run(configs: Sequence[RunConfig], watcher: QuietWatcher, command: Sequence[str] = WORKER) -> SweepResult:
    """Run all cells. Errors: ConfigError before anything starts; failures of single cells are in the result."""
    prepared, results = _prepare_all(configs)
    result = SweepResult([results[id(config)] for config in configs])
    groups: dict[str, list[Prepared]] = {}
    for cell in prepared:
        groups.setdefault(_baseline_identity(cell), []).append(cell)
    studies: dict[tuple[str, str], Study] = {}
    try:
        for group in groups.values():
            study = _study_of(group[0], prepared, studies, watcher, result)
            _run_group(group, results, study, watcher, command)
    except BaseException:
        for study in studies.values():
            study.finish("KILLED")
        raise
    for study in studies.values():
        outcome = study.finish("FAILED" if any(cell.error for cell in result.cells) else "FINISHED")
        result.where = outcome.where
        result.messages.extend(outcome.messages)
    return result


def _prepare_all(configs: Sequence[RunConfig]) -> tuple[list[Prepared], dict[int, CellResult]]:
    """Check every cell before the first one runs; infeasible cells are results at once, bad configs stop everything."""
    prepared: list[Prepared] = []
    results: dict[int, CellResult] = {}
    problems: list[str] = []
    seen: dict[str, str] = {}
    for config in configs:
        name = f"{config.model.name} {config.quant.name}"
        results[id(config)] = CellResult(name, config)
        try:
            cell = prepare(config)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        except InfeasibleError as error:
            results[id(config)].error = error
            continue
        key = _effective_cell(cell)
        if key in seen:
            problems.append(
                f"{name} is the same as {seen[key]}: both have one effective config; leave one out or change its scheme"
            )
        elif config.quant.name == "baseline" and not cell.is_baseline:
            own = baseline_scheme(cell.config).kv_cache_dtype
            problems.append(
                f"scheme baseline is not the unquantised model (KV cache {config.quant.kv_cache_dtype}, the model's own is "
                f"{own}); choose +quant=baseline with quant.kv_cache_dtype={own}, or give it another quant.name"
            )
        elif cell.is_baseline and config.quant.name != "baseline":
            problems.append(
                f"scheme {config.quant.name} changes nothing: its effective config is the baseline's; "
                "give it groups, an engine quantization or another KV dtype"
            )
        seen.setdefault(key, name)
        results[id(config)] = CellResult(name, cell.config, is_baseline=cell.is_baseline)
        results[id(cell.config)] = results[id(config)]
        prepared.append(cell)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return prepared, results


def _effective_cell(cell: Prepared) -> str:
    """What the cell measures, without names of schemes."""
    data = measured_part(cell.config)
    data.pop("quant")
    looks = [cell.config.gate.extend, list(cell.config.gate.looks)]  # they decide how many documents are measured
    return json.dumps([data, looks, effective_scheme(cell.config.quant)], sort_keys=True)


def _baseline_identity(cell: Prepared) -> str:
    return _effective_cell(as_baseline(cell))


def _study_of(
    cell: Prepared,
    all_cells: Sequence[Prepared],
    studies: dict[tuple[str, str], Study],
    watcher: QuietWatcher,
    result: SweepResult,
) -> Study:
    """One study per model and GPU."""
    names = (cell.config.model.name, cell.config.gpu.name)
    if names not in studies:
        paths = dataclasses.replace(cell.config.paths, root=str(cell.places.root))
        tracker: Tracker = open_tracker(cell.config.tracking, paths, watcher.say)
        quants = [c.config.quant.name for c in all_cells if (c.config.model.name, c.config.gpu.name) == names]
        watcher.say(tracker.where)
        studies[names] = tracker.start_study(*names, quants)
    return studies[names]


def _run_group(
    group: list[Prepared], results: dict[int, CellResult], study: Study, watcher: QuietWatcher, command: Sequence[str]
) -> None:
    """The cells that share one baseline: the baseline, then each candidate."""
    gate = group[0].config.gate
    first = gate.looks[0] if gate.extend and gate.looks else group[0].config.tasks.perplexity_limit
    yardstick = _with_documents(as_baseline(group[0]), first)
    for cell in group:
        for warning in cell.warnings:
            watcher.cell(cell.name)
            watcher.say(f"warning: {warning}")
    watcher.cell(yardstick.name)
    own = next((results[id(cell.config)] for cell in group if cell.is_baseline), None)
    anew = own is not None or not yardstick.config.reuse_baseline
    baseline_result = CellResult(yardstick.name, yardstick.config, is_baseline=True)
    _attempt(baseline_result, yardstick, watcher, command, reuse=not anew)
    _track(study, baseline_result, watcher)
    if own is not None:
        own.measured, own.error, own.trace = baseline_result.measured, baseline_result.error, baseline_result.trace
    if any(cell.config.aa for cell in group) and baseline_result.measured is not None:
        _measure_floor(yardstick, baseline_result.measured, study, watcher, command)
    baselines = {yardstick.config.tasks.perplexity_limit: baseline_result}
    for cell in (cell for cell in group if not cell.is_baseline):
        _run_candidate(cell, results[id(cell.config)], baselines, study, watcher, command)


def _run_candidate(
    cell: Prepared,
    result: CellResult,
    baselines: dict[int | None, CellResult],
    study: Study,
    watcher: QuietWatcher,
    command: Sequence[str],
) -> None:
    """Measure and judge one candidate; with gate.extend, on more documents for as long as it is INCONCLUSIVE.

    Every look is one of the planned gate.looks, whose intervals hold together (evalq.judge.sequential).
    """
    gate = cell.config.gate
    plan = list(gate.looks) if gate.extend and gate.looks else [cell.config.tasks.perplexity_limit]
    for limit in plan:
        at_look = _with_documents(cell, limit)
        baseline = _baseline_at(limit, at_look, baselines, study, watcher, command)
        watcher.cell(cell.name)
        result.baseline = baseline.measured
        if baseline.error is not None or result.baseline is None:
            result.error = _without_baseline(baseline)
            return
        result.measured = result.verdict = None  # an earlier look must not be judged again when this one fails
        _attempt(result, at_look, watcher, command, reuse=False)
        if result.measured is not None:
            _judge(result, at_look, result.baseline, result.measured, watcher)
        _track(study, result, watcher)
        if result.error is not None or result.verdict is None or result.verdict.status != "INCONCLUSIVE":
            return
        if limit != plan[-1]:
            watcher.say(f"inconclusive after {limit} documents; measuring more of them, as gate.extend asks")


def _with_documents(cell: Prepared, limit: int | None) -> Prepared:
    tasks = dataclasses.replace(cell.config.tasks, perplexity_limit=limit)
    return dataclasses.replace(cell, config=dataclasses.replace(cell.config, tasks=tasks))


def _baseline_at(
    limit: int | None,
    cell: Prepared,
    baselines: dict[int | None, CellResult],
    study: Study,
    watcher: QuietWatcher,
    command: Sequence[str],
) -> CellResult:
    """The baseline over the same documents; measured once per look and shared by all candidates."""
    if limit not in baselines:
        yardstick = as_baseline(cell)
        watcher.cell(yardstick.name)
        found = CellResult(yardstick.name, yardstick.config, is_baseline=True)
        _attempt(found, yardstick, watcher, command, reuse=yardstick.config.reuse_baseline)
        _track(study, found, watcher)
        baselines[limit] = found
    return baselines[limit]


def _measure_floor(
    yardstick: Prepared, baseline: Measured, study: Study, watcher: QuietWatcher, command: Sequence[str]
) -> None:
    """The baseline once more, in reverse order and in smaller batches; what differs is kept as the A/A floor."""
    from evalq.judge.floor import aa_floor, write_floor

    engine = yardstick.config.engine
    changed = dataclasses.replace(
        yardstick.config,
        tasks=dataclasses.replace(yardstick.config.tasks, request_order="reverse"),
        engine=dataclasses.replace(engine, max_num_batched_tokens=max(256, engine.max_num_batched_tokens // 2)),
    )
    again = dataclasses.replace(yardstick, config=changed)
    watcher.cell(f"{yardstick.name} (A/A)")
    result = CellResult(again.name, changed, is_baseline=True)
    _attempt(result, again, watcher, command, reuse=True)
    _track(study, result, watcher)
    if result.measured is None:
        return
    metric = yardstick.config.gate.metric
    try:
        floor = aa_floor(
            baseline.record,
            baseline.folder,
            result.measured.record,
            result.measured.folder,
            metric,
            yardstick.config.gate.confidence,
        )
    except EvalqError as error:
        watcher.say(f"warning: no A/A floor: {error}")
        return
    file = write_floor(yardstick.places.records, baseline.record, floor, metric)
    watcher.say(f"A/A floor of {metric}: {floor.value:+.4%} [{floor.low:+.4%}, {floor.high:+.4%}], kept in {file}")


def _attempt(result: CellResult, cell: Prepared, watcher: QuietWatcher, command: Sequence[str], reuse: bool) -> None:
    """Measure one cell; its failure is kept in the result and said aloud, and the sweep goes on."""
    with _kept(result, watcher):
        result.measured = measure(cell, watcher, command, reuse)


def _judge(result: CellResult, cell: Prepared, baseline: Measured, measured: Measured, watcher: QuietWatcher) -> None:
    from evalq.judge.floor import read_floor

    with _kept(result, watcher):
        result.floor = read_floor(cell.places.records, baseline.record, cell.config.gate.metric)
        result.verdict = judge_cell(cell, baseline, measured, result.floor)


@contextlib.contextmanager
def _kept(result: CellResult, watcher: QuietWatcher) -> Iterator[None]:
    """Whatever goes wrong inside becomes the cell's own failure."""
    try:
        yield
    except EvalqError as error:
        result.error, result.trace = error, traceback.format_exc()
        watcher.say(f"failed: {error}")
    except OSError as error:
        result.error, result.trace = disk_error(error), traceback.format_exc()
        watcher.say(f"failed: {result.error}")
    except Exception as error:
        result.error = MeasurementError(
            f"an unexpected {type(error).__name__} ended this cell: {error}; please report it with its trace", "engine"
        )
        result.trace = traceback.format_exc()
        watcher.say(f"failed: {result.error}\n{result.trace}")


def _without_baseline(baseline: CellResult) -> EvalqError:
    error = baseline.error
    text = f"no baseline to compare with: {error}"
    if isinstance(error, InfeasibleError):
        return InfeasibleError(text)
    if isinstance(error, ConfigError):
        return ConfigError(text)
    return MeasurementError(text, error.kind if isinstance(error, MeasurementError) else "incomplete")


def _track(study: Study, result: CellResult, watcher: QuietWatcher) -> None:
    """Hand the record over; nothing that goes wrong here touches what was measured."""
    folder = result.measured.folder if result.measured else _failure_folder(result.error)
    if folder is None:
        return
    try:
        study.log_cell(folder, reused=bool(result.measured and result.measured.reused))
    except (EvalqError, OSError) as error:
        watcher.say(f"warning: {result.name} was not handed to MLflow: {error}; run evalq sync later")


def _failure_folder(error: EvalqError | None) -> Path | None:
    """The folder of the failed record that pipeline.measure noted on the error."""
    for note in getattr(error, "__notes__", []):
        if note.startswith("record: ") and note != "record: None":
            return Path(note.removeprefix("record: "))
    return None


def summary(result: SweepResult) -> dict[str, Any]:
    """The JSON document that the command line ends with."""
    return {
        "exit_code": result.exit_code,
        "released": result.exit_code == EXIT_PASS and any(cell.verdict for cell in result.cells),
        "cells": [_cell_summary(cell) for cell in result.cells],
        "mlflow": result.where,
    }


def _cell_summary(cell: CellResult) -> dict[str, Any]:
    verdict = cell.verdict
    increase = (
        next((c.estimate for c in verdict.checks if c.estimate and "perplexity" in c.metric), None) if verdict else None
    )
    return {
        "model": cell.config.model.name,
        "quant": cell.config.quant.name,
        "gpu": cell.config.gpu.name,
        "engine": cell.config.engine.name,
        "status": verdict.status if verdict else "FAILED" if cell.error else "BASELINE",
        "exit_code": cell.exit_code,
        "summary": verdict.summary if verdict else str(cell.error) if cell.error else "baseline measured; no verdict",
        "perplexity_increase": increase.value if increase else None,
        "perplexity_increase_low": increase.low if increase else None,
        "perplexity_increase_high": increase.high if increase else None,
        "record": str(cell.measured.folder) if cell.measured else None,
        "baseline": str(cell.baseline.folder) if cell.baseline else None,
        "baseline_reused": cell.baseline.reused if cell.baseline else None,
    }
