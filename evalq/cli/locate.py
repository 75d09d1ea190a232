"""Where a record named on the command line is: a folder, a file, a record id or an MLflow run id."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

from evalq.cli.fetch import fetch_record, refuse_ineligible, shown
from evalq.errors import MissingExtraError, RecordError
from evalq.records import RECORD_FILE, Record, read_record

RUN_ID = re.compile("[0-9a-f]{32}")

RECORDS_HELP = "where record ids are looked up (default: $EVALQ_HOME/records, else runs/records)"


def records_root(given: str | None) -> Path:
    """The folder of records: --records, else $EVALQ_HOME/records, else ./runs/records."""
    if given:
        return Path(given)
    home = os.environ.get("EVALQ_HOME")
    return Path(home) / "records" if home else Path("runs") / "records"


def find_record(name: str, root: Path, tracking_uri: str | None = None) -> tuple[Record, Path]:
    """Read the record called `name` and say which folder its tables are in.

    Errors: RecordError when nothing has this name; MissingExtraError when only MLflow could know it and is absent.
    """
    if not name.strip():
        raise RecordError("no record was named; give a record folder, a record.json, a record id or an MLflow run id")
    path = Path(name)
    if _is_there(path):
        if path.is_file() and path.name != RECORD_FILE:  # seal and digest are of record.json, whatever lies beside it
            raise RecordError(f"{path} is no record; give a record folder or its {RECORD_FILE}")
        return read_record(path), path if path.is_dir() else path.parent
    folder = _by_record_id(name, root)
    if folder is None and RUN_ID.fullmatch(name):
        folder = _from_mlflow(name, root, tracking_uri)
    if folder is None:
        raise RecordError(f"no record {name}: neither a path nor a record id under {root}; measure one first")
    return read_record(folder), folder


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for a file
        return False


def _by_record_id(name: str, root: Path) -> Path | None:
    found = []
    for file in sorted(root.glob(f"**/{RECORD_FILE}")):
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # a damaged record elsewhere is no reason to refuse this one
        if isinstance(data, dict) and data.get("record_id") == name:
            found.append(file.parent)
    if len(found) > 1:
        folders = ", ".join(str(folder) for folder in found)
        raise RecordError(f"the record id {name} is in {len(found)} folders ({folders}); give the folder that is meant")
    return found[0] if found else None


def _from_mlflow(run_id: str, root: Path, tracking_uri: str | None) -> Path:
    """Download the artifact folder record/ of a run. Errors: RecordError when the run or its record is not there."""
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(root.parent / 'mlflow.db').resolve()}"
    target = tempfile.mkdtemp(prefix="evalq-record-")
    if uri.startswith(("http://", "https://")):
        return fetch_record(run_id, uri, Path(target))
    try:
        import mlflow
    except ImportError as error:
        raise MissingExtraError(f"reading the MLflow run {run_id}", "mlflow", "measure") from error
    try:
        refuse_ineligible(run_id, mlflow.MlflowClient(tracking_uri=uri).get_run(run_id).data.tags)
        found = mlflow.artifacts.download_artifacts(
            run_id=run_id, artifact_path="record", dst_path=target, tracking_uri=uri
        )
    except RecordError:
        raise
    except Exception as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecordError(
            f"no record in MLflow run {run_id} at {shown(uri)} ({first_line}); is the tracking URI right?"
        ) from error
    return Path(found)
