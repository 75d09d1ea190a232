"""Task accuracies, item by item: paired difference, exact McNemar, flips, non-inferiority."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evalq.judge.paired import Floats, ratio
from evalq.judge.pairs import ItemPairs
from evalq.plan.quantiles import binomial_upper_tail, normal_quantile, share_interval
from evalq.records import Estimate

PERPLEXITY_TASK = "wikitext"
MAIN_METRICS = {
    "hellaswag": ("acc", "acc_norm"),
    "truthfulqa_mc1": ("acc",),
    "truthfulqa_mc2": ("acc",),
}


@dataclass(frozen=True)
class McNemar:
    """Exact test on the items that changed sides. `lost`: right before, wrong after; `won`: the other way."""

    lost: int
    won: int
    p_two_sided: float
    p_worse: float  # one-sided: the candidate is worse
    p_better: float


def mcnemar(baseline: Floats, candidate: Floats) -> McNemar:
    """Exact (binomial) McNemar test of right/wrong values, each 0 or 1; (items,) both.

    Source: McNemar 1947 in its exact form, as recommended for compressed models by Kuebler et al. 2026.
    """
    lost = int(np.sum((baseline == 1) & (candidate == 0)))
    won = int(np.sum((baseline == 0) & (candidate == 1)))
    changed = lost + won
    worse, better = binomial_upper_tail(lost, changed), binomial_upper_tail(won, changed)
    two_sided = min(1.0, 2.0 * binomial_upper_tail(max(lost, won), changed)) if changed else 1.0
    return McNemar(lost, won, two_sided, worse, better)


def is_binary(pairs: ItemPairs) -> bool:
    """Whether every value on both sides is exactly 0 or 1."""
    both = np.concatenate([pairs.baseline, pairs.candidate])
    return bool(np.isin(both, (0.0, 1.0)).all())


def flips(pairs: ItemPairs, task: str, metric: str, confidence: float) -> Estimate:
    """Share of items whose correctness changed, in either direction (Dutta et al. 2024), Wilson's interval."""
    result = mcnemar(pairs.baseline, pairs.candidate)
    changed, n = result.lost + result.won, len(pairs.baseline)
    low, high = wilson_interval(changed, n, confidence)
    note = f"{result.lost} right to wrong, {result.won} wrong to right"
    return Estimate(f"{task}_{metric}_flips", changed / n, low, high, confidence, n, "Wilson", note=note)


def accuracy_difference(pairs: ItemPairs, task: str, metric: str, confidence: float) -> Estimate:
    """Candidate minus baseline accuracy with a paired interval.

    Items that share a source are one cluster (Student interval over clusters, Miller 2024). Right/wrong items without
    clusters get the score interval of Tango (1998), which stays honest when few items change.
    Errors: ValueError for fewer than two clusters.
    """
    n = len(pairs.baseline)
    difference = pairs.candidate - pairs.baseline
    value = float(difference.mean())
    name = f"{task}_{metric}_difference"
    if pairs.clusters is None and is_binary(pairs):
        changed = mcnemar(pairs.baseline, pairs.candidate)
        low, high = tango_interval(changed.lost, changed.won, n, confidence)
        return Estimate(name, value, low, high, confidence, n, "paired, score interval (Tango)")
    clustered = ratio(difference, np.ones(n), pairs.clusters, method="jackknife")
    low, high = clustered.interval(confidence)
    if clustered.se == 0.0:  # nothing changed: an interval of width 0 would claim too much
        low, high = _no_change_interval(value, clustered.clusters, confidence)
    sources = f" over {clustered.clusters} sources" if pairs.clusters is not None else ""
    return Estimate(name, value, low, high, confidence, n, f"paired, Student{sources}")


def tango_interval(lost: int, won: int, n: int, confidence: float) -> tuple[float, float]:
    """Score interval of (won - lost)/n, a difference of paired proportions (Tango 1998).

    It holds every difference at which the score statistic stays within the normal quantile.
    """
    z, value = normal_quantile(0.5 + confidence / 2.0), (won - lost) / n
    above = _last_within(lambda step: _score(lost, won, n, value + step) >= -z, 1.0 - value)
    below = _last_within(lambda step: _score(lost, won, n, value - step) <= z, 1.0 + value)
    return value - below, value + above


def _last_within(within: Callable[[float], bool], most: float) -> float:
    """The largest step from 0 to `most` that is still within, by bisection."""
    low, high = 0.0, most
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def _score(lost: int, won: int, n: int, difference: float) -> float:
    """Score statistic of P(won) - P(lost) = difference, with the likeliest P(lost) under it (Tango 1998)."""
    half = lost + won - (2.0 * n - won + lost) * difference
    root = math.sqrt(max(half * half + 8.0 * n * lost * difference * (1.0 - difference), 0.0))
    p_lost = (half + root) / (4.0 * n)
    variance = n * (2.0 * p_lost + difference * (1.0 - difference))
    gap = won - lost - n * difference
    return gap / math.sqrt(variance) if variance > 0.0 else math.copysign(math.inf, gap) if gap else 0.0


def wilson_interval(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Score interval of a share (Wilson 1927)."""
    z = normal_quantile(0.5 + confidence / 2.0)
    middle = (successes + z * z / 2.0) / (trials + z * z)
    half = z / (trials + z * z) * math.sqrt(successes * (trials - successes) / trials + z * z / 4.0)
    return (middle - half if successes else 0.0), (middle + half if successes < trials else 1.0)


def _no_change_interval(value: float, clusters: int, confidence: float) -> tuple[float, float]:
    """Bounds when no cluster changed: a share above 1 - tail^(1/n) would have shown one (exact, both directions)."""
    room = share_interval(0, clusters, confidence)[1]
    return value - room, value + room


def non_inferior(estimate: Estimate, margin: float) -> str:
    """PASS when the interval lies above -margin, FAIL when it lies below, else INCONCLUSIVE."""
    if estimate.low is None or estimate.high is None or estimate.value is None:
        return "INVALID"
    if estimate.low >= -margin:
        return "PASS"
    return "FAIL" if estimate.high < -margin else "INCONCLUSIVE"
