"""Is a composed config one that can run? Every problem in words, all at once."""

from __future__ import annotations

import dataclasses
import math
import re

from evalq.config import (
    CALIBRATION_SOURCES,
    KV_DTYPES,
    KV_SCALE_SOURCES,
    METHODS,
    OBJECTIVES,
    ORIGINS,
    STRATEGIES,
    WEIGHT_BITS,
    CalibrationConfig,
    ExecutorConfig,
    GateConfig,
    KvConfig,
    LoadConfig,
    ModelConfig,
    PathsConfig,
    QuantConfig,
    QuantGroup,
    RunConfig,
    SearchConfig,
    nearest,
    parse_share,
)
from evalq.errors import ConfigError

FOLDER_NAME = re.compile(r"\w[\w.+ -]{0,79}")

MOST_CONFIDENT = 0.9999  # beyond it no interval of documents means anything


def check(config: RunConfig) -> None:
    """Raise one ConfigError that lists every problem of the config; return when there is none."""
    problems = [
        *_check_names(config),
        *_check_paths(config.paths),
        *_check_model(config.model),
        *_check_quant(config.quant),
        *_check_numbers(config),
        *_check_tasks(config),
        *_check_calibration(config.calibration),
        *_check_search(config.search),
        *_check_executor(config.executor),
        *_check_kv(config.kv),
        *_check_load(config.load),
        *check_gate(config.gate),
    ]
    if problems:
        raise ConfigError(*problems)


def _check_paths(paths: PathsConfig) -> list[str]:
    """An empty name would be the current folder, or the root itself."""
    return [
        f"paths.{field.name} is empty; name a folder, or leave it out for the default"
        for field in dataclasses.fields(paths)
        if not str(getattr(paths, field.name)).strip()
    ]


def _check_names(config: RunConfig) -> list[str]:
    """Names of a cell become folders: one with a slash would leave the store, where no later run finds what was measured."""
    names = {group: str(getattr(config, group).name) for group in ("model", "quant", "gpu", "engine", "load")}
    return [
        f"{group}.name={name[:100]!r} cannot name a folder; use 1 to 80 letters, digits, dots, dashes, underscores, plus "
        "signs or blanks, a letter or digit first"
        for group, name in names.items()
        if not FOLDER_NAME.fullmatch(name)
    ]


def _check_model(model: ModelConfig) -> list[str]:
    problems = []
    if model.bos not in ("always", "never"):
        problems.append(f"model.bos={model.bos!r} is not always or never; say whether a window starts with BOS")
    if model.source not in ("hub", "package", "path"):
        problems.append(f"model.source={model.source!r}: {nearest(model.source, ('hub', 'package', 'path'))}")
    if model.source == "hub" and not model.path and not model.hub_id:
        problems.append(f"model {model.name} names neither hub_id nor path; give model.path=/your/checkpoint")
    if model.source == "path" and not model.path:
        problems.append(f"model {model.name} needs model.path=/your/checkpoint")
    if model.dtype not in ("bfloat16", "float16", "float32"):
        problems.append(f"model.dtype={model.dtype!r}: {nearest(model.dtype, ('bfloat16', 'float16', 'float32'))}")
    return problems


def _check_quant(quant: QuantConfig) -> list[str]:
    problems = []
    if quant.origin not in ORIGINS:
        problems.append(f"quant.origin={quant.origin!r}: {nearest(quant.origin, ORIGINS)}")
    if quant.kv_cache_dtype not in KV_DTYPES:
        problems.append(
            f"quant.kv_cache_dtype={quant.kv_cache_dtype!r} is not explicit enough or unknown: "
            f"{nearest(quant.kv_cache_dtype, KV_DTYPES)}"
        )
    if quant.kv_scale_source not in KV_SCALE_SOURCES:
        problems.append(
            f"quant.kv_scale_source={quant.kv_scale_source!r}: {nearest(quant.kv_scale_source, KV_SCALE_SOURCES)}"
        )
    if quant.kv_scale_source == "computed" and (quant.origin != "evalq" or quant.kv_cache_dtype != "fp8_e4m3"):
        problems.append(
            f"quant {quant.name} has computed KV scales, which evalq writes into a checkpoint of its own for E4M3; "
            "use origin=evalq and kv_cache_dtype=fp8_e4m3"
        )
    if quant.origin == "evalq" and not quant.groups and quant.kv_scale_source != "computed":
        problems.append(f"quant {quant.name} is made by evalq and has no groups; say which layers get what")
    if quant.origin == "engine" and not quant.engine_quantization:
        problems.append(f"quant {quant.name} is made by the engine and has no engine_quantization, e.g. fp8")
    if quant.method not in METHODS:
        problems.append(f"quant.method={quant.method!r}: {nearest(quant.method, METHODS)}")
    for name, group in quant.groups.items():
        problems.extend(_check_group(f"quant.groups.{name}", group))
    return problems


def _check_group(where: str, group: QuantGroup) -> list[str]:
    problems = []
    if not group.targets:
        problems.append(f"{where} has no targets; name layers or re:patterns")
    if group.weights is None:
        return [*problems, f"{where} has no weights; leave the group out to keep its layers at 16 bit"]
    for part, args in (("weights", group.weights), ("input_activations", group.input_activations)):
        if args is None:
            continue
        if args.type not in ("int", "float"):
            problems.append(f"{where}.{part}.type={args.type!r}: {nearest(args.type, ('int', 'float'))}")
        if args.strategy not in STRATEGIES:
            problems.append(f"{where}.{part}.strategy={args.strategy!r}: {nearest(args.strategy, STRATEGIES)}")
        if args.num_bits not in WEIGHT_BITS:
            problems.append(f"{where}.{part}.num_bits={args.num_bits} is not one of {', '.join(map(str, WEIGHT_BITS))}")
        if (args.strategy == "group") != (args.group_size is not None):
            problems.append(f"{where}.{part}: strategy=group and group_size go together; set both or neither")
        if args.group_size is not None and args.group_size <= 0:
            problems.append(f"{where}.{part}.group_size={args.group_size} must be above 0; use 32, 64 or 128")
    return problems


# What evalq passes to the engine by itself, and the key that sets it.
ENGINE_KEYS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "kv_cache_dtype": "quant.kv_cache_dtype",
    "quantization": "quant.engine_quantization",
    "gpu_memory_utilization": "gpu.memory_utilization",
    "trust_remote_code": "model.trust_remote_code",
    "worker_extension_cls": "tasks.scorer",
    **{
        key: f"engine.{key}"
        for key in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "enforce_eager",
            "load_format",
            "seed",
            "block_size",
            "attention_backend",
        )
    },
}


def _check_numbers(config: RunConfig) -> list[str]:
    problems = []
    positive = {
        "gpu.count": config.gpu.count,
        "gpu.cpu_kv_cache_gib": config.gpu.cpu_kv_cache_gib,
        "engine.tensor_parallel_size": config.engine.tensor_parallel_size,
        "engine.pipeline_parallel_size": config.engine.pipeline_parallel_size,
        "engine.max_model_len": config.engine.max_model_len,
        "engine.max_num_seqs": config.engine.max_num_seqs,
        "engine.max_num_batched_tokens": config.engine.max_num_batched_tokens,
        "engine.portion_tokens": config.engine.portion_tokens,
        "engine.block_size": config.engine.block_size,
        "engine.start_timeout_seconds": config.engine.start_timeout_seconds,
        "engine.stall_timeout_seconds": config.engine.stall_timeout_seconds,
        "tasks.perplexity_limit": config.tasks.perplexity_limit,
        "tasks.hellaswag_limit": config.tasks.hellaswag_limit,
        "tasks.truthfulqa_limit": config.tasks.truthfulqa_limit,
        "tasks.extra_limit": config.tasks.extra_limit,
        "load.requests": config.load.requests,
        "load.input_tokens": config.load.input_tokens,
        "load.output_tokens": config.load.output_tokens,
        "load.repeats": config.load.repeats,
        "load.rounds": config.load.rounds,
        "load.trace_speed": config.load.trace_speed,
        "load.trace_length_scale": config.load.trace_length_scale,
        "load.health.interval_seconds": config.load.health.interval_seconds,
        "tracking.timeout_seconds": config.tracking.timeout_seconds,
        "tracking.finish_limit_seconds": config.tracking.finish_limit_seconds,
    }
    for name, value in positive.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            problems.append(f"{name}={value} must be above 0")
    if not 0.0 < config.gpu.memory_utilization <= 1.0:
        problems.append(f"gpu.memory_utilization={config.gpu.memory_utilization} must be above 0 and at most 1")
    if config.tasks.perplexity_from < 0:
        problems.append(f"tasks.perplexity_from={config.tasks.perplexity_from} must be 0 or more")
    for name, window in (
        ("tasks.perplexity_window", config.tasks.perplexity_window),
        ("tasks.choice_window", config.tasks.choice_window),
    ):
        if window < 16:
            problems.append(f"{name}={window} tokens is too short to score anything; use 16 or more")
    for key in sorted(set(config.engine.extra) & set(ENGINE_KEYS)):
        problems.append(
            f"engine.extra.{key} is set by evalq itself, and would be recorded as what it is not; set {ENGINE_KEYS[key]}"
        )
    if config.engine.load_format not in ("auto", "dummy"):
        problems.append(
            f"engine.load_format={config.engine.load_format!r}: {nearest(config.engine.load_format, ('auto', 'dummy'))}"
        )
    return problems


def _check_tasks(config: RunConfig) -> list[str]:
    problems = []
    if config.data.name not in ("embedded", "local", "hub"):
        problems.append(f"data.name={config.data.name!r}: {nearest(config.data.name, ('embedded', 'local', 'hub'))}")
    if config.tasks.scorer not in ("hook", "prompt_logprobs"):
        problems.append(
            f"tasks.scorer={config.tasks.scorer!r}: {nearest(config.tasks.scorer, ('hook', 'prompt_logprobs'))}"
        )
    if config.tasks.request_order not in ("forward", "reverse"):
        problems.append(
            f"tasks.request_order={config.tasks.request_order!r}: "
            f"{nearest(config.tasks.request_order, ('forward', 'reverse'))}"
        )
    if config.tasks.divergence not in ("none", "exact"):
        problems.append(
            f"tasks.divergence={config.tasks.divergence!r}: {nearest(config.tasks.divergence, ('none', 'exact'))}"
        )
    if config.tasks.divergence == "exact" and config.tasks.scorer != "hook":
        problems.append(
            "tasks.divergence=exact works inside the engine and needs tasks.scorer=hook; set that, or divergence=none"
        )
    if not 0.001 <= config.tasks.divergence_store_gib <= 4096:
        problems.append(
            f"tasks.divergence_store_gib={config.tasks.divergence_store_gib} must be between 0.001 and 4096 GiB"
        )
    if not 0 <= config.tasks.topk <= 1000:
        problems.append(f"tasks.topk={config.tasks.topk} must be between 0 and 1000")
    return problems


def _check_calibration(calibration: CalibrationConfig) -> list[str]:
    given, where = calibration.source, "calibration"
    problems = []
    if given not in CALIBRATION_SOURCES:
        problems.append(f"{where}.source={given!r}: {nearest(given, CALIBRATION_SOURCES)}")
    if given == "hub" and not calibration.hub_id:
        problems.append(f"{where}.source=hub needs {where}.hub_id=OWNER/NAME")
    if given in ("embedded", "local") and not calibration.file:
        problems.append(f"{where}.source={given} needs {where}.file=NAME.jsonl")
    if not calibration.columns:
        problems.append(f"{where}.columns is empty; name the columns that hold text, e.g. [text]")
    for name in ("samples", "length_tokens", "batch_size"):
        if getattr(calibration, name) <= 0:
            problems.append(f"{where}.{name}={getattr(calibration, name)} must be above 0")
    return problems


def _check_search(search: SearchConfig) -> list[str]:
    problems = []
    if search.objective not in OBJECTIVES:
        problems.append(f"search.objective={search.objective!r}: {nearest(search.objective, OBJECTIVES)}")
    if search.method not in METHODS:
        problems.append(f"search.method={search.method!r}: {nearest(search.method, METHODS)}")
    if search.group_by not in ("layer", "kind"):
        problems.append(f"search.group_by={search.group_by!r}: {nearest(search.group_by, ('layer', 'kind'))}")
    for name in ("sensitivity_samples", "sensitivity_tokens", "max_candidates"):
        if getattr(search, name) <= 0:
            problems.append(f"search.{name}={getattr(search, name)} must be above 0")
    problems += [
        f"search.kv_cache_dtypes has {dtype!r}: {nearest(dtype, KV_DTYPES)}"
        for dtype in search.kv_cache_dtypes
        if dtype not in KV_DTYPES
    ]
    try:
        if not 0.0 < parse_share(search.final_share, "search.final_share") < 1.0:
            problems.append(f"search.final_share={search.final_share} must be above 0 % and below 100 %")
    except ConfigError as error:
        problems.extend(error.problems)
    return problems


def _check_executor(executor: ExecutorConfig) -> list[str]:
    problems = []
    if executor.name not in ("local", "ray"):
        problems.append(f"executor.name={executor.name!r}: {nearest(executor.name, ('local', 'ray'))}")
    if executor.records not in ("returned", "shared"):
        problems.append(f"executor.records={executor.records!r}: {nearest(executor.records, ('returned', 'shared'))}")
    if executor.workers is not None and executor.workers < 1:
        problems.append(
            f"executor.workers={executor.workers} must be 1 or more, or null for as many as the devices hold"
        )
    if executor.retries < 0:
        problems.append(f"executor.retries={executor.retries} must be 0 or more")
    return problems


def _check_kv(kv: KvConfig) -> list[str]:
    problems = []
    if kv.selfcheck not in ("auto", "always"):
        problems.append(f"kv.selfcheck={kv.selfcheck!r}: {nearest(kv.selfcheck, ('auto', 'always'))}")
    counts: tuple[str, ...] = (
        "decode_documents",
        "decode_segments",
        "decode_tokens",
        "decode_step_tokens",
        "long_documents",
        "long_tokens",
    )
    counts += ("needle_repeats", "generation_prompts", "generation_prompt_tokens", "generation_tokens")
    for name in counts:
        value = getattr(kv, name)
        if value is not None and value < 1:
            problems.append(f"kv.{name}={value} must be 1 or more")
    if not 0 <= kv.topk <= 1000:
        problems.append(f"kv.topk={kv.topk} must be between 0 and 1000")
    if any(length < 128 for length in kv.needle_lengths):
        problems.append(
            f"kv.needle_lengths={list(kv.needle_lengths)} must be 128 tokens or more, room for needle and question"
        )
    if any(not 0 <= depth <= 100 for depth in kv.needle_depths):
        problems.append(f"kv.needle_depths={list(kv.needle_depths)} must lie between 0 and 100 percent")
    return problems


LOAD_KINDS = ("offline", "ladder", "rate", "trace")
LOAD_STARTS = ("scoring", "serving")
SLO_KEYS = ("ttft_seconds", "tpot_seconds", "latency_seconds")


def _check_load(load: LoadConfig) -> list[str]:
    """A load that is switched off is not looked at."""
    if not load.enabled:
        return []
    problems = []
    for name, given, allowed in (("kind", load.kind, LOAD_KINDS), ("start", load.start, LOAD_STARTS)):
        if given not in allowed:
            problems.append(f"load.{name}={given!r}: {nearest(given, allowed)}")
    problems += [f"load.slo.{key} is no figure; {nearest(key, SLO_KEYS)}" for key in load.slo if key not in SLO_KEYS]
    if load.start == "scoring" and load.kind != "offline":
        problems.append(f"load.kind={load.kind} has arrival times, which only load.start=serving can keep; choose that")
    if load.start == "scoring" and (load.rounds > 1 or load.cold_start):
        problems.append("load.rounds and load.cold_start start the engine again, as only load.start=serving can")
    if load.start == "scoring" and load.peak_requests:
        problems.append("load.peak_requests is a level of load.start=serving; use load.requests")
    if load.kind in ("ladder", "rate"):
        key = "concurrencies" if load.kind == "ladder" else "rates"
        values: list[float] = list(load.concurrencies if load.kind == "ladder" else load.rates)
        if not values or not all(math.isfinite(value) and value > 0 for value in values):
            problems.append(f"load.{key}={values} must be a list of numbers above 0, e.g. [1, 10, 100]")
        if len(set(values)) != len(values):
            problems.append(f"load.{key}={values} names a level twice")
    if load.kind == "trace" and not load.trace:
        problems.append("load.kind=trace needs load.trace=FILE.csv with TIMESTAMP,ContextTokens,GeneratedTokens")
    if min(load.warmup_requests, load.waves, load.peak_requests) < 0:
        problems.append("load.warmup_requests, load.waves and load.peak_requests must be 0 or more")
    return problems


def check_gate(gate: GateConfig) -> list[str]:
    """Every problem of a gate policy, in words; used for the composed config and for a policy file."""
    problems: list[str] = []
    shares = {}
    for name in ("target", "limit", "suspect_improvement"):
        try:
            shares[name] = parse_share(getattr(gate, name), f"gate.{name}")
        except ConfigError as error:
            problems.extend(error.problems)
    if "target" in shares and "limit" in shares and shares["target"] > shares["limit"]:
        problems.append(f"gate.target={gate.target} is above gate.limit={gate.limit}; the target is the stricter one")
    if not 0.5 < gate.confidence <= MOST_CONFIDENT:
        problems.append(f"gate.confidence={gate.confidence} must be above 0.5 and {MOST_CONFIDENT} at most, e.g. 0.95")
    if gate.min_documents < 2:
        problems.append(f"gate.min_documents={gate.min_documents} must be 2 or more; one document has no interval")
    if any(look < 2 for look in gate.looks) or sorted(set(gate.looks)) != list(gate.looks):
        problems.append(f"gate.looks={list(gate.looks)} must be rising document counts of 2 or more, e.g. [20, 40, 62]")
    if gate.extend and not gate.looks:
        problems.append(
            "gate.extend=true measures on at the looks of gate.looks, and there are none; e.g. [20, 40, 62]"
        )
    for task, margin in gate.task_margins.items():
        try:
            parse_share(margin, f"gate.task_margins.{task}")
        except ConfigError as error:
            problems.extend(error.problems)
    return problems
