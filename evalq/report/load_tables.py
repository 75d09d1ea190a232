"""Loads for the terminal and as Markdown: one line per cell and level, what the device's sensors say, and pairs of cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evalq.loads.compare import Compared, compare_loads
from evalq.loads.results import Level, LoadResult, Spread
from evalq.records import Record
from evalq.report.words import ABSENT, size

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = (
    "cell",
    "load",
    "output tok/s",
    "total tok/s",
    "TTFT p50 / p99 s",
    "TPOT p50 ms",
    "ITL p99 ms",
    "latency p50 / p99 s",
    "goodput req/s",
    "preempted",
    "of bound",
    "J per token",
    "stands",
)


def load_rows(records: Sequence[Record]) -> list[list[str]]:
    """One row per record, load and level; speeds with the difference that two identical runs may show."""
    return [
        [f"{record.cell.quant} ({record.cell.engine})", f"{result.name}: {level.label}", *_figures(level)]
        for record in records
        for result in record.load_results.values()
        for level in result.levels
    ]


def _figures(level: Level) -> list[str]:
    figures = level.figures
    preempted = [repeat.preemptions for repeat in level.repeats]
    return [
        _with_noise(figures.get("output_tokens_per_second")),
        _number(figures.get("total_tokens_per_second"), 0),
        _pair(figures.get("ttft_p50_seconds"), figures.get("ttft_p99_seconds")),
        _number(figures.get("tpot_p50_seconds"), 2, 1000.0),
        _number(figures.get("itl_p99_seconds"), 2, 1000.0),
        _pair(figures.get("latency_p50_seconds"), figures.get("latency_p99_seconds")),
        _number(figures.get("goodput_requests_per_second"), 2),
        ABSENT if None in preempted else str(sum(count or 0 for count in preempted)),
        ABSENT if level.percent_of_bound is None else f"{level.percent_of_bound:.0f} %",
        _number(figures.get("joules_per_output_token"), 3),
        "valid" if level.valid else f"INVALID: {'; '.join(level.reasons)}",
    ]


def _number(spread: Spread | None, digits: int, factor: float = 1.0) -> str:
    return ABSENT if spread is None or spread.value is None else f"{factor * spread.value:,.{digits}f}"


def _with_noise(spread: Spread | None) -> str:
    if spread is None or spread.value is None:
        return ABSENT
    noise = "" if spread.run_to_run is None else f" ± {spread.run_to_run:,.1f}"
    return f"{spread.value:,.1f}{noise}"


def _pair(first: Spread | None, second: Spread | None) -> str:
    return f"{_number(first, 3)} / {_number(second, 3)}"


def condition_lines(records: Sequence[Record]) -> list[str]:
    """Per load: on which engine start, who sent, how long the start took, and every verdict on the device's health."""
    lines = []
    for record in records:
        for result in record.load_results.values():
            starts = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in result.start_seconds.items())
            lines.append(
                f"{record.cell.quant} ({record.cell.engine}), {result.name}: on the {result.start} start ({starts}), sent by "
                f"{result.client}, on {result.device}"
            )
            lines += [f"  {line}" for line in health_lines(result)]
    return lines


def health_lines(result: LoadResult) -> list[str]:
    """The device's health in words; one sentence where there are no sensors."""
    health = result.health
    if health is None:
        return ["health: not sampled"]
    if health.note:
        return [f"health: {health.note}"]
    lines = [f"{check.name}: {check.verdict}; {check.meaning}" for check in health.checks]
    lines += [f"clocks lowered: {reason}" for reason in health.throttling]
    means = ", ".join(f"{name} {value:,.3g}" for name, value in health.means.items())
    return [*lines, f"means over {health.samples} samples: {means}"]


def ledger_rows(records: Sequence[Record]) -> list[list[str]]:
    """The memory ledger of each cell; what the driver sees is shown last and is no axis to compare on."""
    rows = []
    for record in records:
        ledger = record.ledger
        if ledger is not None:
            tokens = ABSENT if ledger.kv_pool_tokens is None else f"{ledger.kv_pool_tokens:,}"
            parts = (ledger.weight_bytes, ledger.kv_bytes_per_token, ledger.kv_pool_bytes)
            rest = (ledger.activation_bytes, ledger.graph_bytes, ledger.driver_bytes)
            cell = f"{record.cell.quant} ({record.cell.engine})"
            rows.append([cell, *(size(part) for part in parts), tokens, *(size(part) for part in rest)])
    return rows


LEDGER_COLUMNS = ("cell", "weights", "KV per token", "KV pool", "pool tokens", "activations", "graphs", "driver sees")


def pair_rows(records: Sequence[Record]) -> list[tuple[str, list[Compared]]]:
    """Each cell against the first of its load: "B against A" and the compared figures."""
    found = []
    first = records[0] if records else None
    for record in records[1:]:
        for name, result in record.load_results.items():
            if first is not None and name in first.load_results:
                title = f"{record.cell.quant} ({record.cell.engine}) against {first.cell.quant} ({first.cell.engine})"
                found.append((f"{title}, {name}", compare_loads(first.load_results[name], result)))
    return found


def pair_lines(records: Sequence[Record]) -> list[list[str]]:
    """Rows of the comparison: title, level, figure, both values, share, what may be noise, whether it stands."""
    rows = []
    for title, compared in pair_rows(records):
        for row in compared:
            noise = ABSENT if row.noise is None else f"{100 * row.noise:.1f} %"
            word = "differs" if row.differs else "within noise"
            stands = word if row.valid else f"{word}; INVALID: {'; '.join(row.reasons)}"
            values = [f"{row.first:,.4g}", f"{row.second:,.4g}", f"{row.share:.3f}", noise, stands]
            rows.append([title, row.level, row.figure, *values])
    return rows


PAIR_COLUMNS = ("cells", "level", "figure", "first", "second", "share", "noise", "stands")


SHORT_COLUMNS = ("cell", "level", "output tok/s", "TTFT p99 s", "TPOT p50 ms", "latency p99 s", "stands")


def short_rows(records: Sequence[Record]) -> list[list[str]]:
    """The rows that fit a terminal of 80 columns; the whole is in the Markdown."""
    rows = []
    for record in records:
        for result in record.load_results.values():
            for level in result.levels:
                figures = level.figures
                rows.append(
                    [
                        record.cell.quant,
                        level.label,
                        _with_noise(figures.get("output_tokens_per_second")),
                        _number(figures.get("ttft_p99_seconds"), 3),
                        _number(figures.get("tpot_p50_seconds"), 1, 1000.0),
                        _number(figures.get("latency_p99_seconds"), 2),
                        "valid" if level.valid else "INVALID",
                    ]
                )
    return rows


def invalid_lines(records: Sequence[Record]) -> list[str]:
    """Why a level does not count, one line each."""
    return [
        f"INVALID {record.cell.quant} ({record.cell.engine}), {result.name}, {level.label}: {'; '.join(level.reasons)}"
        for record in records
        for result in record.load_results.values()
        for level in result.levels
        if not level.valid
    ]


def pair_short(records: Sequence[Record]) -> list[str]:
    """Pairs of cells in a line each: throughput and p99 latency as shares of the first cell's."""
    lines = []
    for title, compared in pair_rows(records):
        for row in compared:
            if row.figure in ("output_tokens_per_second", "latency_p99_seconds"):
                word = "differs" if row.differs else "within noise"
                why = "" if row.valid else f" (INVALID: {'; '.join(row.reasons)})"
                lines.append(f"{title}, {row.level}: {row.figure} {100 * (row.share - 1):+.1f} %, {word}{why}")
    return lines


def load_table(records: Sequence[Record]) -> RenderableType:
    """All loads of the records for the terminal: tables that fit 80 columns, then lines."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(title: str, columns: Sequence[str], rows: list[list[str]]) -> Table:
        made = Table(title=title, title_justify="left")
        for number, name in enumerate(columns):
            made.add_column(name, justify="left" if number < 2 else "right")
        for row in rows:
            made.add_row(*row)
        return made

    ledger = [row[:5] for row in ledger_rows(records)]
    lines = [*invalid_lines(records), *pair_short(records), *condition_lines(records)]
    return Group(
        table("evalq loads", SHORT_COLUMNS, short_rows(records)),
        table("memory ledger", LEDGER_COLUMNS[:5], ledger),
        *(Text(line) for line in lines),
    )


def markdown(records: Sequence[Record]) -> str:
    """The same as Markdown."""
    tables = [
        (COLUMNS, load_rows(records)),
        (PAIR_COLUMNS, pair_lines(records)),
        (LEDGER_COLUMNS, ledger_rows(records)),
    ]
    text = "\n\n".join(markdown_table(columns, rows) for columns, rows in tables if rows)
    return text + "\n\n" + "\n".join(f"- {line.strip()}" for line in condition_lines(records)) + "\n"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table; bars inside cells are escaped."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
