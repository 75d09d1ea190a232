"""Schemas of the configuration: one flat dataclass per group of conf/, checked before anything starts.

Loading a config does no input or output. `check` lists every problem at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from evalq.errors import ConfigError

ORIGINS = ("checkpoint", "engine", "evalq")
KV_DTYPES = (
    "bfloat16",
    "float16",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_ds_mla",
    "int8_per_token_head",
    "fp8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
)
KV_SCALE_SOURCES = ("none", "default 1.0", "checkpoint", "computed", "dynamic")
WEIGHT_BITS = (2, 3, 4, 8)
STRATEGIES = ("tensor", "channel", "group", "token", "block")
METHODS = ("rtn", "gptq", "awq", "smoothquant", "autoround")
CALIBRATION_SOURCES = ("embedded", "local", "hub")
OBJECTIVES = ("memory", "throughput")


@dataclass
class ModelConfig:
    """A model: where its weights are, how its windows start, what its architecture is (Hugging Face config.json words)."""

    name: str = "???"
    source: str = "hub"  # hub | package (weights that an installed Python package carries) | path
    hub_id: str | None = None
    revision: str | None = None  # commit or tag of the hub; text, also when it looks like a number
    package: str | None = None  # Python package that carries a GGUF file, for source=package
    path: str | None = None  # a checkpoint folder of your own; wins over `source`
    bos: str = "???"  # always | never: whether a scoring window starts with exactly one BOS token
    dtype: str = "bfloat16"
    trust_remote_code: bool = False
    max_perplexity: float = 200.0  # word perplexity above this stops the run: wrong BOS, tokenizer or weights
    arch: dict[str, Any] = field(default_factory=dict)  # the keys of config.json that the planner reads
    engine_needs: dict[str, Any] = field(default_factory=dict)  # engine arguments this model needs everywhere
    rocm_needs: dict[str, Any] = field(default_factory=dict)  # engine arguments and env_ variables on AMD GPUs
    notes: list[str] = field(default_factory=list)


@dataclass
class QuantArgs:
    """compressed-tensors' QuantizationArgs, the part evalq uses."""

    num_bits: int = 8
    type: str = "int"  # int | float
    strategy: str = "channel"  # one of STRATEGIES
    group_size: int | None = None
    symmetric: bool = True
    dynamic: bool = False


@dataclass
class QuantGroup:
    """compressed-tensors' QuantizationScheme: which layers, which weights, which activations (null = 16 bit)."""

    targets: list[str] = field(default_factory=list)
    weights: QuantArgs | None = None
    input_activations: QuantArgs | None = None


@dataclass
class QuantConfig:
    """A scheme. `kv_cache_dtype` is always explicit; "auto" never reaches the engine."""

    name: str = "???"
    origin: str = "checkpoint"  # checkpoint (as it is) | engine (online) | evalq (made by evalq)
    engine_quantization: str | None = None  # vLLM's --quantization, for origin=engine
    kv_cache_dtype: str = "???"
    kv_scale_source: str = "none"  # what the scheme claims: none | default 1.0 | checkpoint | computed
    groups: dict[str, QuantGroup] = field(default_factory=dict)
    ignore: list[str] = field(default_factory=list)  # modules that stay 16 bit (names or re:patterns)
    method: str = "rtn"  # one of METHODS: rtn = to nearest, with a clipping search; the others need calibration text
    clip_search: bool = True  # per-group search of the clipping range that minimises squared error
    needs: list[str] = field(default_factory=list)  # hardware capabilities, by the names of evalq.facts.gpus
    notes: list[str] = field(default_factory=list)


@dataclass
class GpuConfig:
    """Where it runs. name=auto takes what is there; facts about each name are in evalq.facts.gpus."""

    name: str = "auto"
    count: int = 1
    memory_utilization: float = 0.9  # share of device memory the engine may take (GPU)
    cpu_kv_cache_gib: int = 2  # KV pool on the CPU engine, whole GiB
    cpu_threads: str | None = None  # cores the CPU engine is bound to, e.g. "0-1"; null = all that this process may use


@dataclass
class EngineConfig:
    """Arguments of vLLM. Scheduler limits are always explicit, so that they are equal in all cells."""

    name: str = "default"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int | None = None  # tokens; null = the largest window the tasks need, and a little more
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    portion_tokens: int = (
        1_048_576  # scored together, then kept on disk: a killed run goes on behind them, with equal batches
    )
    block_size: int | None = None  # tokens; null = the engine's own default for the device
    enforce_eager: bool = False
    attention_backend: str | None = None
    enable_prefix_caching: bool = True  # read only where tasks.share_prefixes allows it
    enable_chunked_prefill: bool = True
    load_format: str = "auto"  # auto | dummy (random weights: memory and speed only, never quality)
    seed: int = 0
    start_timeout_seconds: float = 1800.0
    stall_timeout_seconds: float = 1200.0  # no sign of progress for this long ends the cell
    extra: dict[str, Any] = field(default_factory=dict)  # further vLLM arguments, passed as they are
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class DataConfig:
    """Where evaluation data comes from: embedded | local | hub. Never swapped in silence."""

    name: str = "embedded"
    root: str | None = None  # folder for `local`; null = $EVALQ_DATA
    revisions: dict[str, str] = field(default_factory=dict)  # pinned hub revisions by dataset id
    perplexity_file: str | None = None  # JSON lines with `page`, in place of the set's own perplexity documents


@dataclass
class TasksConfig:
    """What is scored. A limit of null means all items; windows are constants of the task, in tokens."""

    name: str = "default"
    perplexity: bool = True
    perplexity_window: int = 2048  # tokens: 1 of context + 2047 scored
    perplexity_limit: int | None = None  # documents
    perplexity_from: int = 0  # documents at the beginning that are left out: those that a search has seen
    hellaswag: bool = True
    hellaswag_limit: int | None = None  # items
    truthfulqa: bool = True
    truthfulqa_limit: int | None = None  # items
    extra: list[str] = field(default_factory=list)  # any lm-eval tasks
    extra_limit: int | None = None
    choice_window: int = 2048  # tokens
    topk: int = 0  # log-probabilities kept per scored token for fidelity; 0 = target and top-1 only
    keep_tokens: bool = True  # per-token log-probabilities of the perplexity documents
    keep_texts: bool = True  # questions, answers and token texts, so that `evalq inspect` can show what changed
    request_order: str = (
        "forward"  # forward | reverse: order in which sequences are fed; must not matter (the A/A floor)
    )
    share_prefixes: bool = True  # choice tasks: compute a common context once; never for a quantised KV cache
    scorer: str = "hook"  # hook (inside the engine) | prompt_logprobs (the engine's public interface)
    divergence: str = (
        "none"  # none | exact: KL divergence from the baseline over the whole vocabulary (perplexity documents)
    )
    divergence_store_gib: float = (
        1.0  # GiB on disk for the baseline's hidden states; what does not fit is sampled evenly
    )


@dataclass
class KvConfig:
    """The KV cache judged where it is read. All but `selfcheck` is off by default: it costs time in every cell."""

    name: str = "off"
    selfcheck: str = "auto"  # auto (schemes with a quantised KV cache, once per engine) | always (asked anew)
    decode: bool = False  # teacher-forced score of tokens computed few per step
    decode_documents: int = 24
    decode_segments: int = 3  # stretches per document, spread over its window
    decode_tokens: int = 32  # per stretch
    decode_step_tokens: int = 1  # tokens of a document per engine step
    long: bool = False  # perplexity and divergence by position, up to long_tokens
    long_tokens: int | None = None  # null = the engine's length
    long_documents: int = 4
    needle: bool = False  # retrieval of a hidden number: depth x length
    needle_lengths: list[int] = field(default_factory=lambda: [512, 1024, 2000])  # tokens
    needle_depths: list[int] = field(default_factory=lambda: [0, 25, 50, 75, 100])  # percent
    needle_repeats: int = 4  # per cell of the grid
    generation: bool = False  # greedy continuations
    generation_prompts: int = 24
    generation_prompt_tokens: int = 64
    generation_tokens: int = 64
    topk: int = 16  # log-probabilities kept per token, for divergence
    seed: int = 0

    @property
    def measures(self) -> bool:
        """Whether anything is measured that both sides of a comparison need."""
        return self.decode or self.long or self.needle or self.generation


@dataclass
class HealthConfig:
    """Limits that the device's sensors are held against in the measured windows; shares of 1 (the source articles')."""

    interval_seconds: float = 0.5  # between two samples
    memory_swing_target: float = 0.05  # memory in use: (highest - lowest) / mean; above it a warning
    memory_swing_limit: float = 0.15  # above it bad
    compute_busy: float = 0.70  # of the time; below it bad
    bandwidth_busy: float = 0.60  # of the memory's bandwidth; below it bad
    gpu_difference: float = 0.10  # between the busiest and the idlest GPU; above it bad
    transfer_busy: float = 0.80  # of the host link under KV offload; below it, the link is not what limits


@dataclass
class LoadConfig:
    """What the engine is loaded with: fixed lengths, levels of concurrency or rate, or a trace; warm-up outside the window."""

    name: str = "smoke"
    enabled: bool = True
    kind: str = "offline"  # offline (all at once) | ladder (closed loop) | rate (open loop, Poisson) | trace
    start: str = "scoring"  # scoring (the engine start of the quality figures) | serving (vllm serve, over HTTP)
    requests: int = 16  # of each level, at least
    waves: int = 0  # ladder: a level has at least this many requests per slot of its concurrency
    input_tokens: int = 64
    output_tokens: int = 32
    repeats: int = 3
    warmup_requests: int = 4
    concurrencies: list[int] = field(default_factory=list)  # ladder: requests under way at a time, one level each
    peak_requests: int = 0  # serving start: one more level with this many requests all at once; 0 = none
    rates: list[float] = field(default_factory=list)  # rate: requests per second, one level each
    trace: str | None = None  # CSV of TIMESTAMP,ContextTokens,GeneratedTokens; relative to data.root or $EVALQ_DATA
    trace_speed: float = 1.0  # the trace's seconds are divided by this
    trace_length_scale: float = 1.0  # the trace's token counts are multiplied by this (at least 1 token)
    slo: dict[str, float] = field(
        default_factory=dict
    )  # ttft_seconds, tpot_seconds, latency_seconds: what counts as good
    rounds: int = 1  # a sweep measures its cells this many times, every other time in reverse (A B B A)
    cold_start: bool = False  # serving start: start twice from empty compile caches, for start-up seconds cold and warm
    allow_shared: bool = (
        False  # true: other programs on the GPU are no reason to refuse; the figures may then mean nothing
    )
    health: HealthConfig = field(default_factory=HealthConfig)


@dataclass
class GateConfig:
    """The release policy. Shares are text: a fraction ("0.01") or a percent ("1.0%"); a bare 1.5 is refused."""

    name: str = "default"
    metric: str = "word_perplexity"
    target: str = "1.0%"  # increase over the baseline that passes
    limit: str = "1.5%"  # increase never exceeded
    confidence: float = 0.95
    strict: bool = False  # true: PASS with a warning becomes FAIL
    suspect_improvement: str = "2.0%"  # better than the baseline by more than this and than noise = SUSPECT
    min_documents: int = 20  # below it the interval does not hold its error rate under skewed damage
    required_tasks: list[str] = field(
        default_factory=lambda: ["wikitext", "hellaswag", "truthfulqa_mc1", "truthfulqa_mc2"]
    )
    task_margins: dict[str, str] = field(default_factory=dict)  # task -> accuracy margin that the report compares with
    required_margins: list[str] = field(default_factory=list)  # tasks whose margin gates rather than advises
    conditions: list[str] = field(default_factory=list)  # e.g. "weight_bytes <= 70%"
    aa_floor: bool = False  # require an A/A record
    allow: list[str] = field(default_factory=list)  # fingerprint fields that may differ; each is named in the verdict
    looks: list[int] = field(default_factory=list)  # documents after which the gate may stop early; empty = one look
    extend: bool = False  # true: an INCONCLUSIVE cell is measured on more documents, up to the last of `looks`


@dataclass
class CalibrationConfig:
    """Text that calibrated methods read: where it is from, how much of it, what it is about."""

    name: str = "embedded"
    source: str = "embedded"  # one of CALIBRATION_SOURCES
    domain: str = "short passages of general knowledge"  # what the text is about, in words; part of the record
    file: str | None = (
        "calibration.jsonl"  # JSON lines (plain or .gz): relative to evalq's own data (embedded) or to data.root (local)
    )
    hub_id: str | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    revision: str | None = None
    columns: list[str] = field(default_factory=lambda: ["text"])  # joined by a blank line
    samples: int = 32  # windows
    length_tokens: int = 512  # of each window
    batch_size: int = 4  # windows at once: memory and speed only
    seed: int = 0  # order of the texts, and the method's own chance
    options: dict[str, Any] = field(default_factory=dict)  # of the method's modifier in llm-compressor, as they are


@dataclass
class SearchConfig:
    """What `evalq search` looks for and how much of the evaluation data it may use for that."""

    objective: str = "memory"  # one of OBJECTIVES
    method: str = "rtn"  # how candidates are rounded, one of METHODS
    options: list[str] = field(
        default_factory=lambda: ["fp8", "int8", "int4_g32", "int4_g64", "int4_g128"]
    )  # beside 16 bit
    group_by: str = "layer"  # layer: each layer's fused groups apart | kind: all layers' alike
    kv_cache_dtypes: list[str] = field(default_factory=list)  # tried beside the model's own, e.g. [fp8_e4m3]
    sensitivity_samples: int = 4  # windows of calibration text
    sensitivity_tokens: int = 256  # of each window
    final_share: str = "50%"  # of the perplexity documents, kept for the final verdict and never looked at before
    looks: list[int] = field(
        default_factory=list
    )  # document counts of the search's own gate; empty = thirds of its part
    max_candidates: int = 6  # checkpoints measured at most
    uniform: bool = True  # also prove the schemes that give every layer one option


@dataclass
class TrackingConfig:
    """MLflow. A sink: nothing measured waits for it."""

    enabled: bool = True
    uri: str | None = None  # null = sqlite file under paths.root
    experiment: str | None = None  # null = "<model> on <gpu>"
    study: str | None = None  # name of the parent run; null = made from the cells
    timeout_seconds: float = 10.0
    finish_limit_seconds: float = 60.0  # longest that the end of a study waits for uploads; `evalq sync` does the rest


@dataclass
class ExecutorConfig:
    """Where the cells of a sweep run. A single cell runs here and now, whatever this says, unless name=ray."""

    name: str = "local"  # local (processes on this machine) | ray (tasks on a Ray cluster)
    workers: int | None = None  # cells at once; null = as many as the devices hold
    resume: bool = True  # what an earlier start of the same sweep finished is not measured again
    retries: int = 0  # further tries of a cell whose process or machine was lost; a cell that failed by itself is never tried again
    address: str | None = (
        None  # Ray cluster: auto, host:port or ray://host:port; null = $RAY_ADDRESS, else one started here
    )
    records: str = (
        "returned"  # ray: returned (through the object store) | shared (paths.root is one folder on all machines)
    )
    resource: str | None = None  # ray: resource that a machine declares one of per device; null = evalq_<gpu>


@dataclass
class PathsConfig:
    """Where things go. Relative paths are relative to `root`, from wherever evalq is called."""

    root: str = "???"
    records: str = "records"
    checkpoints: str = "checkpoints"
    models: str = "models"
    mlflow_db: str = "mlflow.db"


@dataclass
class RunConfig:
    """One cell, composed."""

    model: ModelConfig = field(default_factory=ModelConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    reuse_baseline: bool = True
    aa: bool = False  # measure the baseline once more, in another order and in other batches: the A/A floor
    progress: bool = True


GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "quant": QuantConfig,
    "gpu": GpuConfig,
    "engine": EngineConfig,
    "data": DataConfig,
    "tasks": TasksConfig,
    "kv": KvConfig,
    "load": LoadConfig,
    "calibration": CalibrationConfig,
    "search": SearchConfig,
    "gate": GateConfig,
    "tracking": TrackingConfig,
    "executor": ExecutorConfig,
    "paths": PathsConfig,
}


def nearest(given: str, allowed: list[str] | tuple[str, ...]) -> str:
    """A sentence part that lists what is allowed and, when something is close, what was probably meant."""
    close = difflib.get_close_matches(given, allowed, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}allowed: {', '.join(sorted(allowed))}"


def parse_share(text: str | float, name: str) -> float:
    """A share as a fraction: "1.5%" -> 0.015, "0.015" -> 0.015.

    Errors: ConfigError for text that is no number, NaN, infinite, negative, or 1 and more without a percent sign
    (1.5 could mean 1.5 % or 150 %).
    """
    given = str(text).strip()
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*(%?)", given)
    if not match:
        raise ConfigError(
            f'{name}={given!r} is not a share; write a percent such as "1.5%" or a fraction such as 0.015'
        )
    value = float(match[1]) / (100.0 if match[2] else 1.0)
    if not math.isfinite(value) or (not match[2] and value >= 1.0):
        raise ConfigError(f'{name}={given!r} is ambiguous; write "{given}%" for a percent or a fraction below 1')
    return value


def needs_calibration(quant: QuantConfig) -> bool:
    """Whether the checkpoint of a scheme is made from calibration text, by llm-compressor."""
    static = any(group.input_activations and not group.input_activations.dynamic for group in quant.groups.values())
    return quant.origin == "evalq" and (quant.method != "rtn" or static)


def measured_part(config: RunConfig) -> dict[str, Any]:
    """The config without what changes no measurement; calibration only where the scheme reads calibration text."""
    data = dataclasses.asdict(config)
    silent = ["paths", "tracking", "gate", "executor", "search", "progress", "reuse_baseline", "aa"]
    if not needs_calibration(config.quant):
        silent.append("calibration")
    for key in silent:
        data.pop(key)
    if config.data.perplexity_file is None:
        data["data"].pop("perplexity_file")
    if not config.tasks.perplexity_from:
        data["tasks"].pop("perplexity_from")
    data["tasks"].pop("keep_texts")  # decides what people can read afterwards, nothing that is measured
    if not config.kv.measures and config.kv.selfcheck == "auto":
        data.pop("kv")  # switched off it is as if it were not there: older records stay what they are
    return data


def config_hash(config: RunConfig) -> str:
    """sha256 of the effective config of the cell: what changes no measurement (paths, tracking, gate, executor) is left out."""
    data = measured_part(config)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


FOLDER_NAME = re.compile(r"\w[\w.+ -]{0,79}")


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
    if not 0.5 < gate.confidence < 1.0:
        problems.append(f"gate.confidence={gate.confidence} must be above 0.5 and below 1, e.g. 0.95")
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
