"""A study on disk: which records belong to it and where they should go. What `evalq sync` works from.

<records>/studies/<study>.json     the Manifest below
<record folder>/sync_pending       there while the record is not in MLflow yet: where it should go, and why it is not
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from evalq.errors import RecordError
from evalq.records import RECORD_FILE, Record, from_mapping, parse_json, read_record, to_json, write_text
from evalq.tracking.store import Store, file_lock, redact, slug

MANIFEST_VERSION = 1
STUDIES_FOLDER = "studies"
PENDING_FILE = "sync_pending"
ENDED = ("FINISHED", "FAILED", "KILLED")


@dataclass(frozen=True)
class Owner:
    """A process, told apart from a later one with the same number and from one in another container."""

    host: str
    pid: int
    started: float  # Unix seconds
    namespace: str  # of process numbers; two containers may share a host name


@dataclass(frozen=True)
class StudyCell:
    folder: str  # relative to the records folder
    record_id: str
    reused: bool


@dataclass(frozen=True)
class Manifest:
    schema_version: int
    study: str
    experiment: str
    model: str
    gpu: str
    uri: str  # without a password
    status: str  # RUNNING or one of ENDED
    created_at: str
    owner: Owner
    ended_at: str | None = None
    cells: list[StudyCell] = field(default_factory=list)


def this_process() -> Owner:
    return Owner(socket.gethostname(), os.getpid(), process_started(os.getpid()) or 0.0, _namespace())


def process_started(pid: int) -> float | None:
    """When a process of this machine started (Unix seconds), None when there is none or it is only a zombie."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def is_gone(owner: Owner) -> bool:
    """Whether `owner` ran here and runs no more. False when it cannot be told (another host or container)."""
    if (owner.host, owner.namespace) != (socket.gethostname(), _namespace()):
        return False
    started = process_started(owner.pid)
    return started is None or abs(started - owner.started) > 2.0  # the boot time that this rests on is in whole seconds


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def manifest_path(records: Path, study: str, experiment: str) -> Path:
    digest = hashlib.sha256(f"{experiment}\n{study}".encode()).hexdigest()[:8]
    return records / STUDIES_FOLDER / f"{slug(study)}-{digest}.json"


def open_manifest(store: Store, study: str, experiment: str, model: str, gpu: str, join: bool = True) -> Path:
    """Begin a study on disk; `join` the one of this name, or else number a new one. Returns the manifest's path.

    Errors: RecordError.
    """
    owner, uri = this_process(), redact(store.uri)
    with file_lock(store.records / STUDIES_FOLDER / "open.lock"):
        name, number = study, 1
        while not join and manifest_path(store.records, name, experiment).exists():
            number += 1
            name = f"{study} ({number})"
        path = manifest_path(store.records, name, experiment)
        if path.is_file():
            manifest = dataclasses.replace(read_manifest(path), status="RUNNING", ended_at=None, owner=owner, uri=uri)
        else:
            manifest = Manifest(MANIFEST_VERSION, name, experiment, model, gpu, uri, "RUNNING", _now(), owner)
        write_text(path, to_json(manifest) + "\n")
    return path


def read_manifest(path: Path) -> Manifest:
    """Errors: RecordError in one sentence."""
    try:
        data = parse_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"study {path} cannot be read: {error}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != MANIFEST_VERSION:
        raise RecordError(f"study {path} has schema version {version!r}; this evalq reads {MANIFEST_VERSION}")
    return from_mapping(Manifest, data, str(path))


def add_cell(path: Path, records: Path, folder: Path, record: Record, reused: bool) -> Manifest:
    """Write down that a record belongs to the study; the same record twice stays one cell."""
    cell = StudyCell(os.path.relpath(folder, records), record.record_id, reused)
    with file_lock(path.with_suffix(".lock")):
        manifest = read_manifest(path)
        cells = [*(known for known in manifest.cells if known.record_id != cell.record_id), cell]
        manifest = dataclasses.replace(manifest, cells=cells)
        write_text(path, to_json(manifest) + "\n")
    return manifest


def end_manifest(path: Path, status: str) -> None:
    """Write down how the study ended; a study that has ended already stays as it is."""
    with file_lock(path.with_suffix(".lock")):
        manifest = read_manifest(path)
        if manifest.status not in ENDED:
            write_text(path, to_json(dataclasses.replace(manifest, status=status, ended_at=_now())) + "\n")


def mark_pending(folder: Path, store: Store, study: str, reason: str) -> None:
    """Say in the record folder itself that MLflow does not have it yet. A folder that cannot be written is left."""
    entry = {"uri": redact(store.uri), "study": study, "reason": reason}
    _change_pending(folder, store, study, [entry])


def clear_pending(folder: Path, store: Store, study: str) -> None:
    """Remove what the marker says of this study and store; the file goes with its last entry."""
    if (folder / PENDING_FILE).is_file():
        _change_pending(folder, store, study, [])


def read_pending(folder: Path) -> list[dict[str, str]]:
    """Entries of a record's marker: uri, study and reason of each upload that is still to do."""
    try:
        entries = json.loads((folder / PENDING_FILE).read_text(encoding="utf-8"))["pending"]
        return [{str(key): str(value) for key, value in entry.items()} for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _change_pending(folder: Path, store: Store, study: str, entries: list[dict[str, str]]) -> None:
    marker, place = folder / PENDING_FILE, (redact(store.uri), study)
    try:
        with file_lock(store.records / STUDIES_FOLDER / "pending.lock"):
            kept = [entry for entry in read_pending(folder) if (entry.get("uri"), entry.get("study")) != place]
            if kept or entries:
                text = json.dumps({"pending": [*kept, *entries], "to do": "evalq sync"}, indent=1, ensure_ascii=False)
                write_text(marker, text + "\n")
            else:
                marker.unlink(missing_ok=True)
    except OSError:
        return


def manifests(records: Path) -> list[Path]:
    """All studies under a records folder, oldest first."""
    paths = sorted((records / STUDIES_FOLDER).glob("*.json"))
    return sorted(paths, key=lambda path: path.stat().st_mtime)


def records_without_study(records: Path, known: set[str]) -> list[tuple[Path, Record]]:
    """Readable records under a folder that no study names."""
    found = []
    for file in sorted(records.rglob(RECORD_FILE)):
        try:
            record = read_record(file)
        except RecordError:
            continue
        if record.record_id not in known:
            found.append((file.parent, record))
    return found
