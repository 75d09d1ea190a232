"""Load tests: the ladder over concurrency, every level as a table, health of the device, what does not stand and why."""

from __future__ import annotations

from typing import Any

from evalq.loads.results import Level, LoadResult
from evalq.records import Record
from evalq.report.load_tables import COLUMNS, load_rows
from evalq.report.page.blocks import Block, Chart, Table, Text, Word
from evalq.report.page.charts import colour_of, lines_by
from evalq.report.words import ABSENT

LADDER = (  # figure -> title, axis
    ("latency_p99_seconds", "Latency ladder: 99th percentile of a request", "p99 latency, seconds"),
    ("ttft_p99_seconds", "Time to first token: 99th percentile", "p99 time to first token, seconds"),
    ("output_tokens_per_second", "Throughput ladder", "output tokens per second"),
)
VERDICTS = {"good": "pass", "warning": "warn", "bad": "fail"}
Cells = list[tuple[str, Record]]


def has_loads(cells: Cells) -> bool:
    return any(record.load_results for _, record in cells)


def load_section(cells: Cells) -> list[Block]:
    """Charts where several concurrencies were run, then every figure, then what the device's sensors said."""
    table = _table(cells)
    names = list(dict.fromkeys(name for _, record in cells for name in record.load_results))
    blocks: list[Block] = []
    for load in names:
        for figure, title, axis in LADDER:
            rows = _rows(cells, load, figure)
            if len({row["x"] for row in rows}) > 1:
                colours = colour_of([name for name, _ in cells], grey=("baseline",))
                said = "One line per scheme over requests at once; bars are the range of the repeats."
                drawn = lines_by(rows, "requests at once", axis, colours, ordinal=False)
                blocks.append(Chart(f"{title} ({load})", said, drawn, table))
    blocks.append(table)
    noise = "n counts repeats; after ± stands what two identical runs may differ by in 95 of 100 pairs, as far as repeats can tell."
    return [*blocks, Text(noise, "note"), *_health(cells), *_invalid(cells), *_missing(cells)]


def _levels(cells: Cells) -> list[tuple[str, LoadResult, Level]]:
    return [
        (name, result, level)
        for name, record in cells
        for result in record.load_results.values()
        for level in result.levels
    ]


def _rows(cells: Cells, load: str, figure: str) -> list[dict[str, Any]]:
    rows = []
    for name, result, level in _levels(cells):
        found = level.figures.get(figure)
        if result.name == load and level.concurrency and level.valid and found is not None and found.value:
            ends = {"low": found.low or found.value, "high": found.high or found.value}
            rows.append({"name": name, "x": level.concurrency, "y": found.value, **ends})
    return sorted(rows, key=lambda row: row["x"])


def _table(cells: Cells) -> Table:
    """Every load, level and cell; the n of a row is its repeats."""
    repeats = [str(len(level.repeats)) for _, _, level in _levels(cells)]
    rows = [
        [f"{row[0]}, {row[1]}", n, *row[2:]] for row, n in zip(load_rows([r for _, r in cells]), repeats, strict=True)
    ]
    columns = ("cell, load", "n repeats", *COLUMNS[2:])
    return Table("Load tests, median of the repeats", columns, rows, frozenset(range(1, len(columns) - 1)))


def _health(cells: Cells) -> list[Block]:
    rows = []
    for name, record in cells:
        for result in record.load_results.values():
            for check in result.health.checks if result.health else []:
                value = ABSENT if check.value is None else f"{check.value:.1%}"
                limit = ABSENT if check.limit is None else f"{check.limit:.0%}"
                word = Word(check.verdict, VERDICTS.get(check.verdict, "none"))
                rows.append((f"{name}, {result.name}: {check.name}", value, limit, word, check.meaning))
    columns = ("cell, load: what", "seen", "limit", "verdict", "in words")
    return (
        [Table("Health of the device in the measured windows (n=1 run each)", columns, rows, frozenset({1, 2}))]
        if rows
        else []
    )


def _invalid(cells: Cells) -> list[Block]:
    said = []
    for name, result, level in _levels(cells):
        if not level.valid:
            said.append(f"{name}, {result.name}, {level.label}: {'; '.join(level.reasons)}")
    for name, record in cells:
        said += [f"{name}, {one.name}: {one.failure}" for one in record.load_results.values() if one.failure]
    return [Text(f"Does not stand: {text}", "warning") for text in dict.fromkeys(said)]


def _missing(cells: Cells) -> list[Block]:
    said = [f"{name}: {load} was asked for and not measured" for name, record in cells for load in record.loads_missing]
    return [Text(text, "note") for text in said]
