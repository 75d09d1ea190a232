"""Upper bounds of speed from the device's peaks, which no program reaches.

prefill  tokens/s = GPUs / sum over layers of (2 x parameters used / arithmetic rate of the scheme) + attention
decode   tokens/s = requests / max(bytes read per step / bandwidth, operations per step / rate), over all GPUs
Sources: Williams et al. 2009 (roofline model); Pope et al. 2022, "Efficiently scaling transformer inference" (bytes per
decoding step).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evalq.config import QuantConfig
from evalq.facts.gpus import GpuFacts
from evalq.facts.models import ModelFacts
from evalq.facts.modules import Module
from evalq.facts.schemes import LayerScheme, assign, stored_tensors
from evalq.plan.memory import kv_bytes_for_context
from evalq.plan.settings import Settings

READ_PARTS = ("attention", "indexer", "mlp", "router", "head", "experts")


@dataclass(frozen=True)
class Roofline:
    """Upper bounds of one cell. Tokens per second, all GPUs together."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    decode_bound_by: str  # memory | arithmetic
    context: int
    concurrency: int


def arithmetic_rate(scheme: LayerScheme | None, gpu: GpuFacts) -> float:
    """Operations per second of a layer's products: those of 16 bit where only its weights are smaller."""
    assert gpu.bf16_per_second is not None  # the CPU has no roofline here
    if scheme is None or scheme.activation_bits == 16:
        return gpu.bf16_per_second
    rate = gpu.fp8_per_second if scheme.is_float else gpu.int8_per_second
    return rate or gpu.bf16_per_second


def share_of_experts(facts: ModelFacts, tokens: int) -> float:
    """Expected share of a layer's experts that `tokens` tokens touch, each choosing evenly."""
    if not facts.num_experts:
        return 1.0
    return 1.0 - (1.0 - facts.experts_per_token / facts.num_experts) ** tokens


def seconds_per_token(facts: ModelFacts, quant: QuantConfig, gpu: GpuFacts, context: int) -> float:
    """Arithmetic seconds of one token on one GPU at its peak, attention over `context` earlier tokens included."""
    total = 0.0
    for module, scheme in assign(facts, quant):
        if module.part in READ_PARTS and module.kind != "Norm":
            total += 2.0 * _used(module, facts) / arithmetic_rate(scheme, gpu)
    if facts.tied:
        total += 2.0 * facts.vocab_size * facts.hidden_size / arithmetic_rate(None, gpu)
    return total + _attention_operations(facts, context) / arithmetic_rate(None, gpu)


def _used(module: Module, facts: ModelFacts) -> float:
    share = facts.experts_per_token / facts.num_experts if module.part == "experts" else 1.0
    return module.parameters * share


def _attention_operations(facts: ModelFacts, context: int) -> float:
    """Scores and weighted sum: 2 x 2 x heads x head size for each earlier token that a layer looks at."""
    reach = sum(min(context, window or context) for window in facts.windows)
    return 4.0 * facts.num_heads * facts.head_dim * reach


def step_bytes(facts: ModelFacts, quant: QuantConfig, settings: Settings, context: int, concurrency: int) -> int:
    """Bytes that one decoding step reads, all GPUs: the weights once, each request's KV once."""
    touched = share_of_experts(facts, concurrency)
    weights = 0.0
    for module, scheme in assign(facts, quant):
        if module.part in READ_PARTS:
            stored = stored_tensors(module.shape, module.bias, scheme, settings.dtype, "engine")
            share = touched if module.part == "experts" else 1.0
            weights += share * module.copies * sum(tensor.nbytes for tensor in stored)
    if facts.tied:
        weights += facts.vocab_size * facts.hidden_size * 2
    return math.ceil(weights) + concurrency * kv_bytes_for_context(facts, settings.kv_cache_dtype, context)


def roofline(
    facts: ModelFacts, quant: QuantConfig, gpu: GpuFacts, settings: Settings, context: int, concurrency: int
) -> Roofline | None:
    """Upper bounds at `concurrency` requests of `context` tokens; None for a device without published peaks."""
    if gpu.bandwidth_bytes_per_second is None or gpu.bf16_per_second is None:
        return None
    gpus = settings.gpus
    prefill = gpus / seconds_per_token(facts, quant, gpu, context // 2)
    reading = step_bytes(facts, quant, settings, context, concurrency) / (gpu.bandwidth_bytes_per_second * gpus)
    computing = concurrency * seconds_per_token(facts, quant, gpu, context) / gpus
    bound = "memory" if reading >= computing else "arithmetic"
    return Roofline(prefill, concurrency / max(reading, computing), bound, context, concurrency)
