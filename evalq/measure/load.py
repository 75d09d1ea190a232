"""Loading an engine: all at once on the scoring start, or any load on a server. What is asked of whom is decided here."""

from __future__ import annotations

import datetime
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from evalq.config import LoadConfig, RunConfig
from evalq.loads.build import make_level, wrong_lengths
from evalq.loads.figures import Request, output_bound, run_figures
from evalq.loads.health import Window, assess, joules, without_sensors
from evalq.loads.results import Health, Level, LoadResult, Repeat, short_name
from evalq.loads.schedule import LevelPlan, levels_of, read_trace
from evalq.measure.engine import Engine, Progress
from evalq.measure.sampler import Sampling
from evalq.records import Load

ENGINE_LOOP = "the engine's own loop, in process"


def levels_to_run(config: RunConfig) -> list[LevelPlan]:
    """The levels of the config's load; reads the trace's file where there is one. Errors: ConfigError."""
    load = config.load
    rows = read_trace(trace_file(config), load.requests) if load.kind == "trace" else []
    return levels_of(load, rows)


def trace_file(config: RunConfig) -> Path:
    """Where the trace is: as given, else under data.root or $EVALQ_DATA."""
    given = Path(config.load.trace or "").expanduser()
    root = config.data.root or os.environ.get("EVALQ_DATA")
    return given if given.is_absolute() or given.is_file() or not root else Path(root) / given


def longest_request(config: RunConfig) -> int:
    """Tokens of the longest request of the load, prompt and answer; 0 without a load."""
    if not config.load.enabled:
        return 0
    levels = levels_to_run(config)
    return max(
        (i + o for plan in levels for i, o in zip(plan.input_lengths, plan.output_lengths, strict=True)), default=0
    )


def measure_offline(
    engine: Engine, config: RunConfig, work: Path, device: str, progress: Progress | None
) -> LoadResult:
    """All requests at once on the engine start of the quality figures, `repeats` times over fresh random prompts."""
    load, settings = config.load, engine.settings()
    plan = levels_of(load)[0]
    random = np.random.default_rng(config.engine.seed)
    warmup = min(load.warmup_requests, plan.requests)
    repeats: list[Repeat] = []
    windows: list[Window] = []
    with Sampling(work / "samples.jsonl", load.health.interval_seconds) as sampling:
        if warmup:
            _run_offline(engine, _prompts(random, warmup, load.input_tokens, engine.vocabulary), load)
        for number in range(load.repeats):
            engine.reset_prefix_cache()
            prompts = _prompts(random, plan.requests, load.input_tokens, engine.vocabulary)
            before, wall, began = engine.preemptions(), time.time(), time.monotonic()
            requests, cached = _run_offline(engine, prompts, load)
            windows.append((began, time.monotonic()))
            _, samples = sampling.read()
            seconds = windows[-1][1] - began
            after = engine.preemptions()
            repeats.append(
                Repeat(
                    round=1,
                    began_at=iso(wall),
                    seconds=seconds,
                    requests=len(requests),
                    requests_failed=0,
                    wrong_lengths=wrong_lengths(requests),
                    preemptions=None if before is None or after is None else after - before,
                    prefix_hit_share=cached / (plan.requests * load.input_tokens),
                    figures=run_figures(requests, seconds, load.slo, joules(samples, windows[-1])),
                )
            )
            if progress:
                progress(number + 1, load.repeats, "repeats")
    health = health_of(sampling, windows, config)
    level = make_level(plan, repeats, load.warmup_requests, bound_of(config, plan), health)
    return LoadResult(
        name=load.name,
        kind=load.kind,
        start="scoring",
        client=ENGINE_LOOP,
        levels=[level],
        health=health,
        start_seconds={engine.start_kind: engine.start_seconds},
        scheduler=scheduler_limits(settings),
        device=device,
    )


def _prompts(random: np.random.Generator, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Random token ids; the low ids are left out, since special tokens live there."""
    low = min(256, vocabulary // 2)
    drawn: list[list[int]] = random.integers(low, vocabulary, size=(count, length)).tolist()
    return drawn


def _run_offline(engine: Engine, prompts: list[list[int]], load: LoadConfig) -> tuple[list[Request], int]:
    """One run; the requests as seen, and the prompt tokens that came from a cache."""
    outputs, finished = engine.generate(prompts, load.output_tokens, ignore_eos=True)
    requests = [
        Request(0.0, ttft, seconds, (), len(prompt), len(output.outputs[0].token_ids), load.output_tokens)
        for prompt, output, seconds in zip(prompts, outputs, finished, strict=True)
        for ttft in (first_token_seconds(output, seconds),)
    ]
    return requests, sum(int(output.num_cached_tokens or 0) for output in outputs)


def first_token_seconds(output: Any, finished_seconds: float) -> float | None:
    """From the start of the run to this request's first token, from the engine's own times; None where it keeps none.

    The engine stamps first and last token on one clock, and the loop knows when the request ended.
    """
    metrics = getattr(output, "metrics", None)
    first, last = getattr(metrics, "first_token_ts", 0.0), getattr(metrics, "last_token_ts", 0.0)
    if not first or not last or last < first:
        return None
    return max(0.0, finished_seconds - (last - first))


def health_of(sampling: Sampling, windows: list[Window], config: RunConfig) -> Health:
    """The device's health in the windows, from the samples so far."""
    header, samples = sampling.read()
    if header["source"] == "none":
        return without_sensors(header["note"])
    ready = min((low for low, _ in windows), default=math.inf)
    own = {pid for sample in samples if sample.time < ready for pid in sample.processes}
    links = [device.get("link_bytes_per_second") for device in header["devices"]]
    link = float(links[0]) if links and links[0] else None
    offload = bool(config.engine.extra.get("kv_offloading_size"))
    return assess(samples, windows, config.load.health, offload, link, header["source"], header["devices"], own)


def bound_of(config: RunConfig, plan: LevelPlan) -> float | None:
    """The planner's roofline for one level, output tokens per second; None where the device has no published peaks."""
    from evalq.errors import EvalqError
    from evalq.facts.gpus import gpu_facts
    from evalq.facts.models import facts_of
    from evalq.plan.roofline import roofline
    from evalq.plan.settings import engine_settings

    inputs, outputs = (sum(lengths) / max(1, plan.requests) for lengths in (plan.input_lengths, plan.output_lengths))
    try:
        facts, gpu = facts_of(config.model), gpu_facts(config.gpu.name)
        settings = engine_settings(config, facts, gpu)
        slots = min(plan.concurrency or plan.requests, config.engine.max_num_seqs)
        peaks = roofline(facts, config.quant, gpu, settings, round(inputs + outputs / 2), slots)
    except (EvalqError, KeyError, ValueError):
        return None
    if peaks is None:
        return None
    return output_bound(peaks.prefill_tokens_per_second, peaks.decode_tokens_per_second, inputs, outputs)


def scheduler_limits(settings: dict[str, Any]) -> dict[str, int]:
    """The engine's own limits, which must be equal in all cells that are compared."""
    return {name: int(settings[name]) for name in ("max_num_seqs", "max_num_batched_tokens")}


def iso(wall_seconds: float) -> str:
    return datetime.datetime.fromtimestamp(wall_seconds, datetime.UTC).isoformat(timespec="milliseconds")


def short_loads(result: LoadResult) -> dict[str, Load]:
    """The result in short, one entry per level, as policies and tables read it; the only level goes by the load's name."""
    return {short_name(result, level): _short(result, level) for level in result.levels}


def _short(result: LoadResult, level: Level) -> Load:
    rate = level.figures.get("output_tokens_per_second")
    total = level.figures.get("total_tokens_per_second")
    p50, p99 = (level.figures.get(f"latency_p{p}_seconds") for p in (50, 99))
    at_once = level.requests if result.start == "scoring" else 0  # 0: nobody held requests back
    return Load(
        name=short_name(result, level),
        requests=level.requests,
        input_tokens_per_request=round(level.input_tokens),
        output_tokens_per_request=round(level.output_tokens),
        concurrency=level.concurrency or at_once,
        repeats=len(level.repeats),
        output_tokens_per_second=rate.value if rate else None,
        output_tokens_per_second_low=rate.low if rate else None,
        output_tokens_per_second_high=rate.high if rate else None,
        total_tokens_per_second=total.value if total else None,
        request_latency_p50_seconds=p50.value if p50 else None,
        request_latency_p99_seconds=p99.value if p99 else None,
        valid=level.valid,
        reasons=level.reasons,
    )
