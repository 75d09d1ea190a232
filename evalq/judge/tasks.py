"""Task accuracies, item by item: paired difference, exact McNemar, flips, non-inferiority."""

from __future__ import annotations

import math
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
    """Share of items whose correctness changed, in either direction (Dutta et al. 2024), exact interval."""
    result = mcnemar(pairs.baseline, pairs.candidate)
    changed, n = result.lost + result.won, len(pairs.baseline)
    low, high = share_interval(changed, n, confidence)
    note = f"{result.lost} right to wrong, {result.won} wrong to right"
    return Estimate(f"{task}_{metric}_flips", changed / n, low, high, confidence, n, "Clopper-Pearson", note=note)


def accuracy_difference(pairs: ItemPairs, task: str, metric: str, confidence: float) -> Estimate:
    """Candidate minus baseline accuracy with a paired interval.

    Items that share a source are one cluster (Student interval over clusters, Miller 2024). Right/wrong items without
    clusters get the adjusted Wald interval of Bonett and Price (2012), which stays honest when few items change.
    Errors: ValueError for fewer than two clusters.
    """
    n = len(pairs.baseline)
    difference = pairs.candidate - pairs.baseline
    value = float(difference.mean())
    name = f"{task}_{metric}_difference"
    if pairs.clusters is None and is_binary(pairs):
        changed = mcnemar(pairs.baseline, pairs.candidate)
        low, high = bonett_price_interval(changed.lost, changed.won, n, confidence)
        return Estimate(name, value, low, high, confidence, n, "paired, adjusted Wald (Bonett-Price)")
    clustered = ratio(difference, np.ones(n), pairs.clusters, method="jackknife")
    low, high = clustered.interval(confidence)
    if clustered.se == 0.0:  # nothing changed: an interval of width 0 would claim too much
        low, high = _no_change_interval(value, clustered.clusters, confidence)
    sources = f" over {clustered.clusters} sources" if pairs.clusters is not None else ""
    return Estimate(name, value, low, high, confidence, n, f"paired, Student{sources}")


def bonett_price_interval(lost: int, won: int, n: int, confidence: float) -> tuple[float, float]:
    """Interval of (won - lost)/n, a difference of paired proportions: one pseudo-item in each changed cell."""
    p_lost, p_won = (lost + 1.0) / (n + 2.0), (won + 1.0) / (n + 2.0)
    value = p_won - p_lost
    half = normal_quantile(0.5 + confidence / 2.0) * math.sqrt((p_lost + p_won - value**2) / (n + 2.0))
    return value - half, value + half


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
