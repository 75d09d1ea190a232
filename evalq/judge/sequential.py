"""Looking more than once: repeated confidence intervals from alpha spending.

The two-sided error rate alpha is spent as alpha * t^2 by the share t of the planned documents (power family of Kim and
DeMets 1987, in the scheme of Lan and DeMets 1983). The critical values come from the joint normal law of the looks by
recursive integration (Armitage, McPherson and Rowe 1969). An interval at each look's level holds the truth at all
looks together with probability 1 - alpha (repeated confidence intervals, Jennison and Turnbull 1989), whatever the
rule for stopping. For few documents each level is used with Student's t and the bootstrap, not with the normal
(Jennison and Turnbull 2000, section 11.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from evalq.errors import RecordError
from evalq.judge.paired import Floats
from evalq.plan.quantiles import normal_tail

POWER = 2.0  # 1 spends evenly (much early), 3 late; 2 leaves a first look at a third of the data 0.3 % of the 2.5 %
GRID = 801  # points of the numerical integration


def spent(fraction: float, alpha: float) -> float:
    """Error rate used up when `fraction` of the planned documents has been seen."""
    return float(alpha * min(fraction, 1.0) ** POWER)


@cache
def critical_values(fractions: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    """z_k with P(|Z_j| > z_j for some j <= k) = spent(t_k), for looks at rising shares of the documents."""
    found: list[float] = []
    grid, density = np.zeros(1), np.ones(1)  # of the Brownian path at the look before, where it had not stopped
    before, used = 0.0, 0.0
    for t in fractions:
        step, spend = math.sqrt(t - before), spent(t, alpha) - used
        z = _solve(grid, density, step, math.sqrt(t), spend)
        found.append(z)
        edge = z * math.sqrt(t)
        points = np.linspace(-edge, edge, GRID)
        density = _move(grid, density, step, points)
        grid, before, used = points, t, spent(t, alpha)
    return tuple(found)


def _move(grid: Floats, density: Floats, step: float, points: Floats) -> Floats:
    """Density of the path at `points` after one more increment of standard deviation `step`."""
    kernel = np.exp(-0.5 * ((points[:, None] - grid[None, :]) / step) ** 2) / (step * math.sqrt(2.0 * math.pi))
    return np.asarray(kernel @ (density * _trapezoid(grid)))


def _trapezoid(grid: Floats) -> Floats:
    if len(grid) == 1:
        return np.ones(1)
    weights = np.full(len(grid), grid[1] - grid[0])
    weights[0] = weights[-1] = weights[0] / 2.0
    return weights


def _solve(grid: Floats, density: Floats, step: float, scale: float, spend: float) -> float:
    """The z at which the path leaves with probability `spend` at this look, having stayed inside before."""
    mass = density * _trapezoid(grid)
    low, high = 0.0, 12.0
    for _ in range(60):
        z = 0.5 * (low + high)
        leaving = sum(float(m) * normal_tail((z * scale - float(x)) / step) for m, x in zip(mass, grid, strict=True))
        low, high = (z, high) if 2.0 * leaving > spend else (low, z)
    return 0.5 * (low + high)


def look_confidence(looks: Sequence[int], documents: int, confidence: float) -> float:
    """Confidence level of the interval over `documents` documents, so that all looks together keep `confidence`.

    Looks are planned document counts, rising; a record between two of them is one more look.
    Errors: RecordError when the record has more documents than the plan.
    """
    if not looks:
        return confidence
    if documents > looks[-1]:
        raise RecordError(
            f"the record has {documents} documents and the policy's looks end at {looks[-1]}; "
            f"end gate.looks at {documents} or measure {looks[-1]}"
        )
    counts = [count for count in looks if count < documents] + [documents]
    z = critical_values(tuple(count / looks[-1] for count in counts), 1.0 - confidence)[-1]
    return 1.0 - 2.0 * normal_tail(z)


def next_look(looks: Sequence[int], documents: int) -> int | None:
    """Documents at the next planned look; None when the plan is over."""
    return next((count for count in looks if count > documents), None)
