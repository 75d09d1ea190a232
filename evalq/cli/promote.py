"""`evalq promote`: register a checkpoint that passes as a model version in MLflow, with the alias release-candidate."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from evalq.app import default_root
from evalq.cli.gate import show
from evalq.cli.judging import Judged, Located, add_arguments, disagreement, judged
from evalq.errors import EXIT_MEASUREMENT, EXIT_PASS, ConfigError, MissingExtraError, RecordError
from evalq.judge.gate import contradiction
from evalq.records import VERDICT_FILE, CheckpointId, Record, read_verdict
from evalq.tracking.promote import ALIAS, Promotion, promote
from evalq.tracking.store import redact, store_at

if TYPE_CHECKING:
    from evalq.tracking.store import Store

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,199}")


def parser() -> argparse.ArgumentParser:
    """The arguments of `evalq promote`."""
    made = argparse.ArgumentParser(
        prog="evalq promote",
        description=__doc__,
        epilog="Judges the records again; only a PASS is registered. Ends as evalq gate does.",
    )
    add_arguments(made)
    made.add_argument("--verdict", metavar="DIR", help=f"{VERDICT_FILE} that must be what judging again gives")
    made.add_argument("--name", metavar="MODEL", help="registered model (default: the model's name)")
    made.add_argument("--alias", default=ALIAS, help=f"alias to set (default: {ALIAS})")
    made.add_argument("--root", type=Path, help="folder of evalq's output (default: $EVALQ_HOME, else runs)")
    made.add_argument("--checkpoint", metavar="DIR", type=Path, help="where the checkpoint is (default: as recorded)")
    made.add_argument("--upload", action="store_true", help="upload the checkpoint's files too, not only its identity")
    made.add_argument(
        "--by-reference", action="store_true", help="the checkpoint is not on this machine: register its sha256 alone"
    )
    return made


def main(argv: list[str]) -> int:
    """Judge again, verify the checkpoint, register. Errors: EvalqError, for the dispatcher to print."""
    arguments = parser().parse_args(argv)
    if importlib.util.find_spec("mlflow") is None:
        raise MissingExtraError("evalq promote", "mlflow", "measure")
    if arguments.upload and arguments.by_reference:
        raise ConfigError("--upload needs the checkpoint here and --by-reference says that it is not; leave one out")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    store = _store(arguments)
    found = judged(arguments)
    problem = _tampered(found, arguments.verdict)
    show(found.verdict, "text")
    if problem:
        print(f"evalq promote: nothing was registered: {problem}", file=sys.stderr)
        return EXIT_MEASUREMENT
    if found.verdict.exit_code != EXIT_PASS or found.candidate is None:
        print("evalq promote: nothing was registered, and no alias was moved", file=sys.stderr)
        return found.verdict.exit_code or EXIT_MEASUREMENT
    record, folder = found.candidate
    name = arguments.name or record.cell.model
    for what, text in (("--name", name), ("--alias", arguments.alias)):
        if not NAME.fullmatch(text):
            raise ConfigError(
                f"{what} {text!r} is not a name that MLflow takes; use letters, digits, dot, dash and underscore"
            )
    checkpoint, files = _verified_checkpoint(found.candidate, arguments, store.root)
    files = files if arguments.upload else None
    done = promote(store, Promotion(name, arguments.alias, record, folder, found.verdict, checkpoint, files))
    state = "registered" if done.fresh else "was registered already"
    print(f"{name} version {done.version} {state} at {redact(store.uri)}; {arguments.alias} now names it")
    return EXIT_PASS


def _store(arguments: argparse.Namespace) -> Store:
    root = (arguments.root or default_root()).absolute()
    uri = arguments.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"
    arguments.tracking_uri = uri
    arguments.records = arguments.records or str(root / "records")
    return store_at(uri, root, Path(arguments.records), 10.0)


def _tampered(found: Judged, given: str | None) -> str | None:
    """Why a stored verdict speaks against this one: that of --verdict, and that beside the record under the same policy."""
    try:
        if given is not None:
            stored = read_verdict(given)
            problem = contradiction(stored) or disagreement(stored, found.verdict)
            if problem:
                return f"the verdict in {given} is damaged, was edited or is of another run: {problem}"
        if found.candidate is None or not (found.candidate[1] / VERDICT_FILE).is_file():
            return None
        beside, again = read_verdict(found.candidate[1]), found.verdict
    except RecordError as error:
        return str(error)
    problem = contradiction(beside)
    same = (beside.baseline_id, beside.policy) == (again.baseline_id, again.policy)
    if problem is None and same and beside.status != again.status:
        problem = f"it says {beside.status}, and judging the same records by the same policy gives {again.status}"
    return f"{found.candidate[1] / VERDICT_FILE} is damaged or was edited: {problem}" if problem else None


def _verified_checkpoint(
    candidate: Located, arguments: argparse.Namespace, root: Path
) -> tuple[CheckpointId, Path | None]:
    """The checkpoint that was measured, every byte of its weights read again. Errors: RecordError."""
    from evalq.quantize import weights_hash

    record, _ = candidate
    known = recorded_checkpoint(record)
    if arguments.by_reference:
        return known, None
    folder = (arguments.checkpoint or root / known.location).absolute()
    if not folder.is_dir():
        raise RecordError(
            f"the checkpoint of record {record.record_id} is not at {folder}; give its folder with --checkpoint, "
            "or --by-reference where it is on another machine"
        )
    digest = weights_hash(folder, trust_cache=False)
    if digest != known.weights_sha256:
        raise RecordError(
            f"{folder} is not the checkpoint that was measured: its sha256 is {digest[:12]}... and the record's is "
            f"{known.weights_sha256[:12]}...; promote the measured one, or measure this one"
        )
    return known, folder


def recorded_checkpoint(record: Record) -> CheckpointId:
    """Errors: RecordError for a record that does not say what was loaded."""
    if record.checkpoint is None:
        raise RecordError(
            f"record {record.record_id} does not say which checkpoint was loaded (random weights, or an older evalq); "
            "measure it anew"
        )
    return record.checkpoint
