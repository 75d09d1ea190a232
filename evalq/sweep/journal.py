"""The state of a sweep on disk, so that a sweep that died goes on where it was.

<paths.root>/sweeps/<sweep>/
    sweep.json         the Plan: which cells, since when, who runs it, and how it ended
    jobs/<job>.json    one Entry per measurement: planned, running (host, pid, start time), done (record) or failed (kind)
    .lock              held while the sweep runs; it dies with its owner

Files appear by fsync and rename: after a power cut each is the old one or the new one. A cell without a file is planned. The
same cells make the same sweep, whatever the order, so the same command finds its state again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evalq.errors import EvalqError, MeasurementError, RecordError
from evalq.records import from_mapping, parse_json, to_json, write_text
from evalq.tracking.manifest import Owner, is_gone, this_process
from evalq.tracking.store import slug

SWEEPS = "sweeps"
PLAN_FILE = "sweep.json"
JOBS = "jobs"
STATE_VERSION = 1
STATES = ("planned", "running", "done", "failed")

Say = Callable[[str], None]


@dataclass(frozen=True)
class PlannedCell:
    """A cell as the sweep was asked for it."""

    key: str
    name: str
    model: str
    quant: str
    gpu: str
    engine: str
    is_baseline: bool


@dataclass(frozen=True)
class Plan:
    """sweep.json."""

    schema_version: int
    sweep: str
    began_at: float  # Unix seconds; records made since then belong to this sweep
    cells: list[PlannedCell]
    command: list[str]
    executor: str
    owner: Owner
    ended_at: float | None = None
    exit_code: int | None = None
    done: int | None = None  # cells, of those that were expected
    records: str = "records"  # folder, as paths.records says


@dataclass(frozen=True)
class Entry:
    """One measurement. `record` is an id in the store."""

    schema_version: int
    key: str
    name: str
    state: str  # one of STATES
    attempt: int = 0
    owner: Owner | None = None
    began_at: float | None = None
    ended_at: float | None = None
    record: str | None = None
    reused: bool = False
    kind: str | None = None  # of the failure
    message: str | None = None
    log: str | None = None  # engine.log of the running or failed measurement
    gpus: int = 1


@dataclass
class Journal:
    """The state of one running sweep; made by `open_journal`. Without a folder it remembers and writes nothing."""

    folder: Path | None
    began: float = field(default_factory=time.time)
    resumed: bool = False
    say: Say = print
    _entries: dict[str, Entry] = field(default_factory=dict)
    _lock: int | None = None
    _plan: Plan | None = None
    _told: bool = False

    def entry(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def started(self, key: str, name: str, gpus: int = 1) -> None:
        """Before anything of the job runs: from here on it may leave a record behind."""
        before = self.entry(key)
        tries = before.attempt + 1 if before else 1
        self._write(Entry(STATE_VERSION, key, name, "running", tries, this_process(), time.time(), gpus=gpus))

    def owned(self, key: str, owner: Owner | None, log: str | None) -> None:
        """Which process measures the job, and where its engine writes its log."""
        before = self.entry(key)
        if before is not None and before.state == "running":
            self._write(dataclasses.replace(before, owner=owner or before.owner, log=log))

    def may_have_left_a_record(self, key: str) -> bool:
        """Whether an earlier start of this sweep was interrupted in this job."""
        entry = self.entry(key)
        return entry is not None and entry.state == "planned" and entry.kind == "interrupted"

    def record_of(self, key: str) -> str:
        """Id of the record that an earlier start of this sweep made for this job."""
        entry = self.entry(key)
        return entry.record or "" if entry is not None and entry.state == "done" else ""

    def done(self, key: str, name: str, record: str, reused: bool) -> None:
        before = self.entry(key) or Entry(STATE_VERSION, key, name, "planned")
        self._write(
            dataclasses.replace(
                before, state="done", owner=None, ended_at=time.time(), record=record, reused=reused, kind=None,
                message=None, log=None,
            )
        )  # fmt: skip

    def failed(self, key: str, name: str, error: EvalqError, record: str | None = None) -> None:
        before = self.entry(key) or Entry(STATE_VERSION, key, name, "planned")
        kind = error.kind if isinstance(error, MeasurementError) else "infeasible" if error.exit_code == 4 else "config"
        self._write(
            dataclasses.replace(
                before, state="failed", owner=None, ended_at=time.time(), kind=kind, message=str(error), record=record
            )
        )

    def end(self, exit_code: int | None, done: int) -> None:
        """Say how the sweep ended (None: interrupted), and let others have it."""
        if self._plan is not None and self.folder is not None:
            self._plan = dataclasses.replace(self._plan, ended_at=time.time(), exit_code=exit_code, done=done)
            self._store(self.folder / PLAN_FILE, self._plan)
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        if self.folder is not None:
            self._store(self.folder / JOBS / entry_file(entry), entry)

    def _store(self, file: Path, content: Entry | Plan) -> None:
        """A full disk must not end the sweep here: what was measured is found again by its key."""
        try:
            write_text(file, to_json(content) + "\n")
        except OSError as error:
            if not self._told:
                self.say(
                    f"warning: the state of the sweep cannot be written ({error.strerror}: {file}); free some space"
                )
                self._told = True


def entry_file(entry: Entry) -> str:
    return f"{slug(entry.name)[:60]}-{entry.key[:12]}.json"


def sweep_id(cells: Sequence[PlannedCell]) -> str:
    """Readable and equal for equal cells: model, GPU, number of cells, hash."""
    models, gpus = sorted({cell.model for cell in cells}), sorted({cell.gpu for cell in cells})
    digest = hashlib.sha256("\n".join(sorted(cell.key for cell in cells)).encode()).hexdigest()[:8]
    names = models[0] if len(models) == 1 else f"{len(models)}-models"
    where = gpus[0] if len(gpus) == 1 else f"{len(gpus)}-gpus"
    return slug(f"{names}--{where}--{len(cells)}-cells-{digest}")


def open_journal(
    root: Path,
    cells: Sequence[PlannedCell],
    command: Sequence[str],
    executor: str,
    resume: bool,
    say: Say,
    records: str = "records",
) -> Journal:
    """Take the sweep's state, waiting for another evalq that runs the same sweep, and mark stale cells as planned again."""
    name = sweep_id(cells)
    folder = root / SWEEPS / name
    lock = _take_lock(folder, say)
    try:
        before = read_plan(folder) if resume else None
        if before is None:
            shutil.rmtree(folder / JOBS, ignore_errors=True)
        began = before.began_at if before else time.time()
        plan = Plan(
            STATE_VERSION, name, began, list(cells), list(command), executor, this_process(), records=records
        )  # fmt: skip
        write_text(folder / PLAN_FILE, to_json(plan) + "\n")
        journal = Journal(folder, began, before is not None, say, _lock=lock, _plan=plan)
        _reconcile(journal, read_entries(folder))
        return journal
    except BaseException:
        os.close(lock)
        raise


def _reconcile(journal: Journal, entries: list[Entry]) -> None:
    """What still says `running` was left behind: the lock is ours, so whoever ran it is not there to write its end."""
    for entry in entries:
        journal._entries[entry.key] = entry
        if entry.state == "running":
            who = f"pid {entry.owner.pid} on {entry.owner.host}" if entry.owner else "its process"
            gone = entry.owner is None or is_gone(entry.owner)
            text = f"{who} {'is gone' if gone else 'may still run and is waited for'}; the cell runs again"
            journal._write(dataclasses.replace(entry, state="planned", owner=None, message=text, kind="interrupted"))


def _take_lock(folder: Path, say: Say) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    told = False
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if not told:
                    say("waiting for another evalq that runs this same sweep; its cells will not be measured twice")
                    told = True
                time.sleep(0.3)
    except BaseException:
        os.close(descriptor)
        raise


def is_running(folder: Path) -> bool:
    """Whether some evalq holds the sweep now."""
    try:
        descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def read_plan(folder: Path) -> Plan | None:
    """The plan of a sweep; None when there is none that this evalq can read."""
    with contextlib.suppress(OSError, RecordError, UnicodeDecodeError):
        file = folder / PLAN_FILE
        return from_mapping(Plan, parse_json(file.read_text(encoding="utf-8"), str(file)), str(file))
    return None


def read_entries(folder: Path) -> list[Entry]:
    """All readable entries, oldest first; a damaged one counts as planned."""
    entries = []
    for file in sorted((folder / JOBS).glob("*.json")):
        with contextlib.suppress(OSError, RecordError, UnicodeDecodeError):
            entry = from_mapping(Entry, parse_json(file.read_text(encoding="utf-8"), str(file)), str(file))
            if entry.state in STATES:
                entries.append(entry)
    return sorted(entries, key=lambda entry: entry.began_at or 0.0)


def when(seconds: float) -> str:
    """A time for people, UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
