"""Whether a record holds every measurement a policy requires, and whether its figures follow from its own tables."""

from __future__ import annotations

import math

import numpy as np

from evalq.judge.pairs import Tables, rows_of
from evalq.judge.policy import METRIC_UNITS, Policy
from evalq.judge.tasks import MAIN_METRICS, PERPLEXITY_TASK
from evalq.records import TaskScores

SAME = 1e-6  # relative; sums of the same doubles in another order


def required_tasks(policy: Policy) -> list[str]:
    """Tasks that both records must hold; the gate metric's task is always one of them."""
    return list(dict.fromkeys([PERPLEXITY_TASK, *policy.source.required_tasks, *policy.source.required_margins]))


def required_metrics(task: str, policy: Policy, scores: TaskScores | None = None) -> tuple[str, ...]:
    """Metrics of a task that must be finite on both sides; a task evalq does not know brings its own."""
    if task == PERPLEXITY_TASK:
        return (policy.source.metric,)
    if task in MAIN_METRICS or scores is None:
        return MAIN_METRICS.get(task, ())
    return tuple(name for name in scores.metrics if not name.endswith("_stderr"))


def missing_measurements(tables: Tables, policy: Policy, side: str, reference: Tables) -> list[str]:
    """What the record lacks, in words: tasks, metrics, finite values, figures that disagree with the tables.

    A task that evalq does not know must hold the metrics that `reference` (the baseline) holds.
    """
    problems = []
    for task in required_tasks(policy):
        scores = tables.record.tasks.get(task)
        if scores is None:
            problems.append(f"the {side} has no task {task}; measured: {', '.join(tables.record.tasks) or 'none'}")
            continue
        if scores.n <= 0:
            problems.append(f"the {side} scored 0 documents or items of {task}")
            continue
        if min(scores.left_out, scores.truncated) < 0:
            problems.append(
                f"the {side} has a negative count of {task}: left_out {scores.left_out}, truncated {scores.truncated}"
            )
        metrics = required_metrics(task, policy, reference.record.tasks.get(task))
        if not metrics:
            problems.append(f"the {side} has no metric for task {task}")
        for metric in metrics:
            problems.extend(_metric_problem(scores, metric, side))
    return problems or disagreements(tables, policy, side)


def _metric_problem(scores: TaskScores, metric: str, side: str) -> list[str]:
    if metric not in scores.metrics:
        return [
            f"metric missing: the {side} has no {metric} of {scores.task}; it has {', '.join(scores.metrics) or 'none'}"
        ]
    value = scores.metrics[metric]
    if value is None or not math.isfinite(value):
        reason = scores.metric_reasons.get(metric, "no reason recorded")
        return [f"{metric} of {scores.task} in the {side} is not a finite number: {reason}"]
    if metric in METRIC_UNITS and value < 1.0:
        return [f"{metric} of {scores.task} in the {side} is {value}; a perplexity is at least 1, so this is no {side}"]
    return []


def disagreements(tables: Tables, policy: Policy, side: str) -> list[str]:
    """Aggregates of record.json that do not follow from the rows behind them. Errors: RecordError for damaged rows."""
    problems = []
    for task in required_tasks(policy):
        scores = tables.record.tasks[task]
        recomputed = {name: _recompute(tables, task, name) for name in scores.metrics}
        for name, (value, n) in ((key, found) for key, found in recomputed.items() if found is not None):
            recorded = scores.metrics[name]
            if n != scores.n:
                problems.append(
                    f"{task} of the {side} says n={scores.n} and its table has {n} rows; a tampered record?"
                )
            elif recorded is not None and not math.isclose(recorded, value, rel_tol=SAME, abs_tol=1e-9):
                problems.append(
                    f"{name} of {task} in the {side} is {recorded!r} in record.json and {value!r} from its table; "
                    "a tampered record?"
                )
    return problems


def _recompute(tables: Tables, task: str, metric: str) -> tuple[float, int] | None:
    """The metric from the rows, and the number of rows; None for a metric that has no rows of its own."""
    if metric in METRIC_UNITS:
        rows = rows_of(tables.documents, task)
        if rows is None:
            return None
        nll, unit = rows["nll_nats"], rows[METRIC_UNITS[metric]]
        with np.errstate(all="ignore"):
            return float(np.exp(nll.sum() / unit.sum())), len(nll)
    rows = rows_of(tables.items, task, metric)
    if rows is None:
        return None
    values = rows["value"]
    return float(values.mean()), len(values)
