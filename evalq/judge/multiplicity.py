"""Several schemes or tasks judged at once: Holm's step-down correction (Holm 1979)."""

from __future__ import annotations

from collections.abc import Sequence

from evalq.records import Verdict


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values, in the given order; reject where one is at or under the error rate of the whole family."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted


def holm_fails(verdicts: Sequence[Verdict | None]) -> list[float | None]:
    """Holm-adjusted one-sided p of "above the limit" for each verdict of a sweep; None where nothing was judged.

    A FAIL stays a FAIL and keeps its exit code, whatever this says: not releasing is the safe side. The report says
    which FAILs would not stand on their own among so many.
    """
    found = [next((c.p_fail for c in v.checks if c.p_fail is not None), None) if v else None for v in verdicts]
    known = [i for i, p in enumerate(found) if p is not None]
    adjusted = holm([p for p in found if p is not None])
    result: list[float | None] = [None] * len(verdicts)
    for i, p in zip(known, adjusted, strict=True):
        result[i] = p
    return result
