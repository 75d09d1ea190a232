"""The exact command and environment that start vLLM for a cell."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from evalq.config import RunConfig
from evalq.facts.gpus import GpuFacts
from evalq.plan.settings import Settings


@dataclass(frozen=True)
class Command:
    """Environment and argument list; `notes` say what the reader has to put in."""

    env: dict[str, str]
    argv: list[str]
    notes: list[str]

    def render(self) -> str:
        """Shell text: notes as comments, then one command with its environment before it."""
        lines = [f"# {note}" for note in self.notes]
        env = "".join(f"{key}={shlex.quote(value)} " for key, value in self.env.items())
        return "\n".join([*lines, env + shlex.join(self.argv)])


def engine_command(config: RunConfig, gpu: GpuFacts, settings: Settings) -> Command:
    """`vllm serve` with every setting of the cell said aloud."""
    model, notes = _weights(config)
    arguments: dict[str, Any] = {
        "dtype": settings.dtype,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "block_size": settings.block_size,
        "attention_backend": config.engine.attention_backend,
        "enable_prefix_caching": config.engine.enable_prefix_caching,
        "enable_chunked_prefill": settings.chunked_prefill,
        "enforce_eager": settings.enforce_eager,
        "load_format": config.engine.load_format,
        "seed": config.engine.seed,
        "trust_remote_code": config.model.trust_remote_code,
        "revision": config.model.revision if config.model.source == "hub" and not config.model.path else None,
    }
    if config.quant.origin == "engine":
        arguments["quantization"] = config.quant.engine_quantization
    env = dict(settings.env)
    if gpu.vendor == "cpu":
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", str(config.gpu.cpu_kv_cache_gib))
    else:
        arguments["gpu_memory_utilization"] = settings.memory_utilization
    arguments.update(settings.extra)
    flags = [part for key, value in arguments.items() for part in _flag(key, value)]
    return Command(env, ["vllm", "serve", model, *flags], notes)


def _weights(config: RunConfig) -> tuple[str, list[str]]:
    model = config.model
    if config.quant.origin == "evalq":
        folder = f"{config.paths.checkpoints}/{model.name}--{config.quant.name}"
        return folder, [f"the first argument is the checkpoint that evalq makes for quant={config.quant.name}"]
    if model.path:
        return model.path, []
    if model.source == "package":
        return f"{config.paths.models}/{model.name}", [f"the weights come from the Python package {model.package}"]
    return model.hub_id or model.name, []


def _flag(key: str, value: Any) -> list[str]:
    name = key.lstrip("-").replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
