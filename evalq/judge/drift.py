"""Whether a checkpoint costs more on new text than on the text it was accepted on: two independent paired increases.

Each text's D = sum d / sum w has its own jackknife error (evalq.judge.paired); the texts share no document, so the error of
the difference is the root of the sum of squares, with Welch and Satterthwaite's degrees of freedom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evalq.judge.paired import as_increase, ratio
from evalq.judge.pairs import DocumentPairs
from evalq.judge.policy import METRIC_UNITS
from evalq.records import Estimate

MIN_DOCUMENTS = 2


@dataclass(frozen=True)
class Drift:
    """FITS, DRIFTED or INCONCLUSIVE, with the increases of both texts and the extra increase on the new one."""

    status: str
    reason: str
    reference: Estimate
    new: Estimate
    extra: Estimate


def drift(reference: DocumentPairs, new: DocumentPairs, metric: str, margin: float, confidence: float) -> Drift:
    """Compare the increase on new text with that on the reference text. margin: a share, e.g. 0.01.

    Errors: ValueError for fewer than two documents on a side.
    """
    from scipy.stats import t as student

    unit = METRIC_UNITS[metric]
    found = []
    for pairs in (reference, new):
        if len(pairs.d) < MIN_DOCUMENTS:
            raise ValueError(f"{len(pairs.d)} documents have no interval; give {MIN_DOCUMENTS} or more of each text")
        found.append(ratio(pairs.d, pairs.counts[unit]))
    first, second = found
    variances = [one.se**2 for one in found]
    total = sum(variances)
    df = (
        total**2 / sum(v**2 / one.df for v, one in zip(variances, found, strict=True))
        if total > 0
        else min(first.df, second.df)
    )
    value = second.value - first.value
    half = float(student.ppf(0.5 + confidence / 2, df)) * math.sqrt(total)
    status, reason = _decide(value, half, math.log1p(margin), margin)
    names = ("increase on the reference text", "increase on the new text")
    estimates = []
    for name, one in zip(names, found, strict=True):
        own = float(student.ppf(0.5 + confidence / 2, one.df)) * one.se
        estimates.append(
            as_increase(
                name, one.value, one.value - own, one.value + own, confidence, one.clusters, "Student's t, jackknife"
            )
        )
    extra = as_increase(
        "extra increase on the new text", value, value - half, value + half, confidence,
        first.clusters + second.clusters, "Welch's t of two independent texts",
    )  # fmt: skip
    return Drift(status, reason, estimates[0], estimates[1], extra)


def _decide(value: float, half: float, limit: float, margin: float) -> tuple[str, str]:
    said = f"{math.expm1(value):+.3%} [{math.expm1(value - half):+.3%}, {math.expm1(value + half):+.3%}]"
    if value + half <= limit:
        return "FITS", f"the new text costs {said} more than the reference text, within the margin {margin:.2%}"
    if value - half > limit:
        return (
            "DRIFTED",
            f"the new text costs {said} more than the reference text, above the margin {margin:.2%}: recalibrate",
        )
    return "INCONCLUSIVE", f"the new text costs {said} more; the margin {margin:.2%} lies inside, so give more text"
