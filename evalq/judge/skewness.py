"""Student's interval of a ratio, corrected for skewed documents.

When damage sits in some documents, D = sum d / sum w is skewed, and the samples that miss those documents look better and
more certain than they should. Johnson (1978) and Hall (1992, sections 3.5 and 3.9) move the quantile t of a mean by
skewness * (1 + 2 t^2) / (6 sqrt n). Here 1/sqrt n becomes sum w^3 / (sum w^2)^1.5, which long documents raise, and the
skewness is that of the documents' rates d/w: a few long documents cannot hide it. The two departures below, and why
Johnson's correction alone is not enough, are in docs/design/gate-interval.md. Arrays are (..., documents) -> (...).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHARE_INWARD = 0.2  # of the correction of the other bound: in full, heavy symmetric tails lose 2 points of coverage
MOST_INWARD = 1.0 / 3.0  # of t
UNSEEN = 40.0  # a sample of n shows about n / (n + UNSEEN) of a lognormal's skewness ...
MOST_UNSEEN = 3.0  # ... and at 20 documents a third


def rate_skewness(residual: Floats, w: Floats) -> Floats:
    """Sample skewness (Fisher's G1) of residual / w; 0 unless it exceeds its standard error under the normal law."""
    n = w.shape[-1]
    if n < 3:
        return np.zeros(w.shape[:-1])
    rate = residual / w
    rate = rate - rate.mean(axis=-1, keepdims=True)
    scale = np.abs(rate).max(axis=-1, keepdims=True)
    rate = rate / np.where(scale > 0.0, scale, 1.0)  # so that neither cubes nor squares leave the range of a float
    spread = np.mean(rate**2, axis=-1)
    plain = np.mean(rate**3, axis=-1) / np.where(spread > 0.0, spread, 1.0) ** 1.5
    found = plain * np.sqrt(n * (n - 1.0)) / (n - 2.0)
    noise = np.sqrt(6.0 * n * (n - 1.0) / ((n - 2.0) * (n + 1.0) * (n + 3.0)))
    return np.where(np.abs(found) > noise, found, 0.0)


def concentration(w: Floats) -> Floats:
    """sum w^3 / (sum w^2)^1.5: 1/sqrt n for equal documents, towards 1 when one holds all the words."""
    share = w / w.max(axis=-1, keepdims=True)
    return np.asarray(np.sum(share**3, axis=-1) / np.sum(share**2, axis=-1) ** 1.5)


def ends(t: Floats | float, skewness: Floats | float, weight: Floats | float, n: int) -> tuple[Floats, Floats]:
    """How many standard errors the interval reaches below and above D, for Student's quantile t >= 0.

    skewness: of `rate_skewness`; weight: of `concentration`; n: documents. The side of the long tail is widened, and by
    as much as a sample of n is blind to; the other side is narrowed by a fifth of the plain correction.
    """
    shape = np.abs(skewness) * (1.0 + 2.0 * np.square(t)) / 6.0
    blind = min(1.0 + UNSEEN / n, MOST_UNSEEN) / np.sqrt(n)
    wide = t + shape * np.maximum(weight, blind)
    narrow = t - np.minimum(SHARE_INWARD * shape * weight, MOST_INWARD * np.asarray(t))
    right = np.asarray(skewness) > 0.0
    return np.where(right, narrow, wide), np.where(right, wide, narrow)


def level(reach: float, skewness: float, weight: float, n: int, below: bool) -> float:
    """The t whose interval reaches `reach` standard errors below (or above) D; the inverse of `ends`.

    A reach of 0 or less is its own t: the correction belongs to the tails.
    """
    if reach <= 0.0:
        return reach
    low, high = 0.0, reach / (1.0 - MOST_INWARD)
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        short = float(ends(middle, skewness, weight, n)[0 if below else 1]) < reach
        low, high = (middle, high) if short else (low, middle)
    return 0.5 * (low + high)
