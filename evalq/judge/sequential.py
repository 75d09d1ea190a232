"""Looking more than once: repeated confidence intervals from alpha spending.

The two-sided error rate alpha is spent as alpha * t^3 by the share t of the planned documents (power family of Kim and
DeMets 1987, in the scheme of Lan and DeMets 1983), and each look gets what has been added since the look before. By the
union bound the intervals of all looks hold the truth together with probability 1 - alpha, whatever the rule for
stopping (repeated confidence intervals, Jennison and Turnbull 1989). The joint normal law of the looks would give
slightly narrower intervals; with skewed documents that gain let more than 5 % pass (docs/design/gate-interval.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from evalq.errors import RecordError

POWER = 3  # 1 spends evenly; 3 leaves a first look at a third of the documents 1/27 of alpha


def look_confidence(looks: Sequence[int], documents: int, confidence: float) -> float:
    """Confidence level of the interval over `documents` documents, so that all looks together keep `confidence`.

    Looks are planned document counts, rising; a record between two of them is one more look; none = one look at all.
    Errors: RecordError when the record has more documents than the plan.
    """
    if not looks:
        return confidence
    if documents > looks[-1]:
        raise RecordError(
            f"the record has {documents} documents and the policy's looks end at {looks[-1]}; "
            f"end gate.looks at {documents} or measure {looks[-1]}"
        )
    before = max((count for count in looks if count < documents), default=0)
    share = (documents / looks[-1]) ** POWER - (before / looks[-1]) ** POWER
    return 1.0 - (1.0 - confidence) * share


def next_look(looks: Sequence[int], documents: int) -> int | None:
    """Documents at the next planned look; None when the plan is over."""
    return next((count for count in looks if count > documents), None)
