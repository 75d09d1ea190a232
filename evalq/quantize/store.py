"""Folders that are complete or not there: lock, make aside, fsync, rename; free space asked for before starting."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from evalq.errors import MeasurementError
from evalq.records import sync_folder

Progress = Callable[[int, int, str], None]
LOCK_POLL_SECONDS = 0.2
SPARE_BYTES = 64 << 20  # left free beside what is written: reports, logs, file system overhead


@contextlib.contextmanager
def locked(target: Path, progress: Progress | None = None, other: str = "") -> Iterator[None]:
    """Hold the lock of a folder that is to be made, or of a file. flock: the kernel drops it when its owner dies.

    other: who is waited for, in words; a process that makes the target when empty.
    """
    with disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target.parent / f".{target.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _wait_for_lock(descriptor, other or f"another process that makes {target.name}", progress)
        yield
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, other: str, progress: Progress | None) -> None:
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if progress is not None and not told:
                progress(0, 1, f"waiting for {other}")
                told = True
            time.sleep(LOCK_POLL_SECONDS)


@contextlib.contextmanager
def new_folder(target: Path, needed_bytes: int) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends well; call it under `locked`.

    Errors: MeasurementError(disk) when there is no room, before anything is written or while writing.
    """
    for stale in target.parent.glob(f".{target.name}.*.tmp"):  # of a process that was killed: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    check_space(target.parent, needed_bytes)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    try:
        with disk_errors(target.parent, needed_bytes):
            temporary.mkdir()
            yield temporary
            sync_files(temporary)
            _replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(temporary: Path, target: Path) -> None:
    """Rename `temporary` to `target`; a folder that is in the way (a damaged one) is moved aside and removed."""
    aside = target.parent / f".{target.name}.old.tmp"
    if target.exists():
        os.replace(target, aside)
    os.replace(temporary, target)
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sync_files(folder: Path) -> None:
    """fsync every file of a folder and the folder itself; folders inside are the business of who made them."""
    for file in folder.iterdir():
        if file.is_dir():
            continue
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    sync_folder(folder)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Errors: MeasurementError(disk) when the file system of `folder` has fewer bytes free than needed."""
    needed = needed_bytes + SPARE_BYTES
    free = free_bytes(folder)
    if free < needed:
        raise _no_space(folder, needed, free)


def free_bytes(folder: Path) -> int:
    """Bytes free on the file system of a folder that may not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _no_space(folder: Path, needed: int, free: int) -> MeasurementError:
    return MeasurementError(
        f"no room for the checkpoint in {folder}: {needed} bytes are needed and {free} are free; "
        "free some space or choose another folder with paths.checkpoints and paths.models",
        kind="disk",
    )


@contextlib.contextmanager
def disk_errors(folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn a full or read-only disk into MeasurementError(disk)."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(folder, needed_bytes, free_bytes(folder)) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise MeasurementError(
                f"cannot write to {folder} ({error.strerror}); choose another folder with paths.checkpoints and "
                "paths.models",
                kind="disk",
            ) from error
        raise
