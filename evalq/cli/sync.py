"""`evalq sync`: upload to MLflow what it does not have yet, each record exactly once."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from evalq.app import default_root
from evalq.errors import EXIT_MEASUREMENT, EXIT_PASS, MissingExtraError
from evalq.tracking.sync import readable_records_folder, sync


def parser() -> argparse.ArgumentParser:
    """Options of `evalq sync`."""
    made = argparse.ArgumentParser(
        prog="evalq sync",
        description="Upload to MLflow the records that it does not have yet. May be called again: nothing is doubled. "
        "Ends 0 when everything is there, 5 when something could not be uploaded.",
    )
    made.add_argument(
        "--root",
        type=Path,
        default=None,
        help="folder of evalq's output, as paths.root (default: $EVALQ_HOME, else runs)",
    )
    made.add_argument("--records", type=Path, default=None, help="folder of records (default: ROOT/records)")
    made.add_argument("--uri", default=None, help="MLflow to upload to (default: where each study was meant to go)")
    made.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="longest wait for one answer (default: 10 seconds)",
    )
    return made


def main(argv: list[str]) -> int:
    """Errors: EvalqError, for the dispatcher to print."""
    options = parser().parse_args(argv)
    if importlib.util.find_spec("mlflow") is None:
        raise MissingExtraError("evalq sync", "mlflow", "measure")
    root = (options.root or default_root()).absolute()
    records = readable_records_folder((options.records or root / "records").absolute())
    result = sync(root, records, options.uri, f"sqlite:///{root / 'mlflow.db'}", options.timeout, print)
    for problem in result.problems:
        print(problem, file=sys.stderr)
    print(f"{result.uploaded} uploaded, {result.present} there already, {result.left} left")
    return EXIT_PASS if not result.problems and not result.left else EXIT_MEASUREMENT
