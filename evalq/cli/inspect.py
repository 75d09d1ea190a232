"""`evalq inspect RECORD`: from red to cause: documents, answers and tokens that changed most against the baseline."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from evalq.cli.locate import RECORDS_HELP, find_record, records_root
from evalq.errors import EXIT_PASS, ConfigError, RecordError
from evalq.records import VERDICT_FILE, Record, read_verdict

Place = tuple[Record, Path]


def parser() -> argparse.ArgumentParser:
    """The arguments of `evalq inspect`."""
    made = argparse.ArgumentParser(prog="evalq inspect", description=__doc__)
    where = "record folder, record.json, record id or MLflow run id"
    made.add_argument("record", metavar="RECORD", help=where)
    made.add_argument(
        "--against", metavar="BASELINE", help=where + " (default: the baseline of its verdict, or a comparable one)"
    )
    made.add_argument("--task", help="this task only, e.g. hellaswag")
    made.add_argument("--items", type=int, default=6, metavar="N", help="changed items of each task (default: 6)")
    made.add_argument("--tokens", type=int, default=8, metavar="N", help="worst tokens (default: 8)")
    made.add_argument(
        "--format", choices=("text", "markdown", "json"), default="text", help="what is printed (default: text)"
    )
    made.add_argument(
        "--records",
        metavar="DIR",
        help=RECORDS_HELP,
    )
    made.add_argument("--tracking-uri", metavar="URI", help="MLflow store of run ids")
    return made


def main(argv: list[str]) -> int:
    """Look and print; 0 whatever is found. Errors: RecordError, ConfigError."""
    arguments = parser().parse_args(argv)
    for name in ("items", "tokens"):
        if getattr(arguments, name) < 0:
            raise ConfigError(f"--{name} {getattr(arguments, name)} is below 0; give 0 or more")
    from evalq.study.causes import find_causes

    root = records_root(arguments.records)
    candidate = find_record(arguments.record, root, arguments.tracking_uri)
    baseline = _baseline(arguments, candidate, root)
    causes = find_causes(baseline, candidate, arguments.items, arguments.tokens, arguments.task)
    if arguments.format == "json":
        print(json.dumps(dataclasses.asdict(causes), allow_nan=False, ensure_ascii=False))
        return EXIT_PASS
    title = f"{candidate[0].record_id} against {baseline[0].record_id}"
    if arguments.format == "markdown":
        from evalq.report.page.blocks import Page, Section
        from evalq.report.page.cause import cause_blocks
        from evalq.report.page.markdown import page_markdown

        print(page_markdown(Page(title, [], [], [Section("causes", "What changed most", cause_blocks(causes))])))
        return EXIT_PASS
    from evalq.report.causes_text import causes_text

    print(causes_text(title, causes, colour=bool(sys.stdout and sys.stdout.isatty())), end="")
    return EXIT_PASS


def _baseline(arguments: argparse.Namespace, candidate: Place, root: Path) -> Place:
    """--against, else the baseline that the verdict names, else the newest comparable one beside the record."""
    if arguments.against:
        return find_record(arguments.against, root, arguments.tracking_uri)
    record, folder = candidate
    if record.cell.is_baseline:
        raise RecordError(f"{record.record_id} is a baseline; say what to hold it against with --against RECORD")
    if record.failure is not None:
        raise RecordError(
            f"{record.record_id} failed while measuring ({record.failure.kind}): {record.failure.message}"
        )
    if (folder / VERDICT_FILE).is_file():
        named = read_verdict(folder).baseline_id
        for place in (folder.parent, root):
            found = _record_called(named, place)
            if found is not None:
                return found
    from evalq.study.gather import comparable_baseline

    found = comparable_baseline(record, folder.parent) or comparable_baseline(record, root)
    if found is None:
        raise RecordError(
            f"no baseline for {record.record_id} beside it or under {root}; name one with --against RECORD"
        )
    return found


def _record_called(name: str | None, place: Path) -> Place | None:
    if not name or not place.is_dir():
        return None
    try:
        return find_record(name, place)
    except RecordError:
        return None
