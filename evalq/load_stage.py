"""The load on a server, after the quality figures are on disk: whatever becomes of it, they stay.

A record that still lacks its load is known by `loads_missing`; running the same command again measures only that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from evalq import checkpoints, pipeline
from evalq.errors import EvalqError, MeasurementError
from evalq.judge.seal import seal, seal_key
from evalq.loads.build import joined
from evalq.loads.results import LoadResult
from evalq.measure.cells import CellLock, keep_load_files
from evalq.measure.launch import WORKER, Watcher, run_load_worker
from evalq.measure.load import short_loads
from evalq.pipeline import Measured
from evalq.preparation import Prepared
from evalq.records import RECORD_FILE, Record, read_record, to_json, write_text


def measure_with_load(
    cell: Prepared,
    watcher: Watcher,
    command: Sequence[str] = WORKER,
    since: float | None = None,
    hint: str = "",
    known: pipeline.Identified | None = None,
) -> Measured:
    """pipeline.measure, then the load on a server where one is asked for; a load that fails is said by `load_failure`."""
    measured = pipeline.measure(cell, watcher, command, since=since, hint=hint, known=known)
    if not needs_load(cell, measured):
        return measured
    try:
        return with_load(cell, measured, watcher, command)
    except EvalqError:
        return dataclasses.replace(measured, record=read_record(measured.folder))


def load_failure(measured: Measured | None) -> MeasurementError | None:
    """Why the record's load is missing, as an error; None when it is there or was not asked for."""
    if measured is None or not measured.record.loads_missing:
        return None
    said = [note for note in measured.record.notes if "was not measured" in note and note.startswith("load ")]
    return MeasurementError(said[-1] if said else "the load was not measured; run it again", "incomplete")


def needs_load(cell: Prepared, measured: Measured) -> bool:
    """Whether a load on a server is asked for and not in the record; with several rounds it is always measured anew."""
    load = cell.config.load
    if not load.enabled or load.start != "serving":
        return False
    return bool(measured.record.loads_missing) or (load.rounds > 1 and measured.reused)


def with_load(
    cell: Prepared, measured: Measured, watcher: Watcher, command: Sequence[str] = WORKER, round_: int = 1
) -> Measured:
    """The record with the load's figures, on disk. round_ 2 and later join theirs to what is there.

    Errors: EvalqError; the record is then as it was, and says in its notes why the load is missing.
    """
    record, key = measured.record, measured.record.reuse_key
    work = cell.places.records / ".work" / f"{key[:24]}-load"
    with CellLock(cell.places.records, key, watcher):
        shutil.rmtree(work, ignore_errors=True)
        try:
            result = _run(cell, record, work, watcher, command, round_)
        except EvalqError as error:
            note = f"load {cell.config.load.name} was not measured: {error}"
            _rewrite(measured.folder, dataclasses.replace(record, notes=[*record.notes, note]))
            raise
        earlier = record.load_results.get(result.name)
        if round_ > 1 and earlier is not None:
            result = joined(earlier, result, cell.config.load.warmup_requests)
        kept = with_result(record, result)
        keep_load_files(work, measured.folder, round_)
        _rewrite(measured.folder, kept)
        shutil.rmtree(work, ignore_errors=True)
    return dataclasses.replace(measured, record=kept)


def with_result(record: Record, result: LoadResult) -> Record:
    """The record with one load's figures in it, in place of earlier ones of that load."""
    earlier = record.load_results.get(result.name)
    gone = {result.name, *(short_loads(earlier) if earlier else ())}
    own = {name: load for name, load in record.loads.items() if name not in gone}
    notes = [note for note in record.notes if not note.startswith(f"load {result.name} was not measured")]
    return dataclasses.replace(
        record,
        loads={**own, **short_loads(result)},
        load_results={**record.load_results, result.name: result},
        loads_missing=[name for name in record.loads_missing if name != result.name],
        notes=notes,
    )


def _run(
    cell: Prepared, record: Record, work: Path, watcher: Watcher, command: Sequence[str], round_: int
) -> LoadResult:
    known = pipeline.identify(cell, watcher)
    checkpoint = checkpoints.cell_checkpoint(cell, known.source, watcher)
    spec = pipeline.worker_spec(cell, known, checkpoint, work, record.record_id)
    spec = dataclasses.replace(spec, stage="load", round=round_)
    limits = (cell.config.engine.start_timeout_seconds, cell.config.engine.stall_timeout_seconds)
    try:
        with pipeline.devices(cell, watcher):
            return pipeline.past_busy_port(lambda: run_load_worker(spec, watcher, *limits, command), watcher)
    except EvalqError:
        with contextlib.suppress(OSError):
            keep_load_files(work, cell.places.records / record.record_id, round_)
        raise


def _rewrite(folder: Path, record: Record) -> None:
    write_text(folder / RECORD_FILE, to_json(record) + "\n")
    secret = seal_key()
    if secret is not None:
        seal(folder, secret)
