"""Uploading what MLflow does not have yet, each record once per study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalq.errors import ConfigError, RecordError
from evalq.tracking.manifest import (
    ENDED,
    STUDIES_FOLDER,
    Manifest,
    add_cell,
    end_manifest,
    is_gone,
    manifests,
    open_manifest,
    read_manifest,
    records_without_study,
)
from evalq.tracking.process import ChildProcess
from evalq.tracking.store import Store, file_lock, redact, store_at

IMPORT_SECONDS = (
    240.0  # MLflow's own start and the creation of an empty store, on a machine that is busy with other things
)
SYNC_LOCK_SECONDS = 3600.0
LOOSE_STUDY = "records of no study"


@dataclass
class Synced:
    """How many records went where. `problems` are sentences for people."""

    uploaded: int = 0
    present: int = 0
    left: int = 0
    problems: list[str] = field(default_factory=list)


def sync(
    root: Path, records: Path, uri: str | None, default_uri: str, timeout_seconds: float, say: Callable[[str], None]
) -> Synced:
    """Upload every study under `records`, to `uri` or to where each was meant to go.

    Errors: ConfigError for an address that evalq cannot use or that was stored without its password; MeasurementError when
    another sync of these records does not end.
    """
    with file_lock(
        records / STUDIES_FOLDER / "sync.lock", SYNC_LOCK_SECONDS
    ):  # a second sync finds all done by the first
        return _sync(root, records, uri, default_uri, timeout_seconds, say)


def _sync(
    root: Path, records: Path, uri: str | None, default_uri: str, timeout_seconds: float, say: Callable[[str], None]
) -> Synced:
    _gather_loose_records(store_at(uri or default_uri, root, records, timeout_seconds))
    by_uri: dict[str, list[Path]] = {}
    for path in manifests(records):
        by_uri.setdefault(uri or read_manifest(path).uri, []).append(path)
    total = Synced()
    for target, paths in by_uri.items():
        if ":***@" in target:
            raise ConfigError(
                f"the studies meant for {target} were kept without its password; give the address with --uri"
            )
        _sync_store(store_at(target, root, records, timeout_seconds), paths, total, say)
    return total


def _gather_loose_records(store: Store) -> None:
    """Records that no study names (tracking was off, or they came from elsewhere) become a study of their own."""
    known = {cell.record_id for path in manifests(store.records) for cell in read_manifest(path).cells}
    paths = set()
    for folder, record in records_without_study(store.records, known):
        cell = record.cell
        path = open_manifest(store, LOOSE_STUDY, f"{cell.model} on {cell.gpu}", cell.model, cell.gpu)
        add_cell(path, store.records, folder, record, reused=False)
        paths.add(path)
    for path in paths:
        end_manifest(path, "FINISHED")


def _sync_store(store: Store, paths: list[Path], total: Synced, say: Callable[[str], None]) -> None:
    say(store.where)
    child = ChildProcess(store)
    try:
        for path in paths:
            manifest = read_manifest(path)
            if manifest.status not in ENDED and not is_gone(manifest.owner):
                say(f"{manifest.study}: still being measured by process {manifest.owner.pid}, left alone")
                continue
            child.send(do="open", manifest=str(path))
            child.send(do="finish", status="KILLED")  # only for a study whose end was never written down
            if not _follow(child, store, manifest, total, say):
                break
    finally:
        child.end()


def _follow(child: ChildProcess, store: Store, manifest: Manifest, total: Synced, say: Callable[[str], None]) -> bool:
    """Listen until the study is done; False when the store does not take it, so that the rest is not tried either."""
    uploaded, present, silence = 0, 0, IMPORT_SECONDS + 4 * store.timeout_seconds
    while True:
        event = child.next_event(silence)
        kind = event["event"] if event else "silent"
        if event is not None and kind == "cell":
            uploaded += event["state"] == "uploaded"
            present += event["state"] == "present"
            _keep_problem(total, event)
        elif event is not None and kind == "note":
            say(event["text"])
        elif kind in ("unreachable", "silent", "ended"):
            reason = event.get("reason", "MLflow's process ended") if event else f"no sign of life for {silence:g} s"
            total.problems.append(f"{manifest.study}: {redact(store.uri)} does not take runs now: {reason}")
            break
        elif kind == "finished":
            break
    left = len(manifest.cells) - uploaded - present
    total.uploaded, total.present, total.left = total.uploaded + uploaded, total.present + present, total.left + left
    say(f"{manifest.study}: {uploaded} uploaded, {present} there already, {left} left")
    if kind == "silent":
        child.kill()
    return kind == "finished"


def _keep_problem(total: Synced, event: dict[str, Any]) -> None:
    if event["state"] in ("failed", "refused"):
        total.problems.append(f"record {event['record_id']}: {event['reason']}")


def readable_records_folder(records: Path) -> Path:
    """The folder itself. Errors: RecordError where there is none."""
    if not records.is_dir():
        raise RecordError(
            f"there is no records folder at {records}; give it with --records, or measure something first"
        )
    return records
