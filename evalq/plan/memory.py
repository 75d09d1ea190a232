"""Memory of one cell, item by item, in bytes: pure functions of model facts, scheme and settings.

weights        sum of what each layer stores (evalq.facts.schemes), split over GPUs as vLLM splits it
KV per token   grouped-query attention: 2 x layers x KV heads on this GPU x head size x bytes per value
               latent attention: layers x (latent + rotary part) x bytes, whole on every GPU
KV pool        memory x utilisation - weights - activations - margins
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from evalq.config import QuantConfig, RunConfig
from evalq.facts.gpus import GIB, GpuFacts, detect, gpu_facts
from evalq.facts.models import DTYPE_BYTES, ModelFacts, facts_of
from evalq.facts.modules import Module
from evalq.facts.schemes import LayerScheme, SchemeKey, Tensor, assign, scheme_key, stored_tensors
from evalq.plan.settings import Settings, engine_settings

VOCAB_PADDING = 64  # vLLM pads the vocabulary to a multiple of this before it is split
KV_VALUE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_ds_mla": 1,
    "int8_per_token_head": 1,
    "fp8_per_token_head": 1,
    "int4_per_token_head": 0.5,
    "nvfp4": 0.5,
}
SCALE_BYTES = 4  # float32
NVFP4_GROUP = 16  # nvfp4 keeps one FP8 scale per 16 values
LATENT_SCALE_GROUP = 128  # fp8_ds_mla and the indexer keep one float32 scale per 128 values
DEFAULT_BLOCK_TOKENS = 16

# Margins, stated rather than computed. Source: one H200, Llama-3-8B shapes, vLLM at utilisation 0.5: of 69.9 GiB,
# 2.0 GiB were neither weights nor KV pool, of which the activations of a step of 16,384 tokens (the engine's default
# there) are 1.6 GiB by the formula below. Two H200 with Llama-3-70B shapes (TP 2, eager, vLLM 0.26) report 0.07 GiB per
# GPU outside of torch's allocator.
CONTEXT_BYTES = round(0.35 * GIB)  # CUDA or HIP context and libraries, per GPU
COMMUNICATION_BYTES = round(0.07 * GIB)  # NCCL or RCCL buffers and all-reduce workspaces, per GPU of several
GRAPH_BYTES = round(0.3 * GIB)  # captured graphs, per GPU; none when enforce_eager
HEADER_ENTRY_BYTES = 52  # safetensors' JSON for one tensor beside its name, shape and offsets


@dataclass(frozen=True)
class GpuMemory:
    """One GPU's memory in bytes: the fullest GPU of the cell. None where the device has no memory of its own (CPU)."""

    total: int | None
    budget: int | None  # total x utilisation
    weights: int
    absorbed: int  # 16-bit copies of MLA's up-projections that the engine keeps for decoding
    activations: int
    logits: int
    communication: int
    graphs: int
    context: int
    kv_pool: int  # what is left; negative when the weights do not fit
    kv_per_token: int  # on this GPU

    @property
    def fixed(self) -> int:
        return self.weights + self.absorbed + self.working + self.communication + self.graphs + self.context

    @property
    def working(self) -> int:
        """The step's peak: the widest layer and the sampler do not happen at the same time."""
        return max(self.activations, self.logits)


def padded_vocab(vocab_size: int) -> int:
    return math.ceil(vocab_size / VOCAB_PADDING) * VOCAB_PADDING


def local_kv_heads(facts: ModelFacts, tp: int) -> int:
    """KV heads on one GPU: at least one, so they are replicated when there are more GPUs than heads."""
    return max(1, math.ceil(facts.num_kv_heads / tp))


def local_shape(module: Module, facts: ModelFacts, tp: int, ep: bool) -> tuple[tuple[int, ...], int, int]:
    """(shape, bias elements, copies per layer) of a module on one of `tp` GPUs."""
    shape, bias = module.shape, module.bias
    if module.part == "experts" and ep:
        return shape, bias, math.ceil(module.experts / tp)
    if module.split == "kv_rows":
        return (local_kv_heads(facts, tp) * facts.head_dim, *shape[1:]), math.ceil(bias / tp), module.experts
    if module.split == "vocab":
        return (math.ceil(padded_vocab(shape[0]) / tp), *shape[1:]), bias, module.experts
    if module.split == "rows":
        return (math.ceil(shape[0] / tp), *shape[1:]), math.ceil(bias / tp), module.experts
    if module.split == "columns":
        return (shape[0], math.ceil(shape[1] / tp)), bias, module.experts
    return shape, bias, module.experts


def stage_layers(num_layers: int, pp: int) -> tuple[range, ...]:
    """Layers of each pipeline stage, as vLLM divides them: a remainder goes to the stages before the last."""
    counts = [num_layers // pp] * pp
    for i in range(2, num_layers % pp + 2):
        counts[-i] += 1
    starts = [sum(counts[:i]) for i in range(pp)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def _nbytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@lru_cache(maxsize=4096)
def _module_bytes(
    shape: tuple[int, ...], bias: int, buffers: int, scheme: LayerScheme | None, dtype: str, stage: str
) -> int:
    return _nbytes(stored_tensors(shape, bias, scheme, dtype, stage)) + buffers * 4


def stage_weight_bytes(
    facts: ModelFacts, quant: QuantConfig, dtype: str = "bfloat16", tp: int = 1, pp: int = 1, ep: bool = False
) -> tuple[int, ...]:
    """Weight bytes on one GPU of each pipeline stage, as loaded by the engine."""
    return _stage_weight_bytes(scheme_key(facts, quant), dtype, tp, pp, ep)


@lru_cache(maxsize=4096)
def _stage_weight_bytes(key: SchemeKey, dtype: str, tp: int, pp: int, ep: bool) -> tuple[int, ...]:
    facts = key.facts
    stages = stage_layers(facts.num_layers, pp)
    totals = [0] * pp
    for module, scheme in assign(facts, key.quant):
        shape, bias, copies = local_shape(module, facts, tp, ep)
        each = copies * _module_bytes(shape, bias, module.buffers, scheme, dtype, "engine")
        if not module.layers or module.part == "vision":
            for place in _places(module, facts, pp):
                totals[place] += each * max(1, len(module.layers))
            continue
        for index, layers in enumerate(stages):
            here = len(module.layers) if pp == 1 else sum(1 for layer in module.layers if layer in layers)
            totals[index] += each * here
    return tuple(totals)


def _places(module: Module, facts: ModelFacts, pp: int) -> tuple[int, ...]:
    """Stages that hold a module outside the layers: embeddings and vision first, head and last norm last."""
    if module.part in ("head", "norms"):
        return (pp - 1,)
    if module.part == "embeddings" and facts.tied and pp > 1:
        return (0, pp - 1)
    return (0,)


def weight_bytes(
    facts: ModelFacts, quant: QuantConfig, dtype: str = "bfloat16", tp: int = 1, pp: int = 1, ep: bool = False
) -> int:
    """Weight bytes as loaded, all GPUs together: what is replicated under TP counts once per GPU."""
    return tp * sum(stage_weight_bytes(facts, quant, dtype, tp, pp, ep))


def tensor_bytes(facts: ModelFacts, quant: QuantConfig, dtype: str = "bfloat16") -> int:
    """Bytes of the checkpoint's tensors, exact, headers left out."""
    return sum(
        module.copies * _module_bytes(module.shape, module.bias, module.buffers, scheme, dtype, "checkpoint")
        for module, scheme in assign(facts, quant)
    )


def checkpoint_bytes(facts: ModelFacts, quant: QuantConfig, dtype: str = "bfloat16") -> int:
    """Bytes of the safetensors files: tensors and, to within a few bytes per tensor, their headers."""
    header = 8
    for module, scheme in assign(facts, quant):
        for tensor in stored_tensors(module.shape, module.bias, scheme, dtype, "checkpoint"):
            name = len(module.name.replace("{layer}", "00")) + 1 + len(tensor.suffix)
            header += module.copies * (
                name + HEADER_ENTRY_BYTES + sum(len(str(side)) + 1 for side in tensor.shape) + 10
            )
    return tensor_bytes(facts, quant, dtype) + header


def kv_bytes_per_layer(facts: ModelFacts, kv_cache_dtype: str, tp: int = 1) -> int:
    """KV bytes of one token in one layer on one GPU, with the scales that belong to the format."""
    value = KV_VALUE_BYTES[kv_cache_dtype]
    if facts.attention == "gqa":
        scale = SCALE_BYTES if kv_cache_dtype.endswith("_per_token_head") else 0
        scale += facts.head_dim // NVFP4_GROUP if kv_cache_dtype == "nvfp4" else 0
        return 2 * local_kv_heads(facts, tp) * (math.ceil(facts.head_dim * value) + scale)
    index = facts.index_dim + facts.index_dim // LATENT_SCALE_GROUP * SCALE_BYTES
    if kv_cache_dtype == "fp8_ds_mla":
        latent = facts.latent_dim - facts.rope_dim
        return latent + latent // LATENT_SCALE_GROUP * SCALE_BYTES + 2 * facts.rope_dim + index
    return math.ceil(facts.latent_dim * value) + index


def kv_bytes_per_token(facts: ModelFacts, kv_cache_dtype: str, tp: int = 1) -> int:
    """KV bytes of one token, all layers, all GPUs of a tensor-parallel group; sliding windows not yet taken off."""
    return tp * facts.num_layers * kv_bytes_per_layer(facts, kv_cache_dtype, tp)


def kv_bytes_for_context(
    facts: ModelFacts, kv_cache_dtype: str, context: int, tp: int = 1, step_tokens: int = 0, layers: range | None = None
) -> int:
    """KV bytes of one request of `context` tokens on one GPU; a layer with a window keeps that and one step."""
    each = kv_bytes_per_layer(facts, kv_cache_dtype, tp)
    windows = facts.windows if layers is None else facts.windows[layers.start : layers.stop]
    full = windows.count(None)
    if full == len(windows):
        return each * context * full
    return each * sum(context if w is None else min(context, w + step_tokens) for w in windows)


def activation_bytes(facts: ModelFacts, settings: Settings) -> int:
    """Peak of one step on one GPU: residual stream and the widest layer, for max_num_batched_tokens tokens."""
    tp, tokens = settings.tensor_parallel_size, settings.max_num_batched_tokens
    widest = [3 * math.ceil(facts.intermediate_size / tp)]
    heads = math.ceil(facts.num_heads / tp)
    widest.append((2 * heads + 2 * local_kv_heads(facts, tp)) * facts.head_dim)
    if facts.num_experts:
        width = facts.moe_intermediate_size or facts.intermediate_size
        local = width if settings.expert_parallel else math.ceil(width / tp)
        widest.append(facts.experts_per_token * (max(2 * local, facts.hidden_size) + local))
    return tokens * (2 * facts.hidden_size + max(widest)) * DTYPE_BYTES[settings.dtype]


def logits_bytes(facts: ModelFacts, settings: Settings) -> int:
    """The sampler's workspace: logits in the model's dtype and twice in float32, for max_num_seqs requests."""
    return settings.max_num_seqs * facts.vocab_size * (DTYPE_BYTES[settings.dtype] + 4 + 4)


def absorbed_bytes(facts: ModelFacts, settings: Settings, layers: int) -> int:
    """MLA decodes with its up-projection folded into queries and outputs; the engine keeps 16-bit copies for that."""
    if facts.attention == "gqa":
        return 0
    module = next(m for m in facts.modules if m.name.endswith("kv_b_proj"))
    return layers * math.ceil(module.shape[0] / settings.tensor_parallel_size) * module.shape[1] * 2


def gpu_memory(facts: ModelFacts, quant: QuantConfig, gpu: GpuFacts, settings: Settings) -> GpuMemory:
    """The fullest GPU of the cell: the pipeline stage with the least room for each token's KV."""
    tp, pp = settings.tensor_parallel_size, settings.pipeline_parallel_size
    weights = stage_weight_bytes(facts, quant, settings.dtype, tp, pp, settings.expert_parallel)
    stages = stage_layers(facts.num_layers, pp)
    rows = [_stage_memory(facts, gpu, settings, w, len(layers)) for w, layers in zip(weights, stages, strict=True)]
    return min(rows, key=lambda row: row.kv_pool / max(1, row.kv_per_token))


def _stage_memory(facts: ModelFacts, gpu: GpuFacts, settings: Settings, weights: int, layers: int) -> GpuMemory:
    on_gpu = gpu.memory_bytes is not None
    budget = round(gpu.memory_bytes * settings.memory_utilization) if gpu.memory_bytes is not None else None
    memory = GpuMemory(
        total=gpu.memory_bytes,
        budget=budget,
        weights=weights,
        absorbed=absorbed_bytes(facts, settings, layers),
        activations=activation_bytes(facts, settings),
        logits=logits_bytes(facts, settings),
        communication=COMMUNICATION_BYTES if on_gpu and settings.gpus > 1 else 0,
        graphs=GRAPH_BYTES if on_gpu and not settings.enforce_eager else 0,
        context=CONTEXT_BYTES if on_gpu else 0,
        kv_pool=0,
        kv_per_token=layers * kv_bytes_per_layer(facts, settings.kv_cache_dtype, settings.tensor_parallel_size),
    )
    return memory if budget is None else replace(memory, kv_pool=budget - memory.fixed)


def pool_tokens(facts: ModelFacts, memory: GpuMemory, settings: Settings) -> int:
    """Tokens the pool holds, in whole blocks. With sliding windows: at the engine's maximal length, as in vLLM."""
    if memory.kv_pool <= 0:
        return 0
    block = settings.block_size or DEFAULT_BLOCK_TOKENS
    if any(facts.windows):
        length, step = settings.max_model_len, settings.max_num_batched_tokens
        each = kv_bytes_for_context(facts, settings.kv_cache_dtype, length, settings.tensor_parallel_size, step)
        return memory.kv_pool * length // each
    return memory.kv_pool // (memory.kv_per_token * block) * block


def resolve_gpu(config: RunConfig) -> GpuFacts:
    """Facts of the configured device; name=auto looks at what is there (two seconds at most)."""
    return gpu_facts(detect() if config.gpu.name == "auto" else config.gpu.name)


def cell_memory(config: RunConfig, facts: ModelFacts, gpu: GpuFacts, settings: Settings) -> GpuMemory:
    """gpu_memory, with the CPU engine's fixed pool where there is no device memory."""
    memory = gpu_memory(facts, config.quant, gpu, settings)
    return memory if memory.total is not None else replace(memory, kv_pool=config.gpu.cpu_kv_cache_gib * GIB)


def predict_ledger(config: RunConfig) -> dict[str, int | None]:
    """The planner's figures under the names of records.Ledger; bytes over all GPUs. Errors: ConfigError."""
    facts, gpu = facts_of(config.model), resolve_gpu(config)
    settings = engine_settings(config, facts, gpu)
    tp, pp = settings.tensor_parallel_size, settings.pipeline_parallel_size
    memory = cell_memory(config, facts, gpu, settings)
    tokens = pool_tokens(facts, memory, settings)
    per_token = kv_bytes_per_token(facts, settings.kv_cache_dtype, tp)
    return {
        "weight_bytes": weight_bytes(facts, config.quant, settings.dtype, tp, pp, settings.expert_parallel),
        "checkpoint_bytes": checkpoint_bytes(facts, config.quant, settings.dtype),
        "kv_bytes_per_token": per_token,
        "kv_pool_tokens": tokens,
        "kv_pool_bytes": tokens * per_token,
    }
