"""How far reviewers agree: Krippendorff's alpha, with an interval by a bootstrap over what they rated.

alpha = 1 - observed / expected disagreement; 1 = all agree, 0 = as good as chance, below 0 = worse than chance.
Source: Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability" (its example is in the tests).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evalq.judge.paired import Floats, resample_counts
from evalq.records import Estimate

RESAMPLES = 2000


def coincidences(ratings: Floats) -> tuple[Floats, Floats]:
    """Pairs of values within each unit, each unit weighted by 1 / (raters - 1). ratings (raters, units), NaN = none.

    Returns the values in order, (values,), and their coincidences, (units, values, values). Units with one rating have none.
    """
    values = np.unique(ratings[np.isfinite(ratings)])
    counts = np.stack([(ratings == value).sum(axis=0) for value in values], axis=1) if len(values) else np.zeros((0, 0))
    raters = counts.sum(axis=1)
    pairs = counts[:, :, None] * counts[:, None, :] - np.eye(len(values)) * counts[:, :, None]
    weight = np.where(raters > 1, 1.0 / np.maximum(raters - 1, 1), 0.0)
    return values, pairs * weight[:, None, None]


def alpha_of(values: Floats, together: Floats, ordinal: bool) -> Floats:
    """Alpha of coincidence matrices (..., values, values); NaN where all ratings are one value or there are none."""
    marginal = together.sum(axis=-1)
    distance = _ordinal(marginal) if ordinal else 1.0 - np.eye(len(values))
    total = marginal.sum(axis=-1)
    observed = (together * distance).sum(axis=(-2, -1))
    expected = (marginal[..., :, None] * marginal[..., None, :] * distance).sum(axis=(-2, -1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(1.0 - (total - 1.0) * observed / expected)


def _ordinal(marginal: Floats) -> Floats:
    """Squared ordinal distance of each two values: the ratings between them, their own counted half; (..., v, v)."""
    middle = np.cumsum(marginal, axis=-1) - marginal / 2.0
    return np.asarray((middle[..., :, None] - middle[..., None, :]) ** 2)


def krippendorff(name: str, ratings: Floats, ordinal: bool, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Alpha of ratings (raters, units), NaN = none, with a percentile interval over units drawn with replacement."""
    values, together = coincidences(ratings)
    paired = together.sum(axis=(1, 2)) > 0 if len(values) else np.zeros(0, bool)
    n, method = int(paired.sum()), "Krippendorff's alpha, " + ("ordinal" if ordinal else "nominal")
    alpha = float(alpha_of(values, together[paired].sum(axis=0), ordinal)) if n else float("nan")
    if not np.isfinite(alpha):
        note = "no unit has two ratings" if n == 0 else "every rating is the same value, so agreement has no measure"
        return Estimate(name, None, None, None, confidence, n, method, note=note)
    low, high = _interval(values, together[paired], ordinal, confidence, seed)
    return Estimate(name, alpha, low, high, confidence, n, f"{method}, bootstrap over what was rated")


def _interval(
    values: Floats, together: Floats, ordinal: bool, confidence: float, seed: int
) -> tuple[float | None, float | None]:
    if len(together) < 2:
        return None, None
    counts = resample_counts(len(together), RESAMPLES, np.random.default_rng(seed))
    size = len(values)
    drawn = (counts @ together.reshape(len(together), size * size)).reshape(RESAMPLES, size, size)
    alphas: NDArray[np.float64] = alpha_of(values, drawn, ordinal)
    tail = (1.0 - confidence) / 2.0
    low, high = np.nanquantile(alphas, [tail, 1.0 - tail])
    return float(low), float(high)
