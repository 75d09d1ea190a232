"""Two records side by side without a policy: every paired estimate that both can give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evalq.errors import RecordError
from evalq.judge.comparable import check_allow, differences, identical_values, scheme_forced, unfinished
from evalq.judge.paired import as_increase, ratio
from evalq.judge.pairs import Tables, document_pairs, item_pairs
from evalq.judge.policy import LEDGER_QUANTITIES, METRIC_UNITS, ledger_figure
from evalq.judge.tasks import PERPLEXITY_TASK, accuracy_difference, flips, is_binary
from evalq.records import Estimate, Record


@dataclass(frozen=True)
class Comparison:
    """What two comparable records say about each other. `figures`: name -> (first, second)."""

    first_id: str
    second_id: str
    estimates: list[Estimate]
    figures: dict[str, tuple[float | None, float | None]]
    notes: list[str]


def compare(
    first: Record,
    first_folder: Path,
    second: Record,
    second_folder: Path,
    allow: Sequence[str] = (),
    confidence: float = 0.95,
) -> Comparison:
    """Every paired estimate of second against first.

    Errors: RecordError naming each differing field and both values, or what the records lack; ConfigError for `allow`.
    """
    check_allow(allow, sorted({*first.fingerprint, *second.fingerprint}))
    found = differences(first, second)
    problems = [*unfinished(first, "first record"), *unfinished(second, "second record")]
    problems += [f"not comparable: {item}" for item in found if item.field not in allow]
    if problems:
        raise RecordError("; ".join(problems))
    sides = Tables.read(first, first_folder), Tables.read(second, second_folder)
    notes = [f"allowed difference: {item}" for item in found] + scheme_forced(first, second)
    estimates = []
    for task in sorted(set(first.tasks) & set(second.tasks)):
        estimates += _estimates(sides, task, confidence, notes)
    only = sorted(set(first.tasks) ^ set(second.tasks))
    notes += [f"task {task} is in one record only" for task in only]
    notes += [
        f"load {name} does not stand in the {side} record: {'; '.join(record.loads[name].reasons) or 'no reason kept'}"
        for side, record in (("first", first), ("second", second))
        for name in sorted(record.loads)
        if not record.loads[name].valid
    ]
    return Comparison(first.record_id, second.record_id, estimates, _figures(first, second), notes)


def _estimates(sides: tuple[Tables, Tables], task: str, confidence: float, notes: list[str]) -> list[Estimate]:
    if task == PERPLEXITY_TASK:
        return _perplexities(sides, confidence, notes)
    first, second = (side.record.tasks[task] for side in sides)
    found = []
    for metric in sorted(set(first.metrics) & set(second.metrics)):
        if metric.endswith("_stderr"):
            continue
        pairs = item_pairs(*sides, task, metric)
        try:
            found.append(accuracy_difference(pairs, task, metric, confidence))
        except ValueError as error:
            notes.append(f"no interval for {task} {metric}: {error}")
            continue
        if is_binary(pairs):
            found.append(flips(pairs, task, metric, confidence))
    return found


def _perplexities(sides: tuple[Tables, Tables], confidence: float, notes: list[str]) -> list[Estimate]:
    pairs = document_pairs(*sides, PERPLEXITY_TASK)
    same = identical_values(sides[0].record, sides[1].record, pairs)
    notes += [same] if same else []
    found = []
    for metric, unit in METRIC_UNITS.items():
        try:
            estimate = ratio(pairs.d, pairs.counts[unit])
        except ValueError as error:
            notes.append(f"no interval for {metric}: {error}")
            continue
        low, high = estimate.interval(confidence)
        n, method = estimate.clusters, estimate.method
        found.append(as_increase(f"{metric}_increase", estimate.value, low, high, confidence, n, method))
    worse = float(np.mean(pairs.d > 0))
    notes.append(f"{worse:.0%} of {len(pairs.d)} documents have a higher loss in the second record")
    return found


def _figures(first: Record, second: Record) -> dict[str, tuple[float | None, float | None]]:
    figures = {
        name: (ledger_figure(first.ledger, name), ledger_figure(second.ledger, name)) for name in LEDGER_QUANTITIES
    }
    for name in sorted(set(first.loads) & set(second.loads)):
        a, b = first.loads[name], second.loads[name]
        key = f"{name} output_tokens_per_second"
        figures[key] = (
            a.output_tokens_per_second if a.valid else None,
            b.output_tokens_per_second if b.valid else None,
        )
    return figures
