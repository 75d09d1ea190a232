"""Rules about memory, scheduler, offload and engine arguments."""

from __future__ import annotations

from collections.abc import Iterator

from evalq.facts.gpus import GIB, host_memory_bytes
from evalq.plan.memory import kv_bytes_for_context
from evalq.plan.rulebook import RETIRED_FLAGS, RETIRED_QUANTIZATIONS, RULES
from evalq.plan.violation import Look, Violation, broken

OFFLOAD_GIB = 64.0
UTILISATION = 0.95
MAX_SEQS = 2048
MAX_BATCHED_TOKENS = 65536


def check_memory(look: Look) -> Iterator[Violation]:
    """weights-fit, kv-room, utilisation-high, host-memory."""
    memory, settings = look.memory, look.settings
    if look.gpu.vendor == "cpu":
        yield from _host_memory(look)
    if look.gpu.vendor != "cpu" and settings.memory_utilization > UTILISATION:
        yield broken(RULES["utilisation-high"], f"gpu.memory_utilization={settings.memory_utilization}")
    if memory.budget is not None and memory.kv_pool <= 0:
        each = ("each of " if settings.gpus > 1 else "") + look.gpu.counted(settings.gpus)
        yield broken(
            RULES["weights-fit"],
            f"weights and workspace take {memory.fixed / GIB:.1f} GiB of the {memory.budget / GIB:.1f} GiB that "
            f"{look.gpu.title} gives at utilisation {settings.memory_utilization} on {each}",
        )
        return
    tp, step = settings.tensor_parallel_size, settings.max_num_batched_tokens
    needed = kv_bytes_for_context(look.facts, settings.kv_cache_dtype, settings.max_model_len, tp, step)
    needed = needed * memory.kv_per_token // max(1, kv_per_token_of_all(look))
    if needed > memory.kv_pool:
        yield broken(
            RULES["kv-room"],
            f"one request of max_model_len={settings.max_model_len:,} tokens needs {needed / GIB:.2f} GiB of KV cache "
            f"per GPU and the pool has {memory.kv_pool / GIB:.2f} GiB",
        )


def _host_memory(look: Look) -> Iterator[Violation]:
    wanted, shown = look.memory.weights + look.memory.kv_pool, host_memory_bytes()
    if wanted > shown:
        yield broken(
            RULES["host-memory"],
            f"weights and KV pool take {wanted / GIB:.1f} GiB and this host shows {shown / GIB:.1f} GiB",
            "error" if wanted > 2 * shown else None,
        )


def kv_per_token_of_all(look: Look) -> int:
    """KV bytes of one token in all layers on one GPU; a pipeline stage has its share of these."""
    settings = look.settings
    return kv_bytes_for_context(look.facts, settings.kv_cache_dtype, 1, settings.tensor_parallel_size)


def check_counts(look: Look) -> Iterator[Violation]:
    """gpu-count, context-length."""
    settings = look.settings
    if look.gpu.vendor != "cpu" and settings.gpus > look.config.gpu.count:
        yield broken(
            RULES["gpu-count"],
            f"{settings.tensor_parallel_size} x {settings.pipeline_parallel_size} GPUs are asked for and gpu.count is "
            f"{look.config.gpu.count}",
        )
    longest = look.facts.max_positions
    if longest and settings.max_model_len > longest:
        yield broken(RULES["context-length"], f"max_model_len={settings.max_model_len} exceeds {longest} positions")


def check_scheduler(look: Look) -> Iterator[Violation]:
    """many-seqs, many-batched-tokens, batched-below-length, batched-below-seqs."""
    settings = look.settings
    batched = settings.max_num_batched_tokens
    if settings.max_num_seqs > MAX_SEQS:
        yield broken(RULES["many-seqs"], f"max_num_seqs={settings.max_num_seqs}")
    if batched > MAX_BATCHED_TOKENS:
        yield broken(RULES["many-batched-tokens"], f"max_num_batched_tokens={batched}")
    if not settings.chunked_prefill and batched < settings.max_model_len:
        yield broken(
            RULES["batched-below-length"],
            f"max_num_batched_tokens={batched} is below max_model_len={settings.max_model_len} without chunked prefill",
        )
    if batched < settings.max_num_seqs:
        yield broken(
            RULES["batched-below-seqs"],
            f"max_num_batched_tokens={batched} is below max_num_seqs={settings.max_num_seqs}",
        )


def check_offload(look: Look) -> Iterator[Violation]:
    """offload-mla, offload-size; nothing without offload."""
    size = look.settings.offload_gib
    if not size:
        return
    if look.facts.attention != "gqa":
        severity = "error" if look.gpu.is_rocm else "warning"
        yield broken(RULES["offload-mla"], "KV offload to the host is asked for with latent attention", severity)
    if size < OFFLOAD_GIB:
        yield broken(RULES["offload-size"], f"kv_offloading_size={size:g} GiB")


def check_flags(look: Look) -> Iterator[Violation]:
    """retired-flag, for each argument of engine.extra that no engine knows any more, or never knew."""
    for key, value in look.settings.extra.items():
        name = key.lstrip("-").replace("-", "_")
        if name in RETIRED_FLAGS:
            yield broken(
                RULES["retired-flag"], f"--{name.replace('_', '-')} is gone", remedy=f"instead: {RETIRED_FLAGS[name]}"
            )
        if name == "quantization" and str(value) in RETIRED_QUANTIZATIONS:
            yield broken(
                RULES["retired-flag"],
                f"--quantization {value} does not exist",
                remedy=f"instead: {RETIRED_QUANTIZATIONS[str(value)]}",
            )
