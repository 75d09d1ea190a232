"""When a figure of a load test counts, and when two may be compared. Every rule answers with a reason in words."""

from __future__ import annotations

from collections.abc import Sequence

from evalq.loads.figures import median
from evalq.loads.results import Health, Level, LoadResult, Repeat

MIN_REPEATS = 3
MAX_PREFIX_HITS = 0.01  # of the prompt tokens
MAX_ERRORS = 0.01  # of the requests
SLOW_START = 0.80  # the first repeat's rate, as a share of the others' median, below which warm-up was not over
HARMFUL_THROTTLING = ("thermal", "hardware")


def level_problems(repeats: Sequence[Repeat], warmup_requests: int) -> list[str]:
    """Why the figures of one level are not valid; empty when they are."""
    problems = []
    if len(repeats) < MIN_REPEATS:
        problems.append(f"{len(repeats)} repeats; at least {MIN_REPEATS} are needed for a spread")
    if warmup_requests < 1:
        problems.append("no warm-up outside the window")
    problems += [reason for reason in (_slow_start(repeats),) if reason]
    requests, failed = sum(r.requests for r in repeats), sum(r.requests_failed for r in repeats)
    if requests and failed > MAX_ERRORS * requests:
        problems.append(f"{failed} of {requests} requests failed; at most {MAX_ERRORS:.0%} may")
    wrong = sum(r.wrong_lengths for r in repeats)
    if wrong:
        problems.append(f"{wrong} of {requests} answers have another length than asked for")
    hits = max((r.prefix_hit_share or 0.0 for r in repeats), default=0.0)
    if hits > MAX_PREFIX_HITS:
        problems.append(
            f"{hits:.1%} of the prompt tokens came from the prefix cache; at most {MAX_PREFIX_HITS:.0%} may"
        )
    return problems


def _slow_start(repeats: Sequence[Repeat]) -> str | None:
    rates = [r.figures.get("output_tokens_per_second", 0.0) for r in repeats]
    if len(rates) < MIN_REPEATS:
        return None
    others = median(rates[1:])
    if rates[0] < SLOW_START * min(rates[1:]):
        return f"the first repeat ran at {rates[0] / others:.0%} of the others: warm-up was not over; raise load.warmup_requests"
    return None


def device_problems(health: Health | None) -> list[str]:
    """What the device's sensors say against every figure of the load."""
    if health is None:
        return []
    problems = []
    harmful = [reason for reason in health.throttling if reason.startswith(HARMFUL_THROTTLING)]
    if harmful:
        problems.append(f"the device lowered its clocks in the window: {', '.join(harmful)}")
    if health.foreign_processes:
        found = ", ".join(map(str, health.foreign_processes))
        problems.append(f"the GPU was shared: process {found} appeared on it in the window; end it and measure again")
    return problems


def unlike(first: LoadResult, second: LoadResult) -> list[str]:
    """Why two cells' loads may not be compared at all."""
    problems = []
    if first.device != second.device:
        problems.append(f"measured on {first.device!r} and on {second.device!r}, which are not one device")
    if first.start != second.start:
        problems.append(f"one on the {first.start} start, one on the {second.start} start")
    for key in sorted({*first.scheduler, *second.scheduler}):
        a, b = first.scheduler.get(key), second.scheduler.get(key)
        if a != b:
            problems.append(f"{key} is {a} in one cell and {b} in the other; set engine.{key} alike")
    return problems


def unlike_levels(first: Level, second: Level) -> list[str]:
    """Why two levels are not one load."""
    problems = []
    for name in ("requests", "input_tokens", "output_tokens", "concurrency", "rate_per_second"):
        a, b = getattr(first, name), getattr(second, name)
        if a != b:
            problems.append(f"{name} is {a} in one cell and {b} in the other")
    return problems


def are_interleaved(first: Level, second: Level) -> bool:
    """Whether neither cell was measured wholly before the other (A B B A), so that drift falls on both."""
    a, b = ([repeat.began_at for repeat in level.repeats] for level in (first, second))
    return bool(a and b) and min(a) < max(b) and min(b) < max(a)
