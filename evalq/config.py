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
    max_candidates: int = 6  # mixed checkpoints measured at most, beside the uniform schemes
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
