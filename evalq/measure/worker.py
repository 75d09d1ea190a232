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
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from evalq.config import RunConfig
from evalq.errors import EvalqError, MeasurementError
from evalq.kvrecord import KvReport
from evalq.measure import data
from evalq.measure.environment import engine_version, environment, fingerprint
from evalq.measure.groups import Group, GroupScores, load_groups, score_or_resume, stop_on_implausible
from evalq.measure.spec import LOAD_FILE, RECORD_FOLDER, Events, WorkerSpec, read_spec
from evalq.records import (
    Applied,
    Load,
    Record,
    Scalar,
    from_mapping,
    write_record,
    write_text,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from evalq.loads.results import LoadResult
    from evalq.measure.divergence import ExactDivergence
    from evalq.measure.engine import Engine
    from evalq.measure.serving import Served


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
        groups = load_groups(config)
    scores = bool(groups) or bool(spec.prompts) or config.kv.measures
    if not scores and config.load.enabled and config.load.start == "serving":
        return _measure_served(spec, config, work, events)
    from evalq.measure.engine import Engine

    window = max(config.tasks.perplexity_window, config.tasks.choice_window)
    with events.timed("start", "starting the engine"):
        engine = Engine.start(config, Path(spec.checkpoint), window, spec.is_cpu)
    events.send("started", seconds=engine.start_seconds)
    try:
        return _measure_on(engine, spec, config, groups, events)
    finally:
        with contextlib.suppress(Exception):
            engine.close()


def _measure_served(spec: WorkerSpec, config: RunConfig, work: Path, events: Events) -> Record:
    """Nothing is scored: one start of the server gives the load, the proof of application and the ledger."""
    with serving(spec, config, work, events) as served:
        return _measure_on(served, spec, config, [], events)


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


def _measure_on(
    engine: Engine | Served, spec: WorkerSpec, config: RunConfig, groups: list[Group], events: Events
) -> Record:
    """Everything that one start is for, in the order of its importance, and the record of it."""
    from evalq.measure.applied import measure_ledger
    from evalq.measure.engine import Engine

    settings = engine.settings()
    divergence = _divergence(spec, config, events)
    applied = proof_of(engine, config, spec, settings)
    done: list[GroupScores] = []
    kv_report: KvReport | None = None
    kv_tables: dict[str, pa.Table] = {}
    if isinstance(engine, Engine):
        for group in groups:
            done.append(score_or_resume(engine, spec, config, group, events, divergence))
            stop_on_implausible(config, spec, done[-1].scores)
        kv_report, kv_tables = _measure_kv(engine, spec, config, settings, applied.attention_backend, groups, events)
    results = _measure_load(engine, spec, config, events)
    if spec.prompts and isinstance(engine, Engine):
        from evalq.measure.outputs import write_outputs

        with events.timed("generate", "generating outputs"):
            write_outputs(engine, spec.prompts, spec.output_tokens, Path(spec.work_dir), events.progress)
    identity = {name: value for one in done for name, value in one.identity.items()}
    ledger = measure_ledger(config, settings, engine.describe(), spec.checkpoint_bytes)
    record = Record(
        schema_version=1,
        record_id=spec.record_id,
        run_id=spec.run_id,
        status="complete" if applied.ok else "invalid",
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cell=spec.cell,
        config_hash=spec.config_hash,
        reuse_key=spec.reuse_key,
        fingerprint=fingerprint(spec, config, settings, applied.attention_backend, identity),
        engine_settings={**settings, "attention_backend": applied.attention_backend},
        applied=applied,
        tasks={name: score for one in done for name, score in one.scores.items()},
        loads=_in_short(results),
        ledger=dataclasses.replace(ledger, predicted=spec.predicted),
        stage_seconds={name: round(seconds, 3) for name, seconds in events.stage_seconds.items()},
        environment=environment(spec),
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
        return _write(Path(spec.work_dir), record, [*(one.tables for one in done), kv_tables])


def _measure_load(
    engine: Engine | Served, spec: WorkerSpec, config: RunConfig, events: Events
) -> dict[str, LoadResult]:
    """The load that this start can carry, by its name: the server's, or the offline one; nothing where a server is to come."""
    from evalq.measure.engine import Engine
    from evalq.measure.load import measure_offline

    load, work = config.load, Path(spec.work_dir)
    if not load.enabled:
        return {}
    if not isinstance(engine, Engine):
        return {load.name: _serve_load(engine, spec, config, work, events)}
    if load.start != "scoring":
        return {}
    with events.timed("load", "measuring throughput"):
        device = str(spec.identity.get("gpu", ""))
        return {load.name: measure_offline(engine, config, work, device, events.progress)}


def _in_short(results: dict[str, LoadResult]) -> dict[str, Load]:
    """The figures of each load's steps, as a record shows them."""
    from evalq.measure.load import short_loads

    return {key: short for result in results.values() for key, short in short_loads(result).items()}


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
    groups: list[Group],
    events: Events,
) -> tuple[KvReport | None, dict[str, pa.Table]]:
    """The KV stage; nothing for a baseline whose config asks for nothing."""
    from evalq.measure.kv.study import Asked, is_wanted, measure_kv

    if not is_wanted(config):
        return None, {}
    store = Path(spec.store_dir or spec.work_dir) / "kv"
    asked = Asked(config, settings, spec.identity, backend, engine_version(), store)
    texts = next((group for group in groups if group.name == data.PERPLEXITY), Group(data.PERPLEXITY, {}, None))
    return measure_kv(engine, asked, texts.tasks, texts.limit, events)


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
