"""One prepared cell, stage by stage: identify it, take its stored record or make the checkpoint and measure, judge.

What was measured is a record on disk before anyone else hears of it. What may refuse a cell beforehand is in `evalq.preparation`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from evalq import checkpoints
from evalq.config import GateConfig, RunConfig, config_hash
from evalq.errors import ConfigError, EvalqError, MeasurementError, RecordError
from evalq.identity import baseline_key, cell_names, checkpoint_id, identity_of, reuse_key
from evalq.judge.seal import seal, seal_key, why_unsealed
from evalq.measure.cells import CellLock, find_baseline, find_hinted, find_unfinished, keep_record
from evalq.measure.device import check_device_alone, check_device_clean
from evalq.measure.hidden import GIB, has_store, require_room, store_folder
from evalq.measure.launch import WORKER, Watcher, run_worker
from evalq.measure.lease import leased
from evalq.measure.spec import WorkerSpec
from evalq.preparation import Prepared
from evalq.records import (
    ESTIMATES_FILE,
    VERDICT_FILE,
    Estimate,
    Failure,
    Record,
    Scalar,
    Verdict,
    to_json,
    write_record,
    write_text,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """A record, its folder, and whether it came from the store."""

    record: Record
    folder: Path
    reused: bool


@dataclass(frozen=True)
class Identified:
    """A cell with its checkpoint at hand. Equal `key` = the same measurement."""

    source: Path
    identity: dict[str, Scalar]
    key: str
    work: Path  # folder of the measurement while it runs; engine.log is in it


def identify(cell: Prepared, watcher: Watcher) -> Identified:
    """Find (or fetch) the source checkpoint and say which measurement this is. Errors: EvalqError."""
    source = checkpoints.source_folder(cell, watcher)
    identity = identity_of(cell, source)
    key = reuse_key(cell, identity)
    return Identified(source, identity, key, cell.places.records / ".work" / key[:24])


def stored_record(cell: Prepared, known: Identified, since: float | None, hint: str = "") -> Measured | None:
    """The stored record of this very measurement: record `hint`, else the newest made at or after `since` (Unix seconds)."""
    if since is None:
        cut_off = find_unfinished(cell.places.records, known.key)
        return Measured(*cut_off, reused=True) if cut_off and _is_trusted(cut_off[1]) else None
    hidden = hidden_folder(cell, known.identity)
    if cell.is_baseline and hidden is not None and not has_store(hidden):
        return None  # its hidden states are wanted, and they are not there
    records = cell.places.records
    found = find_hinted(records, known.key, hint) or find_baseline(records, known.key, since)
    return Measured(*found, reused=True) if found and _is_trusted(found[1]) else None


def measure(
    cell: Prepared,
    watcher: Watcher,
    command: Sequence[str] = WORKER,
    reuse: bool = False,
    since: float | None = None,
    hint: str = "",
    known: Identified | None = None,
) -> Measured:
    """Measure the cell in a child process, or take the stored record of the very same measurement.

    `reuse`: any stored one will do; `since`: one made at or after that time (Unix seconds); `hint`: this record first.
    Errors: EvalqError; the failure is on disk as a record of status "failed" too.
    """
    known = known or identify(cell, watcher)
    with CellLock(cell.places.records, known.key, watcher):
        stored = stored_record(cell, known, 0.0 if reuse else since, hint)
        if stored is not None:
            watcher.stage("reuse", f"using the stored record {stored.record.record_id}")
            shutil.rmtree(
                known.work, ignore_errors=True
            )  # left by a run that died between keeping its record and tidying up
            return stored
        record_id = new_record_id(cell)
        try:
            return _measure_anew(cell, known, record_id, watcher, command)
        except (EvalqError, OSError) as error:
            failure = error if isinstance(error, EvalqError) else disk_error(error)
            folder = _keep_failure(cell, known.identity, known.key, known.work, record_id, failure)
            failure.add_note(f"record: {folder}")
            raise failure from error


def _is_trusted(folder: Path) -> bool:
    """Whether a stored record may be used again: where records are sealed, only one whose seal holds."""
    secret = seal_key()
    return secret is None or why_unsealed(folder, secret) is None


def _measure_anew(
    cell: Prepared, known: Identified, record_id: str, watcher: Watcher, command: Sequence[str]
) -> Measured:
    """The measurement itself, with its devices to itself."""
    hidden = hidden_folder(cell, known.identity)
    if hidden is not None and cell.is_baseline:
        require_room(hidden, round(cell.config.tasks.divergence_store_gib * GIB))
    checkpoint = checkpoints.cell_checkpoint(cell, known.source, watcher)
    spec = worker_spec(cell, known, checkpoint, known.work, record_id)
    limits = (cell.config.engine.start_timeout_seconds, cell.config.engine.stall_timeout_seconds)
    with devices(cell, watcher):
        record = past_busy_port(lambda: run_worker(spec, watcher, *limits, command), watcher)
    folder = keep_record(cell.places.records, known.work, record, composed_yaml(cell.config))
    secret = seal_key()
    if secret is not None:
        seal(folder, secret)
    return Measured(record, folder, reused=False)


def worker_spec(cell: Prepared, known: Identified, checkpoint: Path, work: Path, record_id: str) -> WorkerSpec:
    """What the worker is told; its run id proves later that the answer is to this request."""
    from evalq.quantize.calibrated import calibration_of

    hidden = hidden_folder(cell, known.identity)
    return WorkerSpec(
        run_id=secrets.token_hex(16),
        record_id=record_id,
        cell=cell_names(cell),
        config=dataclasses.asdict(cell.config),
        checkpoint=str(checkpoint),
        checkpoint_bytes=sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) or None,
        identity=known.identity,
        config_hash=config_hash(cell.config),
        reuse_key=known.key,
        work_dir=str(work),
        is_cpu=cell.is_cpu,
        predicted=cell.predicted,
        calibration=calibration_of(checkpoint),
        checkpoint_id=checkpoint_id(cell, checkpoint),
        hidden_folder=str(hidden or ""),
        baseline_key=baseline_key(cell, known.identity),
        baseline_checkpoint=str(known.source),
        store_dir=str(cell.places.records),
    )


def hidden_folder(cell: Prepared, identity: dict[str, Scalar]) -> Path | None:
    """Where the baseline of this cell keeps its hidden states for exact divergence; None when that is not asked for."""
    if cell.config.tasks.divergence != "exact" or not cell.config.tasks.perplexity:
        return None
    return store_folder(cell.places.records, baseline_key(cell, identity))


@contextlib.contextmanager
def devices(cell: Prepared, watcher: Watcher) -> Iterator[None]:
    """The cell's devices, leased, clean and, for a load, without company; vLLM on a Ray cluster finds its own."""
    config = cell.config
    if config.engine.extra.get("distributed_executor_backend") == "ray":
        yield
        return
    count = config.engine.tensor_parallel_size * config.engine.pipeline_parallel_size
    with leased(cell.is_cpu, count, lambda text: watcher.stage("wait", text), config.gpu.cpu_threads) as gpus:
        if not cell.is_cpu:
            check_device_clean(config.gpu.memory_utilization, ids=gpus or None)
            if config.load.enabled:
                check_device_alone(config.load.allow_shared, gpus or None)
        yield


def past_busy_port(run: Callable[[], T], watcher: Watcher) -> T:
    """Do `run`; once more when another program took the engine's port between choosing and binding it."""
    try:
        return run()
    except MeasurementError as error:
        if error.kind != "port":
            raise
        watcher.stage("again", "starting again: the engine's port was taken by another program")
        return run()


def new_record_id(cell: Prepared) -> str:
    """Readable and unique: model, scheme, device, time, chance."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    config = cell.config
    return f"{config.model.name}--{config.quant.name}--{config.gpu.name}--{stamp}-{secrets.token_hex(3)}"


def composed_yaml(config: RunConfig) -> str:
    """The composed config as YAML, for the record folder."""
    import yaml

    text: str = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True, width=120)
    return text


def _keep_failure(
    cell: Prepared, identity: dict[str, Scalar], key: str, work: Path, record_id: str, error: EvalqError
) -> Path | None:
    """A failed cell is a record too, so that a summary and MLflow can tell it from one that never ran."""
    kind = error.kind if isinstance(error, MeasurementError) else "unsupported" if error.exit_code == 4 else "engine"
    record = Record(
        schema_version=1,
        record_id=record_id,
        run_id="",
        status="failed",
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cell=cell_names(cell),
        config_hash=config_hash(cell.config),
        reuse_key=key,
        fingerprint=identity,
        engine_settings={},
        applied=None,
        tasks={},
        loads={},
        ledger=None,
        stage_seconds={},
        environment={},
        notes=[],
        failure=Failure(kind, str(error), "measure"),
        tables={},
    )
    folder = cell.places.records / record_id
    try:
        write_record(folder, record, {})
        write_text(folder / "config.yaml", composed_yaml(cell.config))
        if (work / "engine.log").is_file():
            shutil.copyfile(work / "engine.log", folder / "engine.log")
    except OSError:
        return None
    return folder


def disk_error(error: OSError) -> MeasurementError:
    """A file that could not be read or written, in one sentence."""
    return MeasurementError(
        f"writing failed: {error.strerror or error} ({error.filename or 'disk'}); "
        "free some space, or let paths.root or EVALQ_HOME name a folder that can be written, and run it again",
        "disk",
    )


def judge_cell(cell: Prepared, baseline: Measured, candidate: Measured, floor: Estimate | None = None) -> Verdict:
    """Judge and write verdict.json beside the candidate's record. `floor` is the engine's A/A floor, where one is kept."""
    from evalq.judge.gate import judge

    gate = cell.config.gate
    verdict = judge(baseline.record, baseline.folder, candidate.record, candidate.folder, gate, floor=floor)
    keep_verdict(candidate, verdict)
    keep_estimates(baseline, candidate, gate)
    return verdict


def keep_verdict(candidate: Measured, verdict: Verdict) -> None:
    """Write verdict.json beside the record."""
    write_text(candidate.folder / VERDICT_FILE, to_json(verdict) + "\n")


def keep_estimates(baseline: Measured, candidate: Measured, gate: GateConfig) -> None:
    """What MLflow and the report show besides the verdict; records that cannot be compared have none."""
    from evalq.judge.estimates import paired_estimates, write_estimates

    pair = (baseline.record, baseline.folder, candidate.record, candidate.folder)
    try:
        write_estimates(candidate.folder, paired_estimates(*pair, gate.allow, gate.confidence))
    except (RecordError, ConfigError):
        (candidate.folder / ESTIMATES_FILE).unlink(missing_ok=True)
