"""Figures of one run from its list of requests, and their spread over repeats. Seconds and tokens; pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evalq.loads.results import Spread

PERCENTS = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "latency")
# Student's t, 97.5 %, by degrees of freedom 1 to 10; beyond that the value at 10 is used, which is a little wide.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Request:
    """One request as its sender saw it; times in seconds, start on any common clock."""

    start: float
    ttft: float | None  # time to first token
    latency: float | None  # until the last token
    itls: tuple[float, ...]  # between tokens
    input_tokens: int
    output_tokens: int
    wanted_tokens: int
    ok: bool = True

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        if self.ttft is None or self.latency is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def end(self) -> float:
        return self.start + (self.latency or 0.0)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the ordered values, as numpy's default. Errors: ValueError without values."""
    if not values:
        raise ValueError("a percentile of nothing")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100.0
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50.0)


def after_warm_up(requests: Sequence[Request], count: int) -> tuple[list[Request], float]:
    """The requests sent after the first `count` were answered, and the seconds of the window that holds them."""
    ordered = sorted(requests, key=lambda request: request.start)
    warm = max((request.end for request in ordered[:count]), default=-math.inf)
    kept = [request for request in ordered[count:] if request.start >= warm]
    if not kept:
        return [], 0.0
    return kept, max(request.end for request in kept) - min(request.start for request in kept)


def run_figures(
    requests: Sequence[Request], seconds: float, slo: Mapping[str, float] | None = None, joules: float | None = None
) -> dict[str, float]:
    """Every figure that this run gives; rates count answered requests only. slo: figure_seconds -> highest that is good."""
    done = [request for request in requests if request.ok]
    outputs, inputs = sum(r.output_tokens for r in done), sum(r.input_tokens for r in done)
    figures = {"requests_failed": float(len(requests) - len(done))}
    if not done or seconds <= 0:
        return figures
    figures |= {
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": outputs / seconds,
        "input_tokens_per_second": inputs / seconds,
        "total_tokens_per_second": (inputs + outputs) / seconds,
    }
    for name, values in latencies(done).items():
        figures |= summary(name, values)
    if slo:
        good = sum(is_good(request, slo) for request in done)
        figures |= {"goodput_requests_per_second": good / seconds, "goodput_share": good / len(requests)}
    if joules is not None and outputs:
        figures |= {"joules_per_output_token": joules / outputs, "joules_per_token": joules / (inputs + outputs)}
    return figures


def latencies(done: Sequence[Request]) -> dict[str, list[float]]:
    """Seconds by kind of latency, all answered requests together."""
    return {
        "ttft": [r.ttft for r in done if r.ttft is not None],
        "tpot": [tpot for r in done if (tpot := r.tpot) is not None],
        "itl": [itl for r in done for itl in r.itls],
        "latency": [r.latency for r in done if r.latency is not None],
    }


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """ "ttft_mean_seconds", "ttft_p50_seconds", ... ; empty without values."""
    if not values:
        return {}
    found = {f"{name}_mean_seconds": math.fsum(values) / len(values)}
    return found | {f"{name}_p{percent}_seconds": percentile(values, percent) for percent in PERCENTS}


def is_good(request: Request, slo: Mapping[str, float]) -> bool:
    """Whether an answered request keeps every objective; one token has no time per token, which then is kept."""
    seen = {"ttft_seconds": request.ttft, "tpot_seconds": request.tpot, "latency_seconds": request.latency}
    return all(value is None or value <= slo[key] for key, value in seen.items() if key in slo)


def spread(values: Sequence[float]) -> Spread:
    """Median, range, and how far the medians of two identical runs lie apart at most in 95 of 100 pairs.

    t(n - 1) x s x sqrt(2) x the standard error of a median of n (sqrt(pi / 2 / (n + pi / 2 - 1)), within 2 % for n >= 3);
    it knows what differs between repeats, not what differs between engine starts unless the repeats come from several.
    """
    n = len(values)
    if n == 0:
        return Spread(None, None, None, None)
    middle = median(values)
    if n == 1:
        return Spread(middle, middle, middle, None)
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    of_median = math.sqrt(math.pi / 2 / (n + math.pi / 2 - 1))
    return Spread(
        middle, min(values), max(values), T_975[min(n - 1, len(T_975)) - 1] * deviation * math.sqrt(2.0) * of_median
    )


def spreads(runs: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """The spread of every figure that all runs gave."""
    if not runs:
        return {}
    return {name: spread([run[name] for run in runs]) for name in runs[0] if all(name in run for run in runs)}


def output_bound(
    prefill_tokens_per_second: float, decode_tokens_per_second: float, input_tokens: float, output_tokens: float
) -> float:
    """Highest output tokens per second when each output token brings input / output tokens of prefill with it."""
    return 1.0 / (input_tokens / output_tokens / prefill_tokens_per_second + 1.0 / decode_tokens_per_second)
