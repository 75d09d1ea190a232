"""How much of the error rate a further verdict on the same documents may use, so that one of many does not pass by luck.

Each verdict is a series of tests in an order that is fixed before the first (`evalq search` judges from the gentlest
candidate to the smallest and stops at the first that does not pass), so a series has one share of the error rate. Series
after series on the same documents is the fallback procedure (Wiens 2003; Wiens and Dmitrienko 2005): shares add up to 1, and
a series that passes whole hands its level on to the next, because an error rate is only spent by a test that did not pass.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_LEVEL = 1e-4  # below it no interval of a few dozen documents means anything
FIRST_SHARE = 0.8  # of the error rate: a series that is never repeated should hardly pay for the others


def share(number: int) -> float:
    """Of the error rate, what the series `number` (from 0) has of its own: 0.8, 0.1, 0.05, ...; the sum is 1."""
    return FIRST_SHARE if number == 0 else (1.0 - FIRST_SHARE) * 0.5**number


def level(earlier: Sequence[bool]) -> float:
    """The part of the error rate that the next series may use, in (0, 1].

    earlier: of each series before it on these documents, whether all its tests passed.
    """
    handed_on = 0.0
    for number, passed in enumerate(earlier):
        handed_on = handed_on + share(number) if passed else 0.0
    return handed_on + share(len(earlier))


def confidence_at(confidence: float, part: float) -> float:
    """The two-sided confidence whose error rate is `part` of that of `confidence`."""
    return 1.0 - (1.0 - confidence) * part
