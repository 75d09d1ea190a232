"""Table of calibrated checkpoints against plain rounding: one row per judged record of a folder of records.

    python jobs/bench/calibrated.py runs/records --out table.md

Every row is a record with its verdict.json beside it: scheme, method, calibration text, perplexity increase with its interval,
weights as the engine reports them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from evalq.records import RECORD_FILE, VERDICT_FILE, Record, Verdict, read_record, read_verdict

MIB = 1024**2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, help="folder of record folders")
    parser.add_argument("--out", type=Path, help="file for the table; default: standard output")
    given = parser.parse_args()
    folders = [folder for folder in sorted(given.records.iterdir()) if (folder / RECORD_FILE).is_file()]
    records = {record.record_id: record for record in map(read_record, folders)}
    rows = [row for folder in folders if (row := row_of(folder, records))]
    if not rows:
        print(f"{given.records} holds no judged record", file=sys.stderr)
        return 5
    head = "| scheme | method | calibration text | documents | increase [95 %] | weights | of 16 bit | verdict |\n"
    text = head + "|---|---|---|---:|---:|---:|---:|---|\n" + "\n".join(sorted(rows)) + "\n"
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    print(text)
    return 0


def row_of(folder: Path, records: dict[str, Record]) -> str | None:
    """A line of the table; None for a folder without a verdict on a perplexity."""
    if not (folder / VERDICT_FILE).is_file():
        return None
    record, verdict = read_record(folder), read_verdict(folder)
    estimate = next((c.estimate for c in verdict.checks if c.estimate and "perplexity" in c.metric), None)
    if estimate is None or estimate.value is None or estimate.low is None or estimate.high is None:
        return None
    given = record.calibration
    text = f"{given.samples} x {given.length_tokens} tokens: {given.domain}" if given else "none"
    increase = f"{estimate.value:+.2%} [{estimate.low:+.2%}, {estimate.high:+.2%}]"
    size = record.ledger.weight_bytes if record.ledger else None
    share = share_of_baseline(record, verdict, records)
    weights = f"{size / MIB:.1f} MiB" if size else "-"
    method = given.method if given else "plain"
    return (
        f"| {record.cell.quant} | {method} | {text} | {estimate.n} | {increase} | {weights} | "
        f"{f'{share:.1%}' if share else '-'} | {verdict.status} |"
    )


def share_of_baseline(record: Record, verdict: Verdict, records: dict[str, Record]) -> float | None:
    """Weight bytes as a share of the baseline's, where its record lies in the same folder."""
    baseline = records.get(str(verdict.baseline_id))
    if record.ledger is None or baseline is None or baseline.ledger is None or not baseline.ledger.weight_bytes:
        return None
    return (record.ledger.weight_bytes or 0) / baseline.ledger.weight_bytes


if __name__ == "__main__":
    sys.exit(main())
