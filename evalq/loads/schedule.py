"""From a load's config to its levels: how many requests, of which lengths, when. Pure, but for reading a trace's file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from evalq.config import LoadConfig
from evalq.errors import ConfigError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class LevelPlan:
    """One level: lengths of each request in tokens; who decides when it is sent is a concurrency, a rate or arrivals."""

    label: str
    input_lengths: list[int]
    output_lengths: list[int]
    concurrency: int | None = None
    rate_per_second: float | None = None
    arrivals: list[float] | None = None  # seconds from the start

    @property
    def requests(self) -> int:
        return len(self.input_lengths)


@dataclass(frozen=True)
class TraceRow:
    arrival: float  # seconds from the first row
    input_tokens: int
    output_tokens: int


def levels_of(load: LoadConfig, rows: Sequence[TraceRow] = ()) -> list[LevelPlan]:
    """The levels in order. rows: of the trace, for kind trace."""
    if load.kind == "trace":
        return [trace_level(load, rows)]
    if load.kind == "rate":
        return [_fixed(load, f"{rate:g} requests/s", load.requests, rate=rate) for rate in load.rates]
    levels = [
        _fixed(load, f"concurrency {slots}", max(load.requests, load.waves * slots), concurrency=slots)
        for slots in (load.concurrencies if load.kind == "ladder" else [])
    ]
    peak = load.requests if load.kind == "offline" else load.peak_requests
    return [*levels, *([_fixed(load, "all at once", peak)] if peak else [])]


def _fixed(
    load: LoadConfig, label: str, count: int, concurrency: int | None = None, rate: float | None = None
) -> LevelPlan:
    return LevelPlan(label, [load.input_tokens] * count, [load.output_tokens] * count, concurrency, rate)


def trace_level(load: LoadConfig, rows: Sequence[TraceRow]) -> LevelPlan:
    """The first `requests` rows, sped up and scaled; lengths are at least 1 token and at most those of the config."""

    def scaled(tokens: int, longest: int) -> int:
        return min(longest, max(1, round(tokens * load.trace_length_scale)))

    kept = rows[: load.requests]
    return LevelPlan(
        "trace",
        [scaled(row.input_tokens, load.input_tokens) for row in kept],
        [scaled(row.output_tokens, load.output_tokens) for row in kept],
        arrivals=[row.arrival / load.trace_speed for row in kept],
    )


def read_trace(file: Path, limit: int) -> list[TraceRow]:
    """The first `limit` rows. Errors: ConfigError naming the file and the line."""
    try:
        with open(file, newline="", encoding="utf-8") as opened:
            reader = csv.DictReader(opened)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
            if missing:
                raise ConfigError(f"{file} lacks the columns {', '.join(missing)}; a trace has {', '.join(COLUMNS)}")
            rows = []
            for row in reader:
                rows.append(_row(file, reader.line_num, row))
                if len(rows) == limit:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {file} cannot be read ({error}); give load.trace=FILE.csv") from error
    if not rows:
        raise ConfigError(f"the trace {file} has no rows; give load.trace=FILE.csv")
    first = rows[0][0]
    found = [TraceRow(moment - first, inputs, outputs) for moment, inputs, outputs in rows]
    if any(b.arrival < a.arrival for a, b in pairwise(found)):
        raise ConfigError(f"the trace {file} is not in order of TIMESTAMP; sort it")
    return found


def _row(file: Path, line: int, row: dict[str, str]) -> tuple[float, int, int]:
    try:
        moment, inputs, outputs = _seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"line {line} of the trace {file} cannot be read ({error}); correct or remove it") from error
    if inputs < 0 or outputs < 0:
        raise ConfigError(f"line {line} of the trace {file} has a negative number of tokens; correct or remove it")
    return moment, inputs, outputs


def _seconds(text: str) -> float:
    """A date and time, or a number of seconds."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()
