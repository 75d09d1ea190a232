"""Levels and results from repeats: medians, spreads, validity, and the joining of several rounds. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from evalq.loads.figures import LATENCIES, PERCENTS, Request, spreads
from evalq.loads.results import Health, Level, LoadResult, Repeat
from evalq.loads.schedule import LevelPlan
from evalq.loads.validity import device_problems, level_problems

EXPECTED = (
    "output_tokens_per_second",
    "input_tokens_per_second",
    "total_tokens_per_second",
    *(f"{name}_{part}_seconds" for name in LATENCIES for part in ("mean", *(f"p{p}" for p in PERCENTS))),
    "joules_per_output_token",
    "goodput_requests_per_second",
)
WHY_MISSING = {
    "joules": "the device has no energy counter, or it covers none of the windows",
    "goodput": "no objective is given; set load.slo",
    "itl": "the engine's own loop tells when a request ends and when its first token came, not each token",
    "ttft": "no request was answered, or the engine keeps no times of requests",
    "tpot": "answers have one token, or the engine keeps no times of requests",
}


def make_level(
    plan: LevelPlan, repeats: Sequence[Repeat], warmup_requests: int, bound: float | None, health: Health | None
) -> Level:
    """A level with its figures over `repeats`, and why they are not valid."""
    figures = spreads([repeat.figures for repeat in repeats])
    reasons = [*level_problems(repeats, warmup_requests), *device_problems(health)]
    rate = figures.get("output_tokens_per_second")
    share = 100.0 * rate.value / bound if bound and rate and rate.value is not None else None
    return Level(
        label=plan.label,
        concurrency=plan.concurrency,
        rate_per_second=plan.rate_per_second,
        requests=plan.requests,
        input_tokens=sum(plan.input_lengths) / max(1, plan.requests),
        output_tokens=sum(plan.output_lengths) / max(1, plan.requests),
        figures=figures,
        missing={name: _why(name) for name in EXPECTED if name not in figures},
        repeats=list(repeats),
        bound_output_tokens_per_second=bound,
        percent_of_bound=share,
        valid=not reasons,
        reasons=list(dict.fromkeys(reasons)),
    )


def _why(figure: str) -> str:
    return WHY_MISSING.get(figure.split("_")[0], "no request was answered")


def wrong_lengths(requests: Sequence[Request]) -> int:
    """Answered requests with another number of tokens than asked for."""
    return sum(1 for request in requests if request.ok and request.output_tokens != request.wanted_tokens)


def joined(first: LoadResult, second: LoadResult, warmup_requests: int) -> LoadResult:
    """Two rounds of one load on one cell as one: repeats side by side, everything else computed anew."""
    later = {level.label: level for level in second.levels}
    levels = []
    for level in first.levels:
        other = later.get(level.label)
        repeats = [*level.repeats, *(other.repeats if other else [])]
        problems = [*level_problems(repeats, warmup_requests), *device_problems(first.health)]
        problems += [*device_problems(second.health), *([] if other else ["the later round has no such level"])]
        figures = spreads([repeat.figures for repeat in repeats])
        bound, rate = level.bound_output_tokens_per_second, figures.get("output_tokens_per_second")
        levels.append(
            dataclasses.replace(
                level,
                figures=figures,
                repeats=repeats,
                percent_of_bound=100.0 * rate.value / bound if bound and rate and rate.value is not None else None,
                valid=not problems,
                reasons=list(dict.fromkeys(problems)),
            )
        )
    return dataclasses.replace(
        first,
        levels=levels,
        start_seconds={**second.start_seconds, **first.start_seconds},
        failure=first.failure or second.failure,
    )
