"""Quantiles and tails of the normal, Student's t and binomial distributions, in plain Python.

scipy.special takes most of a second to import on a small machine, and the gate has one second from shell to verdict.
The tests compare every function with scipy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from statistics import NormalDist

_NORMAL = NormalDist()


def normal_quantile(p: float) -> float:
    """The z with P(Z <= z) = p, for 0 < p < 1."""
    return _NORMAL.inv_cdf(p)


def normal_tail(z: float) -> float:
    """P(Z > z)."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def beta_regularised(a: float, b: float, x: float) -> float:
    """I_x(a, b) by Lentz's continued fraction (Press et al., Numerical Recipes, section 6.4)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - beta_regularised(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * _beta_fraction(a, b, x) / a


def _beta_fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0), tiny)
    result = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for step in (even, odd):
            d = 1.0 / _away_from_zero(1.0 + step * d, tiny)
            c = _away_from_zero(1.0 + step / c, tiny)
            result *= c * d
        if abs(c * d - 1.0) < 1e-15:
            return result
    return result


def _away_from_zero(value: float, tiny: float) -> float:
    return tiny if abs(value) < tiny else value


def t_tail(t: float, df: float) -> float:
    """P(T > t) of Student's t with `df` degrees of freedom; infinite `df` is the normal."""
    if math.isinf(df) or df > 1e7:
        return normal_tail(t)
    if t * t < df:  # near the middle the other form keeps its digits
        half = 0.5 - 0.5 * beta_regularised(0.5, df / 2.0, t * t / (df + t * t))
    else:
        half = 0.5 * beta_regularised(df / 2.0, 0.5, df / (df + t * t))
    return half if t >= 0 else 1.0 - half


@cache
def t_quantile(p: float, df: float) -> float:
    """The t with P(T <= t) = p. Bisection on the tail, to the last few bits."""
    if not (0.0 < p < 1.0 and df > 0.0):
        raise ValueError(f"t_quantile needs 0 < p < 1 and df > 0, not p={p}, df={df}")
    if p < 0.5:
        return -t_quantile(1.0 - p, df)
    if p == 0.5:
        return 0.0
    tail, low, high = 1.0 - p, 0.0, 1.0
    while t_tail(high, df) > tail:
        low, high = high, high * 2.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if t_tail(middle, df) > tail else (low, middle)
    return 0.5 * (low + high)


def binomial_upper_tail(successes: int, trials: int, p: float = 0.5) -> float:
    """P(X >= successes) for X ~ Binomial(trials, p), exact."""
    if successes <= 0:
        return 1.0
    if successes > trials:
        return 0.0
    return beta_regularised(successes, trials - successes + 1, p)


def share_interval(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Exact two-sided interval of a share (Clopper and Pearson 1934)."""
    tail = (1.0 - confidence) / 2.0
    low = 0.0 if successes == 0 else _solve_share(lambda p: binomial_upper_tail(successes, trials, p) - tail)
    high = (
        1.0
        if successes == trials
        else _solve_share(lambda p: tail - (1.0 - binomial_upper_tail(successes + 1, trials, p)))
    )
    return low, high


def _solve_share(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return 0.5 * (low + high)
