"""What the engine is really started with: the config, and what the model needs everywhere or on AMD GPUs.

A need fills in what the config leaves at its default; a value that the user chose stays, and a rule says what is wrong
with it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from evalq.config import EngineConfig, RunConfig
from evalq.facts.gpus import GpuFacts
from evalq.facts.models import ModelFacts

WINDOW_SLACK_TOKENS = 64  # the engine's maximum is above the largest scoring window, so that no window is cut
_ENGINE_FIELDS = {f.name for f in fields(EngineConfig)} - {"name", "extra", "env"}
_DEFAULTS = EngineConfig()


@dataclass(frozen=True)
class Settings:
    """Engine settings after needs. Sizes in tokens, requests or GPUs."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    expert_parallel: bool
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int | None
    enforce_eager: bool
    chunked_prefill: bool
    memory_utilization: float
    kv_cache_dtype: str
    dtype: str
    offload_gib: float
    extra: dict[str, Any]  # further engine arguments, config's own before the model's needs
    env: dict[str, str]

    @property
    def gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


def needs_of(config: RunConfig, gpu: GpuFacts) -> dict[str, Any]:
    """Engine arguments and env_ variables that the model needs on this device; those for AMD win."""
    return {**config.model.engine_needs, **(config.model.rocm_needs if gpu.is_rocm else {})}


def engine_settings(config: RunConfig, facts: ModelFacts, gpu: GpuFacts) -> Settings:
    """Settings of one cell. max_model_len left open = the largest window of the tasks and a little more."""
    engine, needs = config.engine, needs_of(config, gpu)
    values: dict[str, Any] = {name: getattr(engine, name) for name in _ENGINE_FIELDS}
    extra, env = {}, {}
    for key, value in needs.items():
        if key.startswith("env_"):
            env[key.removeprefix("env_")] = str(value)
        elif key in _ENGINE_FIELDS:
            if values[key] == getattr(_DEFAULTS, key):
                values[key] = value
        else:
            extra[key] = value
    if gpu.vendor == "cpu":  # one process, one pool: what a model needs on several GPUs means nothing here
        values["tensor_parallel_size"] = engine.tensor_parallel_size
    extra.update(config.engine.extra)
    env.update(config.engine.env)
    return Settings(
        tensor_parallel_size=int(values["tensor_parallel_size"]),
        pipeline_parallel_size=int(values["pipeline_parallel_size"]),
        expert_parallel=bool(extra.get("enable_expert_parallel", False)),
        max_model_len=int(values["max_model_len"] or _default_length(config)),
        max_num_seqs=int(values["max_num_seqs"]),
        max_num_batched_tokens=int(values["max_num_batched_tokens"]),
        block_size=values["block_size"],
        enforce_eager=bool(values["enforce_eager"]),
        chunked_prefill=bool(values["enable_chunked_prefill"]),
        memory_utilization=config.gpu.memory_utilization,
        kv_cache_dtype=effective_kv_dtype(config.quant.kv_cache_dtype, facts, gpu),
        dtype=config.model.dtype,
        offload_gib=float(extra.get("kv_offloading_size") or 0.0),
        extra=extra,
        env=env,
    )


def with_needs(config: RunConfig, facts: ModelFacts, gpu: GpuFacts) -> RunConfig:
    """The config with the model's needs written into it, so that the engine is started with what the rules saw."""
    settings = engine_settings(config, facts, gpu)
    engine = replace(
        config.engine,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        block_size=settings.block_size,
        enforce_eager=settings.enforce_eager,
        extra=settings.extra,
        env=settings.env,
    )
    return replace(config, engine=engine)


def _default_length(config: RunConfig) -> int:
    """As the engine is started: never cut to the model's positions, so that the rule context-length can speak."""
    return max(config.tasks.perplexity_window, config.tasks.choice_window) + WINDOW_SLACK_TOKENS


def effective_kv_dtype(asked: str, facts: ModelFacts, gpu: GpuFacts) -> str:
    """The format the engine stores. Sparse MLA takes any FP8 request as its own packed format where the backend is
    FlashMLA's (vLLM 0.32 up to sm90); on sm100 and AMD it stays plain FP8.
    """
    if facts.attention == "sparse-mla" and asked == "fp8_e4m3" and gpu.arch.startswith(("sm8", "sm90")):
        return "fp8_ds_mla"
    return asked
