"""A study of loads as one page: python jobs/bench/load_study.py RECORDS... [--cross-check FILE.json ...] --out README.md

Ladder, comparison with the baseline, memory ledger and health of the records, beside what the source articles say, and the claims
of speed and memory that these records can answer: measured, agrees or differs, why. Reads records only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from evalq.loads.compare import compare_loads
from evalq.loads.results import Level, Repeat
from evalq.records import Ledger, Record, read_record
from evalq.report.load_tables import markdown, markdown_table
from evalq.report.words import ABSENT, size

# Article A ("KV-cache optimisation and FP8 quantisation for large Transformer models"): MI325X, vLLM; 500 tokens in, 100 out.
ARTICLE_P99 = {
    "Llama-3.1-405B (GQA), MI325X x 8": {10: 6.23, 100: 10.08, 500: 14.49},
    "DeepSeek V3.2 (MLA), MI325X x 8": {10: 8.12, 100: 13.75, 500: 14.00},
    "Qwen3-VL-235B (GQA), MI325X x 8": {10: 3.78, 100: 6.33, 500: 9.15},
}
ARTICLE_PEAK = {
    "Llama-3.1-405B (GQA), MI325X x 8": 15_944,
    "DeepSeek V3.2 (MLA), MI325X x 8": 15_343,
    "Qwen3-VL-235B (GQA), MI325X x 8": 47_873,
}
OTHER_HARDWARE = "The articles' models and hardware are other ones: compare the shape over concurrency, not the height."
LITTLE_TO_READ_BACK = "requests without a common prefix have little to read back, and a full device pool still preempts"
CONTEXT, CONCURRENCY = 8192, 64  # of claim 2, as in `evalq plan --claims`
Claim = tuple[str, str, str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--cross-check", nargs="*", type=Path, default=[])
    parser.add_argument("--title", default="Throughput and latency")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    records = in_order([read_record(folder) for folder in options.records])
    text = page(options.title, records, [json.loads(file.read_text()) for file in options.cross_check])
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    print(text)


def in_order(records: list[Record]) -> list[Record]:
    """Baseline first; records without a load are left out."""
    kept = [record for record in records if record.load_results]
    return sorted(kept, key=lambda r: (r.cell.engine != "graphs", not r.cell.is_baseline, r.created_at))


def page(title: str, records: Sequence[Record], checks: Sequence[dict[str, float | str]]) -> str:
    parts = [f"# {title}", "", device_lines(records), "", "## Beside the articles", "", beside(records), ""]
    parts += ["## Claims", "", claims_table(records), ""]
    if checks:
        parts += ["## Cross-check with the engine's own benchmarks", "", cross_check(checks), ""]
    for title, group in by_pool(records):
        parts += [f"## {title}", "", markdown(group), ""]
    return "\n".join(parts)


def by_pool(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Cells with the whole pool, and those whose pool was made small for the offload: never compared with each other."""
    small = small_pools(records)
    groups = [("All figures", False), (f"A KV pool made small ({', '.join(pool_words(small, records))})", True)]
    parts = [(title, [r for r in records if (pool(r) in small) is wanted]) for title, wanted in groups]
    return [(title, group) for title, group in parts if group]


def pool(record: Record) -> object:
    return record.engine_settings.get("num_blocks")


def small_pools(records: Sequence[Record]) -> set[object]:
    """Pools of the cells with offload, where another pool was measured too."""
    offloaded = {pool(record) for record in records if "offload" in record.cell.engine}
    return offloaded if any(pool(record) not in offloaded for record in records) else set()


def pool_words(small: set[object], records: Sequence[Record]) -> list[str]:
    held = {r.ledger.kv_pool_tokens for r in records if r.ledger and r.ledger.kv_pool_tokens and pool(r) in small}
    return [f"{tokens:,} tokens" for tokens in sorted(held)]


def device_lines(records: Sequence[Record]) -> str:
    devices = sorted({result.device for record in records for result in record.load_results.values()})
    versions = sorted({f"vLLM {record.environment.get('vllm', '?')}" for record in records})
    dummy = any(record.engine_settings.get("load_format") == "dummy" for record in records)
    note = "; weights are random numbers of the right shapes: speed and memory only" if dummy else ""
    return f"Measured on {', '.join(devices)} with {', '.join(versions)}{note}."


def levels(record: Record) -> dict[int | None, Level]:
    return {level.concurrency: level for result in record.load_results.values() for level in result.levels}


def figure(level: Level | None, name: str) -> float | None:
    spread = level.figures.get(name) if level and level.valid else None
    return spread.value if spread else None


def beside(records: Sequence[Record]) -> str:
    """p99 of the whole request by concurrency, and the highest rate, of each cell and of the articles' models."""
    small = small_pools(records)
    rows = []
    for record in records:
        found = levels(record)
        p99 = [figure(found.get(slots), "latency_p99_seconds") for slots in (10, 100, 500)]
        peaks = [
            figure(level, name)
            for name in ("total_tokens_per_second", "output_tokens_per_second")
            for level in found.values()
        ]
        half = len(peaks) // 2
        best = [max((p for p in part if p is not None), default=None) for part in (peaks[:half], peaks[half:])]
        words = "".join(f", pool of {part}" for part in pool_words(small & {pool(record)}, [record]))
        cell = f"{record.cell.model} {record.cell.quant} ({record.cell.engine}{words})"
        rows.append([cell, *(number(v, 2) for v in p99), *(number(v, 0) for v in best)])
    for name, values in ARTICLE_P99.items():
        rows.append(
            [
                f"article: {name}",
                *(f"{values[s]:.2f}" for s in (10, 100, 500)),
                f"{ARTICLE_PEAK[name]:,} (which is not said)",
                "",
            ]
        )
    columns = ("cell", "p99 s at 10", "at 100", "at 500", "peak total tok/s", "peak output tok/s")
    return f"{markdown_table(columns, rows)}\n\n{OTHER_HARDWARE}"


def number(value: float | None, digits: int) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"


def claims_table(records: Sequence[Record]) -> str:
    small = small_pools(records)
    by_quant = {record.cell.quant: record for record in records if pool(record) not in small}
    rows = [halving(by_quant), saving(by_quant), offload(records), steadiness(by_quant), first_start(records)]
    return markdown_table(("#", "claim", "measured", "verdict", "why"), rows)


def halving(cells: dict[str, Record]) -> Claim:
    claim = ("1", "FP8 KV halves KV memory")
    first, second = (cells[name].ledger if name in cells else None for name in ("baseline", "fp8-kv"))
    if not first or not second or not first.kv_bytes_per_token or not second.kv_bytes_per_token:
        return (*claim, ABSENT, "not measured", "needs a baseline and an fp8-kv record")
    share = second.kv_bytes_per_token / first.kv_bytes_per_token
    tokens = f"{first.kv_pool_tokens:,} -> {second.kv_pool_tokens:,} tokens in the pool"
    measured = f"{first.kv_bytes_per_token:,} -> {second.kv_bytes_per_token:,} B per token ({share:.3f}); {tokens}"
    return (*claim, measured, "agrees" if abs(share - 0.5) < 0.01 else "differs", "one byte per value in place of two")


def total(ledger: Ledger) -> int | None:
    if ledger.weight_bytes is None or ledger.kv_bytes_per_token is None:
        return None
    return ledger.weight_bytes + CONTEXT * CONCURRENCY * ledger.kv_bytes_per_token


def saving(cells: dict[str, Record]) -> Claim:
    claim = ("2", "FP8 weights and FP8 KV save 60-70 % of all memory")
    ledgers = [cells[name].ledger if name in cells else None for name in ("baseline", "fp8-weights-kv")]
    sums = [total(ledger) if ledger else None for ledger in ledgers]
    if sums[0] is None or sums[1] is None:
        return (*claim, ABSENT, "not measured", "needs a baseline and an fp8-weights-kv record")
    saved = 100.0 * (1.0 - sums[1] / sums[0])
    measured = (
        f"{saved:.1f} % of weights and KV of {CONCURRENCY} requests of {CONTEXT:,} ({size(sums[0])} -> {size(sums[1])})"
    )
    why = "two bytes become one at best, so no sum of them falls by more than 50 %; embeddings and head stay 16 bit"
    return (*claim, measured, "agrees" if 60 <= saved <= 70 else "differs", why)


def offload(records: Sequence[Record]) -> Claim:
    claim = ("5", "CPU offload of KV: +20-30 % latency (p99), twice the capacity")
    pairs = [
        (a, b)
        for b in records
        if "offload" in b.cell.engine
        for a in records
        if a.cell.quant == b.cell.quant
        and a.engine_settings.get("num_blocks") == b.engine_settings.get("num_blocks")
        and "offload" not in a.cell.engine
    ]
    if not pairs:
        return (
            *claim,
            ABSENT,
            "not measured",
            "needs one cell with and one without offload, of equal pools on the device",
        )
    a, b = pairs[-1]
    found: list[str] = []
    inside: list[bool] = []
    for name, result in b.load_results.items():
        if name in a.load_results:
            for row in compare_loads(a.load_results[name], result):
                change, noise = row.share - 1, row.noise or 0.0
                if row.figure in ("latency_p99_seconds", "output_tokens_per_second"):
                    words = f"{row.level}: {row.figure.split('_')[0]} {100 * change:+.1f} % (noise {100 * noise:.1f} %)"
                    found.append(words)
                if row.figure == "latency_p99_seconds":
                    inside.append(change + noise >= 0.20 and change - noise <= 0.30)
    preempted = [sum(r.preemptions or 0 for r in repeats(x)) for x in (a, b)]
    found.append(f"preempted {preempted[0]:,} -> {preempted[1]:,}")
    hits = sum(r.notes.get("offload_hit_tokens", 0.0) for r in repeats(b))
    why = f"{hits:,.0f} prompt tokens came back from the host; {LITTLE_TO_READ_BACK}"
    if not inside or not all(inside):
        return (*claim, "; ".join(found), "differs", why)
    return (*claim, "; ".join(found), "latency agrees" if hits else "latency agrees, capacity not shown", why)


def repeats(record: Record) -> list[Repeat]:
    return [r for x in record.load_results.values() for level in x.levels for r in level.repeats]


def steadiness(cells: dict[str, Record]) -> Claim:
    claim = ("6", "GQA is faster at low load, MLA steadier at high load")
    record = cells.get("baseline")
    p99 = [figure(levels(record).get(slots), "latency_p99_seconds") for slots in (10, 500)] if record else [None, None]
    if record is None or p99[0] is None or p99[1] is None:
        return (*claim, ABSENT, "not measured", "needs a ladder with 10 and 500")
    measured = (
        f"{record.cell.model} (GQA): p99 at 500 is {p99[1] / p99[0]:.1f} times that at 10 (article: GQA 2.3, MLA 1.7)"
    )
    return (*claim, measured, "not decided", "no MLA model of comparable size was measured; only the GQA half is here")


def first_start(records: Sequence[Record]) -> Claim:
    claim = ("7", "FP8: the first start costs about 3 minutes")
    found = []
    longest = 0.0
    for record in records:
        for result in record.load_results.values():
            found.append(
                f"{record.cell.quant} ({record.cell.engine}): "
                + ", ".join(f"{k} {s:.0f} s" for k, s in result.start_seconds.items())
            )
            longest = max(
                [longest, *(s for k, s in result.start_seconds.items() if k == "cold" and "fp8" in record.cell.quant)]
            )
    if not longest:
        return (
            *claim,
            "; ".join(found) or ABSENT,
            "not decided",
            "no FP8 cell was started cold with compiled kernels; use load.cold_start=true",
        )
    verdict = "agrees" if 120 <= longest <= 240 else "differs"
    return (
        *claim,
        "; ".join(found),
        verdict,
        "today's engine ships its FP8 kernels compiled; what a first start compiles are torch's graphs",
    )


def cross_check(checks: Sequence[dict[str, float | str]]) -> str:
    rows = [
        [
            str(c["what"]),
            number(float(c["evalq"]), 3),
            number(float(c["engine"]), 3),
            f"{100 * (float(c['evalq']) / float(c['engine']) - 1):+.1f} %",
            str(c["how"]),
        ]
        for c in checks
        if c.get("engine")
    ]
    return markdown_table(("figure", "evalq", "the engine's own", "difference", "how"), rows)


if __name__ == "__main__":
    main()
