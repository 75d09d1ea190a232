"""The record store: one folder per record, one lock per cell, work in progress apart until it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from evalq.errors import RecordError
from evalq.measure.launch import Watcher
from evalq.measure.worker import RECORD_FOLDER
from evalq.records import RECORD_FILE, TABLES, Record, read_record, read_table, sync_folder, write_text


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


def find_baseline(records: Path, key: str) -> tuple[Record, Path] | None:
    """The newest complete record of exactly this measurement whose tables are whole; None when there is none."""
    if not records.is_dir():
        return None
    for folder in sorted(records.iterdir(), key=_age):
        if folder.name.startswith("."):
            continue
        with contextlib.suppress(RecordError, OSError):  # a damaged or unreadable record is not this one
            if not (folder / RECORD_FILE).is_file():
                continue
            record = read_record(folder)
            if record.reuse_key == key and record.status == "complete":
                for table in TABLES:
                    read_table(folder, record, table)
                return record, folder
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
    target = records / record.record_id
    os.replace(source, target)
    sync_folder(records)
    shutil.rmtree(work, ignore_errors=True)
    return target
