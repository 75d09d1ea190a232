"""The engine's own effective settings, read back from its config object; the same on every start. Imports no vLLM."""

from __future__ import annotations

from typing import Any

SCORER_VERSION = "4"  # raise when the engine's part of scoring changes scores, or the batches they come from


def settings_of(config: Any) -> dict[str, str | int | float | bool | None]:
    """What a VllmConfig says, under evalq's names."""
    cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
    parallel = config.parallel_config
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": text(model.quantization),
        "max_model_len": int(model.max_model_len),
        "enforce_eager": bool(model.enforce_eager),
        "seed": int(model.seed),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": int(cache.block_size),
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "num_blocks": int(cache.num_gpu_blocks or 0),
        "max_num_seqs": int(scheduler.max_num_seqs),
        "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
        "enable_chunked_prefill": bool(first_setting(scheduler, "enable_chunked_prefill", "chunked_prefill_enabled")),
        "tensor_parallel_size": int(parallel.tensor_parallel_size),
        "pipeline_parallel_size": int(parallel.pipeline_parallel_size),
        "compilation_mode": text(first_setting(config.compilation_config, "mode", "level")),
        "cudagraph_mode": text(getattr(config.compilation_config, "cudagraph_mode", None)),
        "load_format": text(config.load_config.load_format),
    }


def first_setting(owner: Any, *names: str) -> Any:
    """The first of `names` that `owner` has: settings are renamed between versions."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    return None


def text(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "name", value))
