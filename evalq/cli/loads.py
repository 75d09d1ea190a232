"""`evalq loads RECORD [RECORD ...]`: throughput, latency, health and memory of stored records, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from evalq.errors import EXIT_PASS, RecordError
from evalq.records import Record, read_record


def parser() -> argparse.ArgumentParser:
    """What the verb takes."""
    found = argparse.ArgumentParser(
        prog="evalq loads",
        description="Loads of stored records side by side; the first record is what the others are compared with.",
    )
    found.add_argument("records", nargs="+", type=Path, help="record folders")
    found.add_argument(
        "--format", choices=("table", "markdown", "json"), default="table", help="what is printed (default: table)"
    )
    return found


def main(argv: list[str]) -> int:
    """Read, compare with the first, show. Errors: RecordError."""
    options = parser().parse_args(argv)
    records = [read_record(folder) for folder in options.records]
    bare = [record.record_id for record in records if not record.load_results]
    if bare:
        raise RecordError(
            f"{', '.join(bare)} holds no load; measure one with load=ladder, rate, trace, long or offline"
        )
    show(records, options.format)
    return EXIT_PASS


def show(records: list[Record], form: str) -> None:
    """Print the records' loads."""
    from evalq.report.load_tables import load_table, markdown

    if form == "json":
        loads = {
            record.record_id: {name: dataclasses.asdict(result) for name, result in record.load_results.items()}
            for record in records
        }
        print(json.dumps(loads, allow_nan=False))
    elif form == "markdown":
        print(markdown(records))
    else:
        from rich.console import Console

        console = Console()
        console.print(load_table(records))
