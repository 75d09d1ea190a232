"""What a load test found, as it stands in a record. Units are in the names; None with a reason where there is no figure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Spread:
    """One figure over the repeats of a level."""

    value: float | None  # median of the repeats
    low: float | None  # lowest repeat
    high: float | None  # highest repeat
    run_to_run: (
        float | None
    )  # two identical runs differ by less than this in 95 of 100 pairs, as far as repeats can tell


@dataclass(frozen=True)
class Repeat:
    """One run of one level."""

    round: int  # of the sweep: every other round runs the cells in reverse
    began_at: str  # ISO 8601, UTC
    seconds: float  # from the first request sent to the last answered
    requests: int
    requests_failed: int
    wrong_lengths: int  # answers with another number of tokens than asked for
    preemptions: int | None
    prefix_hit_share: float | None  # of the prompt tokens
    figures: dict[str, float]
    notes: dict[str, float] = field(default_factory=dict)  # counters of the engine: bytes offloaded and loaded back


@dataclass(frozen=True)
class Level:
    """One concurrency, one rate, one trace, or all at once."""

    label: str  # "all at once", "concurrency 100", "2 requests/s", "trace"
    concurrency: int | None  # requests under way at a time; None where arrivals decide
    rate_per_second: float | None
    requests: int
    input_tokens: float  # mean per request
    output_tokens: float  # mean per request
    figures: dict[str, Spread]
    missing: dict[str, str]  # figure -> why there is none
    repeats: list[Repeat]
    bound_output_tokens_per_second: float | None  # the planner's roofline for these lengths and this concurrency
    percent_of_bound: float | None
    valid: bool
    reasons: list[str]  # why the figures of this level are not valid


@dataclass(frozen=True)
class HealthCheck:
    """One property of the device in the measured windows against its limit."""

    name: str
    value: float | None  # share of 1
    limit: float | None
    verdict: str  # good | warning | bad | none
    meaning: str  # in words: what was seen and, unless good, what to do


@dataclass(frozen=True)
class Health:
    """All checks of a load test, or why there are none."""

    source: str  # nvml | amdsmi | none
    note: str  # why there are no sensors
    checks: list[HealthCheck]
    throttling: list[str]  # reasons the device gave for lower clocks in the windows
    foreign_processes: list[int]  # process ids on the device that were not there when the engine was ready
    devices: list[dict[str, str]]  # exact name, driver, memory, link of each GPU
    means: dict[str, float]  # power_watts, sm_clock_mhz, temperature_celsius, ... over the windows
    samples: int


@dataclass(frozen=True)
class LoadResult:
    """One load on one cell."""

    name: str  # conf/load entry
    kind: str
    start: str  # "scoring": the engine start of the quality figures; "serving": vllm serve
    client: str  # who sent the requests
    levels: list[Level]
    health: Health | None
    start_seconds: dict[
        str, float
    ]  # "cold", "warm", "eager" or "unknown" -> seconds from process start to the first answer
    scheduler: dict[str, int]  # the engine's own max_num_seqs and max_num_batched_tokens
    device: str  # exact name
    failure: str = ""  # why the test ended early; the levels it had finished are kept


def short_name(result: LoadResult, level: Level) -> str:
    """ "ladder-concurrency-100": a name that a policy's condition can hold."""
    label = level.label.replace("/", "-per-").replace(" ", "-")
    return result.name if len(result.levels) == 1 else f"{result.name}-{label}"
