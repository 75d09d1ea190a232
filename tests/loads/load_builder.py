"""Event lists and load results with chosen figures."""

from __future__ import annotations

from typing import Any

from evalq.loads.build import make_level
from evalq.loads.figures import Request
from evalq.loads.results import Level, LoadResult, Repeat
from evalq.loads.schedule import LevelPlan


def request(start: float = 0.0, ttft: float = 0.1, gap: float = 0.01, tokens: int = 11, **changes: Any) -> Request:
    """`tokens` tokens: the first after `ttft`, then one each `gap` seconds; 50 tokens of prompt."""
    fields: dict[str, Any] = {
        "start": start,
        "ttft": ttft,
        "latency": ttft + gap * (tokens - 1),
        "itls": (gap,) * (tokens - 1),
        "input_tokens": 50,
        "output_tokens": tokens,
        "wanted_tokens": tokens,
    }
    return Request(**{**fields, **changes})


def repeat(rate: float = 100.0, **changes: Any) -> Repeat:
    fields: dict[str, Any] = {
        "round": 1,
        "began_at": "2026-11-30T00:00:00.000+00:00",
        "seconds": 10.0,
        "requests": 100,
        "requests_failed": 0,
        "wrong_lengths": 0,
        "preemptions": 0,
        "prefix_hit_share": 0.0,
        "figures": {"output_tokens_per_second": rate, "latency_p99_seconds": 100.0 / rate},
    }
    return Repeat(**{**fields, **changes})


def level(*rates: float, label: str = "concurrency 10", minute: int = 0, **changes: Any) -> Level:
    """A level whose repeats ran at these output tokens per second, one a minute from `minute`."""
    repeats = [
        repeat(rate, began_at=f"2026-11-30T00:{minute + i:02d}:00.000+00:00", **changes) for i, rate in enumerate(rates)
    ]
    plan = LevelPlan(label, [500] * 100, [100] * 100, concurrency=10)
    return make_level(plan, repeats, 1, None, None)


def result(*levels: Level, **changes: Any) -> LoadResult:
    fields: dict[str, Any] = {
        "name": "ladder",
        "kind": "ladder",
        "start": "serving",
        "client": "a test",
        "levels": list(levels),
        "health": None,
        "start_seconds": {"warm": 30.0},
        "scheduler": {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
        "device": "NVIDIA H200",
    }
    return LoadResult(**{**fields, **changes})
