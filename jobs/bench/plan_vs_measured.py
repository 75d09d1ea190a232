"""The planner's ledger beside the engine's own, from records that were measured.

    python jobs/bench/plan_vs_measured.py runs/records/*/record.json --out reports/plan-vs-measured.md

Takes record folders or record.json files, prints a table in Markdown and ends with 1 when a weight is off by more than
1 % or a pool by more than 3 %. Records without a prediction are skipped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from evalq.errors import EvalqError
from evalq.records import Ledger, Record, read_record

# figure -> largest accepted |predicted / measured - 1|; None = shown only
LIMITS: dict[str, float | None] = {
    "weight_bytes": 0.01,
    "kv_bytes_per_token": 0.0,
    "kv_pool_tokens": 0.03,
    "kv_pool_bytes": 0.03,
    "checkpoint_bytes": 0.001,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="record folders or record.json files")
    parser.add_argument("--out", type=Path, metavar="FILE", help="Markdown file (default: standard output)")
    arguments = parser.parse_args()
    lines, bad, compared = [HEADER], 0, 0
    for path in arguments.records:
        try:
            record = read_record(path)
        except EvalqError as error:
            print(f"skipped: {error}", file=sys.stderr)
            bad += 1
            continue
        rows, off, seen = compare(record)
        lines.extend(rows)
        bad, compared = bad + off, compared + seen
    text = "\n".join(lines) + f"\n\n{compared} figures compared, {bad} outside their limit.\n"
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0 if compared and not bad else 1


HEADER = "| model | gpu | scheme | TP | figure | predicted | measured | off by | limit |\n|---|---|---|---|---|---|---|---|---|"


def compare(record: Record) -> tuple[list[str], int, int]:
    """Table rows of one record, how many are outside their limit, how many could be compared."""
    if record.ledger is None:
        print(f"skipped: record {record.record_id} has no ledger ({record.status})", file=sys.stderr)
        return [], 0, 0
    rows, off = [], 0
    for name, limit in LIMITS.items():
        predicted, measured = record.ledger.predicted.get(name), measured_value(record.ledger, name)
        if predicted is None or not measured:
            continue
        error = predicted / measured - 1.0
        outside = limit is not None and abs(error) > limit
        off += outside
        cell = record.cell
        tp = record.engine_settings.get("tensor_parallel_size", "?")
        rows.append(
            f"| {cell.model} | {cell.gpu} | {cell.quant} | {tp} | {name} | {predicted:,} | {measured:,} | "
            f"{100 * error:+.3f} % | {'-' if limit is None else f'{100 * limit:g} %'}{' OUTSIDE' if outside else ''} |"
        )
    return rows, off, len(rows)


def measured_value(ledger: Ledger, name: str) -> int | None:
    value = getattr(ledger, name)
    return None if value is None else int(value)


if __name__ == "__main__":
    sys.exit(main())
