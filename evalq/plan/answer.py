"""The planner's answer for one cell: what fits, on how many GPUs, how much at once, what is refused and why."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from evalq.config import RunConfig
from evalq.facts.gpus import GpuFacts
from evalq.facts.models import ModelFacts, facts_of
from evalq.plan.feasibility import violations
from evalq.plan.memory import (
    DEFAULT_BLOCK_TOKENS,
    GpuMemory,
    cell_memory,
    checkpoint_bytes,
    kv_bytes_for_context,
    kv_bytes_per_token,
    pool_tokens,
    resolve_gpu,
    weight_bytes,
)
from evalq.plan.roofline import Roofline, roofline
from evalq.plan.settings import Settings, engine_settings, needs_of
from evalq.plan.violation import Violation

TP_CHOICES = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Ask:
    """What the user wants to serve."""

    context: int | None = None  # tokens of one request, prompt and answer
    concurrency: int | None = None  # requests at once
    explicit: frozenset[str] = frozenset()  # dotted keys that the user set


@dataclass(frozen=True)
class Answer:
    """Bytes and tokens of one cell; figures per GPU are in `memory`."""

    model: str
    quant: str
    gpu: str
    feasible: bool
    violations: list[Violation]
    facts: ModelFacts
    gpu_facts: GpuFacts
    settings: Settings
    config: RunConfig
    memory: GpuMemory
    gpus: int
    weight_bytes: int  # all GPUs
    checkpoint_bytes: int
    kv_bytes_per_token: int  # all GPUs
    kv_pool_tokens: int
    context: int
    concurrency: int | None
    kv_bytes_per_request: int  # at `context`, all GPUs
    kv_bytes_asked: int | None  # for `concurrency` requests
    largest_context: int  # tokens, one request alone
    largest_concurrency: int  # requests of `context` tokens that the pool holds
    smallest_tp: int | None  # GPUs of one group that hold weights and the KV asked for; None = more than 64
    offload_tokens: int  # tokens that the host's offload pool holds
    roofline: Roofline | None


def plan(config: RunConfig, ask: Ask | None = None) -> Answer:
    """Plan one cell. Parallelism and GPU count that the user left open are chosen: the smallest that fits."""
    ask = ask or Ask()
    facts, gpu = facts_of(config.model), resolve_gpu(config)
    config = _with_context(config, ask, facts)
    smallest = smallest_tp(config, facts, gpu, ask)
    config = _with_parallelism(config, facts, gpu, ask, smallest)
    settings = engine_settings(config, facts, gpu)
    memory = cell_memory(config, facts, gpu, settings)
    found = violations(config, facts, gpu, settings)
    return _answer(config, ask, facts, gpu, settings, memory, found, smallest)


def _with_context(config: RunConfig, ask: Ask, facts: ModelFacts) -> RunConfig:
    if config.engine.max_model_len is not None or ask.context is None:
        return config
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, max_model_len=ask.context))


def _with_parallelism(config: RunConfig, facts: ModelFacts, gpu: GpuFacts, ask: Ask, smallest: int | None) -> RunConfig:
    engine = config.engine
    if "engine.tensor_parallel_size" not in ask.explicit and gpu.vendor != "cpu":
        tp = int(needs_of(config, gpu).get("tensor_parallel_size") or 1)
        if engine.pipeline_parallel_size == 1:
            tp = max(tp, smallest or _largest_valid_tp(facts))
        engine = dataclasses.replace(engine, tensor_parallel_size=tp)
    count = config.gpu.count
    if "gpu.count" not in ask.explicit:
        count = max(count, engine.tensor_parallel_size * engine.pipeline_parallel_size)
    return dataclasses.replace(config, engine=engine, gpu=dataclasses.replace(config.gpu, count=count))


def _largest_valid_tp(facts: ModelFacts) -> int:
    """The size to show when none fits: one machine's eight GPUs, or what divides the heads below that."""
    return max(tp for tp in TP_CHOICES if tp <= 8 and facts.num_heads % tp == 0)


def smallest_tp(config: RunConfig, facts: ModelFacts, gpu: GpuFacts, ask: Ask) -> int | None:
    """The smallest tensor-parallel size whose GPUs hold the weights and the KV asked for."""
    if gpu.memory_bytes is None:
        return 1
    context = ask.context or engine_settings(config, facts, gpu).max_model_len
    for tp in TP_CHOICES:
        if facts.num_heads % tp:
            continue
        settings = dataclasses.replace(engine_settings(config, facts, gpu), tensor_parallel_size=tp)
        memory = cell_memory(config, facts, gpu, settings)
        if requests_that_fit(facts, memory, settings, context) >= (ask.concurrency or 1):
            return tp
    return None


def requests_that_fit(facts: ModelFacts, memory: GpuMemory, settings: Settings, context: int) -> int:
    """Requests of `context` tokens that the pool of the fullest GPU holds, in whole blocks."""
    if memory.kv_pool <= 0:
        return 0
    return memory.kv_pool // max(1, _request_bytes(facts, memory, settings, context))


def _request_bytes(facts: ModelFacts, memory: GpuMemory, settings: Settings, context: int) -> int:
    block = settings.block_size or DEFAULT_BLOCK_TOKENS
    rounded = -(-context // block) * block
    tp, step = settings.tensor_parallel_size, settings.max_num_batched_tokens
    whole = kv_bytes_for_context(facts, settings.kv_cache_dtype, rounded, tp, step)
    one = kv_bytes_for_context(facts, settings.kv_cache_dtype, 1, tp)
    return whole * memory.kv_per_token // max(1, one)


def largest_context(facts: ModelFacts, memory: GpuMemory, settings: Settings) -> int:
    """Longest single request in tokens: what the pool holds, and what the model has positions for."""
    low, high = 0, facts.max_positions or 1 << 24
    while low < high:
        middle = (low + high + 1) // 2
        if requests_that_fit(facts, memory, settings, middle) >= 1:
            low = middle
        else:
            high = middle - 1
    return low


def _answer(
    config: RunConfig,
    ask: Ask,
    facts: ModelFacts,
    gpu: GpuFacts,
    settings: Settings,
    memory: GpuMemory,
    found: list[Violation],
    smallest: int | None,
) -> Answer:
    tp, pp = settings.tensor_parallel_size, settings.pipeline_parallel_size
    context = ask.context or min(DEFAULT_CONTEXT, settings.max_model_len)
    per_token = kv_bytes_per_token(facts, settings.kv_cache_dtype, tp)
    step = settings.max_num_batched_tokens
    per_request = tp * kv_bytes_for_context(facts, settings.kv_cache_dtype, context, tp, step)
    fitting = requests_that_fit(facts, memory, settings, context)
    served = min(ask.concurrency or settings.max_num_seqs, max(1, fitting))
    return Answer(
        model=config.model.name,
        quant=config.quant.name,
        gpu=gpu.name,
        feasible=all(violation.severity != "error" for violation in found),
        violations=found,
        facts=facts,
        gpu_facts=gpu,
        settings=settings,
        config=config,
        memory=memory,
        gpus=settings.gpus,
        weight_bytes=weight_bytes(facts, config.quant, settings.dtype, tp, pp, settings.expert_parallel),
        checkpoint_bytes=checkpoint_bytes(facts, config.quant, settings.dtype),
        kv_bytes_per_token=per_token,
        kv_pool_tokens=pool_tokens(facts, memory, settings),
        context=context,
        concurrency=ask.concurrency,
        kv_bytes_per_request=per_request,
        kv_bytes_asked=per_request * ask.concurrency if ask.concurrency else None,
        largest_context=largest_context(facts, memory, settings),
        largest_concurrency=fitting,
        smallest_tp=smallest,
        offload_tokens=int(settings.offload_gib * 1024**3) // per_token,
        roofline=roofline(facts, config.quant, gpu, settings, context, served),
    )
