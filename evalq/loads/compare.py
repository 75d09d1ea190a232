"""One load on two cells side by side: what differs by more than noise, and why a comparison may not stand. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from evalq.loads.results import Level, LoadResult, Spread
from evalq.loads.validity import are_interleaved, unlike, unlike_levels

COMPARED = (
    "output_tokens_per_second",
    "ttft_p99_seconds",
    "tpot_p50_seconds",
    "itl_p99_seconds",
    "latency_p50_seconds",
    "latency_p99_seconds",
    "goodput_requests_per_second",
    "joules_per_output_token",
)


@dataclass(frozen=True)
class Compared:
    """One figure of one level on both sides. share = second / first; noise is the share that two equal cells may show."""

    level: str
    figure: str
    first: float
    second: float
    share: float
    noise: float | None  # of the first's value; None with one repeat
    differs: bool  # by more than the noise of both
    valid: bool
    reasons: list[str]


def compare_loads(first: LoadResult, second: LoadResult) -> list[Compared]:
    """Every figure that both have, by level. A comparison that does not stand says so in its reasons."""
    others = {level.label: level for level in second.levels}
    apart = unlike(first, second)
    rows = []
    for level in first.levels:
        if level.label in others:
            rows += _compare_levels(level, others[level.label], apart)
    return rows


def _compare_levels(first: Level, second: Level, apart: list[str]) -> list[Compared]:
    reasons = [*apart, *unlike_levels(first, second), *first.reasons, *second.reasons]
    if not are_interleaved(first, second):
        reasons.append(
            "the cells were measured one after the other, so drift between them is in the difference; use load.rounds=2"
        )
    rows = []
    for name in COMPARED:
        a, b = first.figures.get(name), second.figures.get(name)
        if a is None or b is None or not a.value or b.value is None:
            continue
        noise = noise_of_difference(a, b)
        rows.append(
            Compared(
                level=first.label,
                figure=name,
                first=a.value,
                second=b.value,
                share=b.value / a.value,
                noise=None if noise is None else noise / abs(a.value),
                differs=noise is not None and abs(b.value - a.value) > noise,
                valid=not reasons,
                reasons=list(dict.fromkeys(reasons)),
            )
        )
    return rows


def noise_of_difference(first: Spread, second: Spread) -> float | None:
    """How far two equal cells' figures may lie apart; each side's run_to_run already stands for two equal runs."""
    if first.run_to_run is None or second.run_to_run is None:
        return None
    return math.sqrt((first.run_to_run**2 + second.run_to_run**2) / 2.0)
