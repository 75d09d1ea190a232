"""Who may use which device: one lock per device and host, held while a cell is measured. It dies with its owner.

A GPU is leased whole, so a load test has it to itself; of the CPU engine's cores, all that the engine is bound to. Two sweeps of
two users on one host keep out of each other's way too: the locks lie in one folder for all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from evalq.measure.device import gpu_ids

LEASES = "EVALQ_LEASES"  # environment variable: another folder for the locks
VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK_EVERY_SECONDS = 0.2

Say = Callable[[str], None]


@contextlib.contextmanager
def leased(is_cpu: bool, count: int, say: Say, cores: str | None = None) -> Iterator[list[str]]:
    """Hold `count` GPUs, or the CPU's cores, alone; waits until they are free. The engine then sees only these GPUs.

    Yields the ids of the GPUs; an empty list on the CPU, or where no driver names the GPUs.
    """
    ids = [] if is_cpu else gpu_ids()
    wanted = [f"core-{core}" for core in core_numbers(cores)] if is_cpu else [f"gpu-{name}" for name in ids or ["all"]]
    held = _take(wanted, len(wanted) if is_cpu or not ids else min(count, len(ids)), say)
    try:
        mine = [] if is_cpu or not ids else [name.removeprefix("gpu-") for name in held]
        with _visible(mine if len(mine) < len(ids) else []):
            yield mine
    finally:
        for descriptor in held.values():
            os.close(descriptor)


def core_numbers(cores: str | None) -> list[int]:
    """ "0-2,5" -> [0, 1, 2, 5]; all cores that this process may use when None or not of this form."""
    parts = [re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part) for part in (cores or "").split(",")]
    if not cores or not all(parts):
        return sorted(os.sched_getaffinity(0))
    return sorted({n for part in parts if part for n in range(int(part[1]), int(part[2] or part[1]) + 1)})


def _take(wanted: list[str], count: int, say: Say) -> dict[str, int]:
    """Locks on `count` of the wanted devices, all or none at a time. Name -> open descriptor."""
    folder, told = lease_folder(), False
    while True:
        held = _try_to_take(folder, wanted, count)
        if held is not None:
            return held
        if not told:
            say(f"waiting for {_in_words(wanted, count)}: {_holders(folder, wanted)}")
            told = True
        time.sleep(ASK_EVERY_SECONDS)


def _try_to_take(folder: Path, wanted: list[str], count: int) -> dict[str, int] | None:
    held: dict[str, int] = {}
    choosing = _open(folder / "choosing.lock")
    try:
        fcntl.flock(choosing, fcntl.LOCK_EX)  # so that two who each want two devices never end with one each
        for name in wanted:
            descriptor = _open(folder / f"{name}.lock")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            _sign(descriptor)
            held[name] = descriptor
            if len(held) == count:
                return held
        for descriptor in held.values():
            os.close(descriptor)
        return None
    finally:
        os.close(choosing)


def lease_folder() -> Path:
    """Where the locks are: $EVALQ_LEASES, else one folder for all users of this host."""
    given = os.environ.get(LEASES)
    folder = Path(given) if given else Path(tempfile.gettempdir()) / "evalq-leases"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user made it
        folder.chmod(0o1777)
    return folder


def _open(path: Path) -> int:
    """A descriptor to lock. Another user's file is opened for reading: a lock needs no more."""
    flags = os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_RDWR)
    except PermissionError:
        return os.open(path, flags | os.O_RDONLY)
    except FileNotFoundError:
        return os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o644)


def _sign(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # opened for reading
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _holders(folder: Path, wanted: list[str]) -> str:
    found = set()
    for name in wanted:
        with contextlib.suppress(OSError):
            found.add((folder / f"{name}.lock").read_text(encoding="utf-8").strip())
    return f"held by evalq with pid {', '.join(sorted(found - {''}))}" if found - {""} else "held by another evalq"


def _in_words(wanted: list[str], count: int) -> str:
    return "the processor's cores" if wanted[0].startswith("core-") else f"{count} free GPU{'s' if count > 1 else ''}"


@contextlib.contextmanager
def _visible(ids: list[str]) -> Iterator[None]:
    """Let the engine see these GPUs only; no ids = leave everything as it is."""
    before = os.environ.get(VISIBLE)
    if ids:
        os.environ[VISIBLE] = ",".join(ids)
    try:
        yield
    finally:
        if ids and before is None:
            del os.environ[VISIBLE]
        elif ids and before is not None:
            os.environ[VISIBLE] = before
