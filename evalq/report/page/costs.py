"""What a scheme buys and costs: memory item by item, speed over load, and both against quality."""

from __future__ import annotations

from typing import Any

from evalq.records import Ledger, Load, Record
from evalq.report.page.blocks import Block, Chart, Fold, Table, Text, Word
from evalq.report.page.charts import colour_of, interval_rows, lines_by, scatter, stacked_bars
from evalq.report.page.loads import has_loads, load_section
from evalq.report.page.quality import inks, names_of
from evalq.report.page.view import KV_TOKENS, WORKLOAD, Group
from evalq.report.pareto import PLACES, place_word
from evalq.report.tradeoff import Placed
from evalq.report.words import ABSENT, GIB, interval, size

PARTS = {  # part of the ledger -> colour
    "weights, 16 bit": "var(--c1)",
    "weights, 8 bit": "var(--c2)",
    "weights, packed integers": "var(--c3)",
    "scales and the rest": "var(--c8)",
    f"KV cache of {KV_TOKENS:,} tokens": "var(--soft)",
}
SIXTEEN, EIGHT, PACKED, REST, CACHE = PARTS
MEMORY = f"weights and KV of {WORKLOAD.concurrency} requests of {WORKLOAD.context:,} tokens"


def part_of(dtype: str) -> str:
    """Which part of the ledger a parameter's dtype belongs to."""
    if dtype in ("bfloat16", "float16"):
        return SIXTEEN
    if "float8" in dtype or dtype in ("int8", "uint8"):
        return EIGHT
    return PACKED if dtype == "int32" else REST


def cells_of(group: Group) -> list[tuple[str, Record]]:
    """Baseline first, then candidates."""
    base = [("baseline", group.baseline)] if group.baseline else []
    return [*base, *((one.name, one.record) for one in group.candidates)]


def ledger_parts(ledger: Ledger) -> dict[str, int]:
    """Bytes of each part, those that are there."""
    parts: dict[str, int] = {}
    for dtype, count in ledger.weight_bytes_by_dtype.items():
        parts[part_of(dtype)] = parts.get(part_of(dtype), 0) + count
    if ledger.kv_bytes_per_token is not None:
        parts[CACHE] = ledger.kv_bytes_per_token * KV_TOKENS
    return parts


def memory_section(group: Group) -> list[Block]:
    """The ledger as bars and as a table, and the planner's figures beside the measured ones."""
    cells = [(name, record.ledger) for name, record in cells_of(group) if record.ledger is not None]
    if not cells:
        return [Text("No memory ledger in these records.", "note")]
    largest = max((sum(ledger_parts(ledger).values()) for _, ledger in cells), default=0)
    unit, factor = ("GiB", GIB) if largest >= GIB else ("MiB", 1024**2)
    drawn, totals = [], []
    for name, ledger in cells:
        parts = ledger_parts(ledger)
        drawn += [
            {"name": name, "part": part, "rank": list(PARTS).index(part), "value": count / factor}
            for part, count in parts.items()
        ]
        whole = sum(parts.values())
        totals.append({"name": name, "value": whole / factor, "label": f"{whole / factor:,.2f}"})
    used = {part: ink for part, ink in PARTS.items() if any(row["part"] == part for row in drawn)}
    words = ", ".join(f"{row['name']} {row['label']} {unit}" for row in totals)
    chart = Chart(
        f"Memory: weights and the KV cache of {KV_TOKENS:,} tokens, {unit}",
        f"Stacked bars, one per scheme. Together: {words}.",
        stacked_bars(drawn, unit, used, totals),
        _ledger_table(cells),
    )
    note = Text(
        "Weights are counted as loaded, before kernels repack them. The KV pool takes whatever memory the engine was given, so the "
        f"bars show the cache of {KV_TOKENS:,} tokens instead; pool and peak are in the table.",
        "note",
    )
    return [chart, note, *_planned(cells)]


def _ledger_table(cells: list[tuple[str, Ledger]]) -> Table:
    base = cells[0][1].weight_bytes
    rows = []
    for name, ledger in cells:
        share = f"{ledger.weight_bytes / base:.1%}" if base and ledger.weight_bytes is not None else ABSENT
        by_dtype = ", ".join(f"{dtype} {size(count)}" for dtype, count in ledger.weight_bytes_by_dtype.items())
        pool = ABSENT if ledger.kv_pool_tokens is None else f"{ledger.kv_pool_tokens:,}"
        rows.append(
            (
                name,
                size(ledger.weight_bytes),
                share,
                size(ledger.checkpoint_bytes),
                size(ledger.kv_bytes_per_token),
                pool,
                size(ledger.kv_pool_bytes),
                f"{size(ledger.peak_bytes)} ({ledger.peak_source})",
                by_dtype,
            )
        )
    columns = (
        "scheme",
        "weights",
        "of the first",
        "checkpoint",
        "KV per token",
        "pool tokens",
        "pool",
        "peak",
        "weights by dtype",
    )
    return Table(
        "Memory ledger, as the engine itself reports it (n=1 engine start each)", columns, rows, frozenset(range(1, 7))
    )


def _planned(cells: list[tuple[str, Ledger]]) -> list[Block]:
    rows = []
    for name, ledger in cells:
        for figure, planned in ledger.predicted.items():
            measured = getattr(ledger, figure, None)
            if planned is None or not measured:
                continue
            rows.append((f"{name}: {figure}", f"{planned:,}", f"{measured:,}", f"{planned / measured - 1:+.3%}"))
    if not rows:
        return []
    table = Table(
        "Planned before the start, and measured",
        ("figure", "planned", "measured", "off by"),
        rows,
        frozenset({1, 2, 3}),
    )
    return [Fold("The planner's figures beside the measured ones", [table])]


def speed_section(group: Group) -> list[Block]:
    """Latency and throughput over concurrency where several loads were run, else one figure per scheme."""
    if has_loads(cells_of(group)):
        return load_section(cells_of(group))
    loads = [(name, load) for name, record in cells_of(group) for load in record.loads.values()]
    if not loads:
        return [Text("No load was run.", "note")]
    table = _load_table(loads)
    valid = [(name, load) for name, load in loads if load.valid and load.output_tokens_per_second is not None]
    steps = {load.concurrency for _, load in valid}
    blocks: list[Block] = [*_ladder(group, valid, table)] if len(steps) > 1 else [*_rates(group, valid, table)]
    invalid = [f"{name}, {load.name}: {'; '.join(load.reasons)}" for name, load in loads if not load.valid]
    return [*blocks, *(Text(f"Not valid: {text}", "warning") for text in invalid)]


def _rates(group: Group, loads: list[tuple[str, Load]], table: Table) -> list[Block]:
    colours = inks(group)
    rows = []
    for name, load in loads:
        value = load.output_tokens_per_second or 0.0
        low, high = load.output_tokens_per_second_low or value, load.output_tokens_per_second_high or value
        label = f"{value:,.0f} ({low:,.0f} to {high:,.0f})"
        rows.append(
            {
                "name": name,
                "value": value,
                "low": low,
                "high": high,
                "label": label,
                "ink": colours.get(name, "var(--c8)"),
            }
        )
    if not rows:
        return [table]
    load = loads[0][1]
    what = f"{load.requests} requests of {load.input_tokens_per_request} tokens in and {load.output_tokens_per_request} out"
    chart = Chart(
        f"Output tokens per second: {what}, {load.concurrency} at once",
        "One row per scheme: median and range of the repeats. "
        + ", ".join(f"{r['name']} {r['label']}" for r in rows)
        + ".",
        interval_rows(rows, "output tokens per second", bend=False),
        table,
    )
    return [chart, Text(f"n={load.repeats} repeats; bars are their range, no confidence interval.", "note")]


def _ladder(group: Group, loads: list[tuple[str, Load]], table: Table) -> list[Block]:
    names = ["baseline", *names_of(group)]
    colours = colour_of(names, grey=("baseline",))
    blocks: list[Block] = []
    for field, title, axis in (
        ("request_latency_p99_seconds", "Latency ladder: 99th percentile of a request", "p99 latency, seconds"),
        ("output_tokens_per_second", "Throughput ladder", "output tokens per second"),
    ):
        rows = [
            {"name": name, "x": load.concurrency, "y": getattr(load, field)}
            for name, load in sorted(loads, key=lambda pair: pair[1].concurrency)
            if getattr(load, field)
        ]
        if rows:
            said = "One line per scheme over requests at once; all figures are in the table."
            blocks.append(Chart(title, said, lines_by(rows, "requests at once", axis, colours, ordinal=False), table))
    return blocks


def _load_table(loads: list[tuple[str, Load]]) -> Table:
    rows = [
        (
            f"{name}, {load.name}",
            f"{load.concurrency:,}",
            f"{load.requests:,} x {load.repeats}",
            f"{load.input_tokens_per_request} / {load.output_tokens_per_request}",
            _range(load),
            _number(load.total_tokens_per_second),
            _seconds(load.request_latency_p50_seconds),
            _seconds(load.request_latency_p99_seconds),
            "yes" if load.valid else "no: " + "; ".join(load.reasons),
        )
        for name, load in loads
    ]
    columns = (
        "scheme and load",
        "at once",
        "n requests x repeats",
        "tokens in / out",
        "output tok/s (range)",
        "all tok/s",
        "p50 s",
        "p99 s",
        "valid",
    )
    return Table("Load tests; the range is that of the repeats", columns, rows, frozenset(range(1, 8)))


def _range(load: Load) -> str:
    if load.output_tokens_per_second is None:
        return ABSENT
    ends = f"{_number(load.output_tokens_per_second_low)} to {_number(load.output_tokens_per_second_high)}"
    return f"{load.output_tokens_per_second:,.1f} ({ends})"


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.1f}"


def _seconds(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3f}"


def tradeoff_section(group: Group) -> list[Block]:
    """Quality against memory against speed: which cells no other beats."""
    if all(item.point.increase is None for item in group.placed):
        return []  # without quality there is nothing to weigh
    table = _tradeoff_table(group.placed)
    largest = max((item.point.memory_bytes or 0 for item in group.placed), default=0)
    unit, factor = ("GiB", GIB) if largest >= GIB else ("MiB", 1024**2)
    rows = [row for item in group.placed if (row := _point(item, factor))]
    if len(rows) < 2:
        return [table]
    order = [name for name in ("baseline", *names_of(group)) if any(row["name"] == name for row in rows)]
    said = ", ".join(f"{row['name']}: {row['x']:.2f} {unit}, {row['y']:+.2f} %, {row['place']}" for row in rows)
    chart = Chart(
        "Perplexity increase against memory: lower left is better",
        f"One point per scheme with its interval; a cross is beaten by another cell. {said}.",
        scatter(rows, f"{MEMORY}, {unit}", "increase of perplexity, %", colour_of(order, grey=("baseline",))),
        table,
    )
    note = (
        "A cell is beaten when another is better beyond noise on quality, memory or speed and worse beyond noise on none; quality "
        "by the paired interval of the two, speed by the ranges of the repeats."
    )
    return [chart, Text(note, "note")]


def _point(item: Placed, factor: int) -> dict[str, Any] | None:
    point, e = item.point, item.point.increase
    if point.memory_bytes is None or (e is None and not point.is_baseline):
        return None
    value, low, high = (0.0, 0.0, 0.0) if e is None else (e.value, e.low, e.high)
    if value is None or low is None or high is None:
        return None
    figures = {"x": point.memory_bytes / factor, "y": 100 * value, "low": 100 * low, "high": 100 * high}
    return {"name": point.name, "label": point.name, "place": PLACES[item.place], **figures}


def _tradeoff_table(placed: list[Placed]) -> Table:
    rows = [
        (
            item.point.name,
            size(item.point.memory_bytes),
            "yardstick" if item.point.is_baseline else interval(item.point.increase),
            str(item.point.increase.n) if item.point.increase else ABSENT,
            ABSENT if item.point.speed is None else f"{item.point.speed:,.0f}",
            Word(PLACES[item.place], "pass" if item.place == "front" else "none"),
            place_word(item),
        )
        for item in placed
    ]
    columns = ("scheme", MEMORY, "perplexity increase", "n documents", "output tok/s", "place", "in words")
    return Table("Memory, quality and speed of each cell", columns, rows, frozenset({1, 2, 3, 4}))
