"""What a scheme buys and costs: memory item by item, speed over load, and both against quality."""

from __future__ import annotations

from evalq.records import Ledger, Load, Record
from evalq.report.page.blocks import Block, Chart, Fold, Table, Text, Word
from evalq.report.page.charts import colour_of, interval_rows, lines_by, scatter, stacked_bars
from evalq.report.page.quality import inks, names_of
from evalq.report.page.view import Group, Tradeoff
from evalq.report.words import ABSENT, GIB, interval, size

PARTS = {  # part of the ledger -> colour
    "weights, 16 bit": "var(--c1)",
    "weights, 8 bit": "var(--c2)",
    "weights, packed integers": "var(--c3)",
    "scales and the rest": "var(--c8)",
    "KV cache of 32,768 tokens": "var(--soft)",
}
SIXTEEN, EIGHT, PACKED, REST, CACHE = PARTS
KV_TOKENS = 32_768
STANDINGS = {
    "front": Word("not beaten", "pass"),
    "tied": Word("tied", "warn"),
    "dominated": Word("beaten", "none"),
    "open": Word("open", "none"),
}


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
    """Quality against memory; what no other cell beats is joined by a line."""
    table = _tradeoff_table(group.tradeoff)
    largest = max((one.total_bytes for one in group.tradeoff), default=0)
    unit, factor = ("GiB", GIB) if largest >= GIB else ("MiB", 1024**2)
    rows = [row for one in group.tradeoff if (row := _point(one, factor))]
    if len(rows) < 2:
        return [table] if group.tradeoff else [Text("No memory ledger in these records.", "note")]
    chosen = {one.name for one in group.tradeoff if one.standing in ("front", "tied")}
    front = [row for row in rows if row["name"] in chosen]
    order = ["baseline", *names_of(group)]
    names = colour_of([name for name in order if any(row["name"] == name for row in rows)], grey=("baseline",))
    chart = Chart(
        "Perplexity increase against memory: lower left is better",
        "One point per scheme with its interval; the dashed line joins cells that no other beats. "
        + ", ".join(f"{row['name']}: {row['x']:.2f} {unit}, {row['y']:+.2f} %" for row in rows)
        + ".",
        scatter(
            rows, f"weights and KV cache of {KV_TOKENS:,} tokens, {unit}", "increase of perplexity, %", names, front
        ),
        table,
    )
    return [
        chart,
        Text(
            "Beaten: another cell needs no more memory and its whole interval is better. Tied: the intervals overlap.",
            "note",
        ),
    ]


def _point(one: Tradeoff, factor: int) -> dict[str, object] | None:
    e = one.increase
    if e is None or e.value is None or e.low is None or e.high is None:
        return None
    return {
        "name": one.name,
        "x": one.total_bytes / factor,
        "y": 100 * e.value,
        "low": 100 * e.low,
        "high": 100 * e.high,
        "label": one.name,
    }


def _tradeoff_table(cells: list[Tradeoff]) -> Table:
    rows = [
        (
            one.name,
            size(one.total_bytes),
            "yardstick" if one.increase is not None and one.increase.n == 0 else interval(one.increase),
            ABSENT if one.increase is None else str(one.increase.n or ABSENT),
            ABSENT if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
            STANDINGS[one.standing],
            one.reason,
        )
        for one in cells
    ]
    columns = (
        "scheme",
        f"weights and {KV_TOKENS:,} tokens",
        "perplexity increase",
        "n documents",
        "output tok/s",
        "standing",
        "why",
    )
    return Table("Memory, quality and speed of each cell, smallest first", columns, rows, frozenset({1, 2, 3, 4}))
