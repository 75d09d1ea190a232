"""`evalq compare A B`: every paired difference between two comparable records, without a policy."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from evalq.cli.locate import RECORDS_HELP, find_record, records_root
from evalq.config_check import MOST_CONFIDENT
from evalq.errors import EXIT_MEASUREMENT, ConfigError, EvalqError, RecordError
from evalq.judge.compare import Comparison, compare
from evalq.judge.fidelity import fidelity, token_pairs
from evalq.judge.floor import aa_floor, read_floor, write_floor
from evalq.records import Estimate, Record, read_table

Located = tuple[Record, Path]


def parser() -> argparse.ArgumentParser:
    """The arguments of `evalq compare`."""
    made = argparse.ArgumentParser(prog="evalq compare", description=__doc__)
    where = "record folder, record.json, record id or MLflow run id"
    made.add_argument("first", metavar="A", help=where)
    made.add_argument("second", metavar="B", help=where + "; differences are B minus A")
    made.add_argument("--allow", metavar="FIELD", action="append", default=[], help="fingerprint field that may differ")
    made.add_argument(
        "--records",
        metavar="DIR",
        help=RECORDS_HELP,
    )
    made.add_argument("--tracking-uri", metavar="URI", help="MLflow store of run ids")
    made.add_argument(
        "--confidence", type=float, default=0.95, help="of the intervals, above 0.5 to 0.9999 (default: 0.95)"
    )
    made.add_argument(
        "--format", choices=("text", "json", "markdown"), default="text", help="what is printed (default: text)"
    )
    made.add_argument("--fidelity", action="store_true", help="also KL divergence and token agreement (nats, shares)")
    made.add_argument("--keep-floor", action="store_true", help="A and B are one configuration: keep their A/A floor")
    return made


def main(argv: list[str]) -> int:
    """Compare and print; 0 when the two can be compared, whatever the difference."""
    arguments = parser().parse_args(argv)
    try:
        return _run(arguments)
    except RecordError as error:
        print(f"evalq compare: {error}", file=sys.stderr)
        return EXIT_MEASUREMENT
    except EvalqError as error:
        print(f"evalq compare: {error}", file=sys.stderr)
        return error.exit_code


def _run(arguments: argparse.Namespace) -> int:
    if not 0.5 < arguments.confidence <= MOST_CONFIDENT:
        raise ConfigError(
            f"--confidence {arguments.confidence} must be above 0.5 and {MOST_CONFIDENT} at most, e.g. 0.95"
        )
    root = records_root(arguments.records)
    first, second = (find_record(name, root, arguments.tracking_uri) for name in (arguments.first, arguments.second))
    if arguments.keep_floor:
        file = write_floor(root, first[0], aa_floor(*first, *second, confidence=arguments.confidence))
        print(f"A/A floor kept in {file}", file=sys.stderr)
    found = compare(*first, *second, allow=arguments.allow, confidence=arguments.confidence)
    floor = read_floor(root, first[0])
    if floor is not None and floor.value is not None and floor.low is not None and floor.high is not None:
        width = max(abs(floor.low), abs(floor.high))
        found = dataclasses.replace(found, notes=[*found.notes, f"A/A floor of this engine: ±{100 * width:.4f} %"])
    if arguments.fidelity:
        found = dataclasses.replace(
            found, estimates=[*found.estimates, *_fidelity(first, second, arguments.confidence)]
        )
    _show(found, arguments.format)
    return 0


def _fidelity(first: Located, second: Located, confidence: float) -> list[Estimate]:
    """Fidelity over all tokens, then by bucket. Errors: RecordError when a side kept no tokens."""
    tables = []
    for record, folder in (first, second):
        table = read_table(folder, record, "tokens")
        if table is None:
            raise RecordError(f"record {record.record_id} kept no tokens; measure it with tasks.keep_tokens=true")
        tables.append(table)
    same_baseline = second[0].divergence_from == first[0].reuse_key
    found = fidelity(token_pairs(tables[0], tables[1], exact=same_baseline), confidence)
    by_bucket = [
        dataclasses.replace(estimate, name=f"{estimate.name}, {bucket}")
        for bucket, estimates in found.buckets.items()
        for estimate in estimates
    ]
    return [*found.estimates, *by_bucket]


def _show(found: Comparison, form: str) -> None:
    if form == "json":
        print(json.dumps(dataclasses.asdict(found), allow_nan=False, ensure_ascii=False))
        return
    from evalq.report.comparison import comparison_markdown, comparison_text

    print(comparison_markdown(found) if form == "markdown" else comparison_text(found))
