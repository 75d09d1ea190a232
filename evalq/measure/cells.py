"""The record store: one folder per record, one lock per cell, work in progress apart until it is complete."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from evalq.errors import RecordError
from evalq.measure.launch import Watcher
from evalq.measure.spec import RECORD_FOLDER
from evalq.records import RECORD_FILE, TABLES, Record, read_record, read_table, sync_folder, write_text

CLOCK_SECONDS = 1.0  # records tell their time in whole seconds


class CellLock:
    """Held while a cell is measured, so that two runs of the same cell do not share a work folder. Dies with its owner."""

    def __init__(self, records: Path, key: str, watcher: Watcher) -> None:
        self._path = records / ".locks" / f"{key[:24]}.lock"
        self._watcher = watcher
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "a+", encoding="utf-8")
        told = False
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    self._watcher.stage("wait", "waiting for another evalq that measures this same cell")
                    told = True
                time.sleep(0.5)
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def find_unfinished(records: Path, key: str) -> tuple[Record, Path] | None:
    """The newest record of exactly this measurement, when its load was cut off: what it scored need not be scored again."""
    found = find_baseline(records, key)
    return found if found is not None and found[0].loads_missing else None


def find_baseline(records: Path, key: str, since: float = 0.0) -> tuple[Record, Path] | None:
    """The newest complete record of exactly this measurement whose tables are whole, made at or after `since` (Unix seconds).

    None when there is none.
    """
    if not records.is_dir():
        return None
    for folder in sorted(records.iterdir(), key=_age):
        if folder.name.startswith(".") or -_age(folder) < since - CLOCK_SECONDS:
            continue
        found = _usable(folder, key)
        if found is not None and datetime.datetime.fromisoformat(found.created_at).timestamp() >= since - CLOCK_SECONDS:
            return found, folder
    return None


def find_hinted(records: Path, key: str, record_id: str) -> tuple[Record, Path] | None:
    """Record `record_id`, when it is still a complete record of this measurement."""
    found = _usable(records / record_id, key) if record_id else None
    return (found, records / record_id) if found else None


def _usable(folder: Path, key: str) -> Record | None:
    """The record in `folder` when it is complete, of this key, and whole with its tables."""
    with contextlib.suppress(RecordError, OSError):  # a damaged or unreadable record is not this one
        if not (folder / RECORD_FILE).is_file():
            return None
        record = read_record(folder)
        if record.reuse_key == key and record.status == "complete":
            for table in TABLES:
                read_table(folder, record, table)
            return record
    return None


def _age(folder: Path) -> float:
    try:
        return -folder.stat().st_mtime
    except OSError:
        return 0.0


def keep_record(records: Path, work: Path, record: Record, composed: str) -> Path:
    """Move a complete record from the work folder into the store by rename; the work folder is then gone."""
    source = work / RECORD_FOLDER
    write_text(source / "config.yaml", composed)
    if (work / "engine.log").is_file():
        shutil.copyfile(work / "engine.log", source / "engine.log")
    keep_samples(work, source, 1)
    target = records / record.record_id
    os.replace(source, target)
    sync_folder(records)
    shutil.rmtree(work, ignore_errors=True)
    return target


def keep_samples(work: Path, folder: Path, round_: int) -> None:
    """The device's sensors during the load, beside the record."""
    for file in (work / "samples.jsonl", work / f"samples-{round_}.jsonl"):
        if file.is_file():
            name = "load-samples.jsonl" if round_ == 1 else f"load-samples-{round_}.jsonl"
            shutil.copyfile(file, folder / name)


def keep_load_files(work: Path, folder: Path, round_: int) -> None:
    """The server's log and the samples of a load that ran for itself."""
    keep_samples(work, folder, round_)
    if (work / "engine.log").is_file():
        shutil.copyfile(work / "engine.log", folder / "load-engine.log")
