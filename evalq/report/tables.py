"""Tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evalq.records import Estimate, Verdict, to_json
from evalq.report.words import ABSENT, COLOURS, interval, limits, size, verdict_word

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclass(frozen=True)
class SweepRow:
    """One cell of a sweep; None where it was not measured. `increase` is a share, the interval in it."""

    quant: str
    increase: Estimate | None
    weight_bytes: int | None
    kv_bytes_per_token: int | None
    output_tokens_per_second: float | None  # of a valid load
    verdict: Verdict | None
    failure: str = ""  # why there is no verdict
    floor: Estimate | None = None  # A/A floor of this engine
    p_holm: float | None = None  # p of the FAIL after Holm's step-down over the sweep
    speed_invalid: bool = False  # there is a rate, and it does not stand


def verdict_table(verdict: Verdict) -> RenderableType:
    """A verdict: its sentence, one line per check, and the reasons."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    colour = COLOURS[verdict.status]
    table = Table(title="evalq verdict", title_justify="left")
    for name in ("metric", "weight", "difference [interval]", "allowed", "status"):
        table.add_column(name)
    for check in verdict.checks:
        weight = "required" if check.required else "advice"
        status = Text(check.status, style=COLOURS[check.status] if check.required else "dim")
        table.add_row(check.metric, weight, interval(check.estimate), limits(check), status)
    lines = [Text(verdict.summary, style=f"bold {colour}"), *(Text(f"  - {reason}") for reason in verdict.reasons[1:])]
    end = Text(f"{verdict_word(verdict)}, exit code {verdict.exit_code}", style=f"bold {colour}")
    return Group(*([table] if verdict.checks else []), *lines, end)


def sweep_table(rows: Sequence[SweepRow]) -> RenderableType:
    """All cells of a sweep: quality, memory, speed, verdict."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="evalq: cells", title_justify="left", caption=holm_sentence(rows), caption_justify="left")
    table.add_column("scheme")
    for name in ("perplexity increase [95 %]", "weights", "KV per token", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        style = COLOURS[row.verdict.status] if row.verdict else "red" if row.failure.startswith("failed") else "dim"
        word = verdict_word(row.verdict) if row.verdict else row.failure or "no verdict"
        missing = "INVALID" if row.speed_invalid else ABSENT
        rate = missing if row.output_tokens_per_second is None else f"{row.output_tokens_per_second:,.1f}"
        memory = (size(row.weight_bytes), size(row.kv_bytes_per_token))
        table.add_row(row.quant, _increase(row), *memory, rate, Text(word, style=style))
    return table


def _increase(row: SweepRow) -> str:
    floor = row.floor
    if floor is None or floor.low is None or floor.high is None:
        return interval(row.increase)
    return f"{interval(row.increase)} (A/A ±{100 * max(abs(floor.low), abs(floor.high)):.2f} %)"


def holm_sentence(rows: Sequence[SweepRow]) -> str:
    """What many schemes at once do to the error rate, and which FAILs stand after Holm's correction."""
    tested = [row for row in rows if row.p_holm is not None]
    if len(tested) < 2:
        return ""
    weak = [
        row.quant
        for row in tested
        if row.verdict is not None and row.verdict.status == "FAIL" and (row.p_holm or 0.0) > 0.025
    ]
    tail = f"not after it: {', '.join(weak)}" if weak else "every FAIL stands after it"
    return f"{len(tested)} schemes judged; FAILs corrected by Holm's step-down at 2.5 % one-sided: {tail}."


def verdict_text(verdict: Verdict, width: int = 120, colour: bool = False) -> str:
    """The verdict table as plain text."""
    console = _console(width, colour)
    with console.capture() as capture:
        console.print(verdict_table(verdict))
    return capture.get()


def _console(width: int, colour: bool) -> Console:
    from rich.console import Console

    return Console(width=width, force_terminal=colour, no_color=not colour, color_system="standard" if colour else None)


def verdict_json(verdict: Verdict) -> str:
    """The verdict as one line of strict JSON."""
    return json.dumps(json.loads(to_json(verdict)), allow_nan=False, ensure_ascii=False)
