"""What runs inside the engine's workers: the scorer hook and the questions about what was really loaded.

vLLM mixes `EngineProbe` into its worker class (`worker_extension_cls`), and collective calls reach the methods by name.
The hook replaces the step of the model runner that computes prompt log-probabilities: it is handed the final hidden states of
every token of the step, so it works under compiled graphs, chunked prefill and tensor parallelism, and it computes only the rows
that are scored, of all requests together, in blocks of bounded memory.
"""

from __future__ import annotations

import importlib
import json
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from evalq.measure.engine_settings import settings_of
from evalq.measure.hidden import Layout
from evalq.measure.kv.probe import KvProbe
from evalq.measure.scorer import HiddenSink, HiddenSource, ScoreStore, head_hash, load_head, score_step

HOOKED = "_get_prompt_logprobs_dict"


def record_as_loaded() -> None:
    """From now on, keep each model's parameters as they were loaded, before kernels repack, empty or replace them.

    The CPU kernels keep their own packed copies and leave empty parameters behind, so what a scheme stores can only be counted
    here. Called when this module is imported in a worker, which is before the model is loaded.
    """
    try:
        from vllm.model_executor.model_loader import base_loader
    except ImportError:
        return
    engine_own = base_loader.process_weights_after_loading
    if hasattr(engine_own, "evalq_wrapped"):
        return

    def process(model: Any, *args: Any, **kwargs: Any) -> Any:
        model.evalq_as_loaded = as_loaded(model)
        return engine_own(model, *args, **kwargs)

    process.evalq_wrapped = True  # type: ignore[attr-defined]
    base_loader.process_weights_after_loading = process


def as_loaded(model: Any) -> list[list[Any]]:
    """[name, dtype, shape, bytes] of every parameter, shared storage once."""
    rows: list[list[Any]] = []
    seen: set[int] = set()
    for name, tensor in model.named_parameters(remove_duplicate=True):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() in seen and tensor.device.type != "meta":
            continue
        seen.add(storage.data_ptr())
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append([name, dtype, list(tensor.shape), tensor.numel() * tensor.element_size()])
    return rows


def keeps_scores(worker: Any) -> bool:
    """Whether this rank keeps scores: of the ranks of a tensor-parallel group, which hold the same logits, the first is enough."""
    return int(getattr(worker, "rank", 0)) % int(worker.parallel_config.tensor_parallel_size) == 0


class EngineProbe(KvProbe):
    """Methods that vLLM adds to its worker. `self` is the worker; `self.model_runner` its model runner."""

    model_runner: Any
    vllm_config: Any
    parallel_config: Any

    def evalq_install_scorer(self) -> str:
        """Put the scorer in place of the engine's prompt log-probabilities; returns "" or why it does not fit."""
        runner = self.model_runner
        missing = [
            name
            for name in (HOOKED, "requests", "input_batch", "query_start_loc", "model", "model_config")
            if not hasattr(runner, name)
        ]
        if missing:
            return f"this engine's model runner ({type(runner).__name__}) has no {', '.join(missing)}"
        if runner.model_config.get_vocab_size() < 1:
            return "the model does not say how many words it has"
        engine_own = getattr(runner, HOOKED)
        runner.evalq_scores = ScoreStore(topk=0)
        runner.evalq_sink = runner.evalq_source = None
        runner.evalq_keeps = keeps_scores(self)

        def hook(hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> Any:
            score_step(runner, hidden_states, num_scheduled_tokens)
            return engine_own(hidden_states, num_scheduled_tokens)

        setattr(runner, HOOKED, hook)
        return ""

    def evalq_take_scores(self, topk_next: int = 0, durable: bool = False) -> dict[str, Any]:
        """Arrays of all rows scored since the last call (empty on ranks that do not hold logits), then start anew.

        durable: hidden states kept so far are on disk when this returns.
        """
        runner = self.model_runner
        store: ScoreStore = runner.evalq_scores
        runner.evalq_scores = ScoreStore(topk=topk_next)
        if durable and getattr(runner, "evalq_sink", None) is not None:
            runner.evalq_sink.sync()
        return store.arrays()

    def evalq_keep_hidden(self, folder: str, layout: Layout) -> str:
        """From now on, keep hidden states as `layout` says; returns the hash of this rank's output head."""
        runner = self.model_runner
        runner.evalq_sink = HiddenSink(Path(folder), layout) if runner.evalq_keeps else None
        return head_hash(runner.model)

    def evalq_head_hash(self) -> str:
        """Hash of this rank's output head; "" when it has none that can be hashed."""
        return head_hash(self.model_runner.model)

    def evalq_compare_hidden(self, folder: str, layout: Layout, same_head: bool, checkpoint: str) -> str:
        """From now on, compare with the baseline's hidden states; returns "" or why this cannot be done.

        same_head: on every rank the output head is the baseline's; checkpoint: where that head can be read when it is another.
        """
        runner = self.model_runner
        head = None
        if not same_head:
            head = load_head(Path(checkpoint), getattr(torch, layout.dtype), runner.device) if checkpoint else None
            if head is None:
                return (
                    f"the baseline's output head differs from this one's and is not in {checkpoint or 'any checkpoint'}"
                )
            words = int(runner.model_config.get_vocab_size())
            if head.shape[0] < words:
                return f"the baseline's output head has {head.shape[0]} words, this one's {words}"
        runner.evalq_source = HiddenSource(Path(folder), layout, head)
        return ""

    def evalq_close_hidden(self) -> None:
        """Stop keeping and comparing hidden states; everything kept is on disk."""
        runner = self.model_runner
        if getattr(runner, "evalq_sink", None) is not None:
            runner.evalq_sink.sync()
        runner.evalq_sink = runner.evalq_source = None

    def evalq_settings(self) -> str:
        """JSON of the engine's effective settings, for a start whose config object is in another process."""
        settings = settings_of(self.vllm_config)
        vocabulary = int(self.vllm_config.model_config.get_vocab_size())
        return json.dumps(
            {"settings": settings, "vocabulary": vocabulary, "runner": type(self.model_runner).__module__}
        )

    def evalq_describe(self) -> str:
        """JSON of what was really loaded: parameter dtypes and bytes, kernels, KV tensors, KV scales, memory."""
        runner = self.model_runner
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        return json.dumps(
            {
                "parameters": describe_parameters(model),
                "as_loaded": getattr(model, "evalq_as_loaded", []),
                "packed_modules": getattr(model, "packed_modules_mapping", {}),
                "layers": describe_layers(model),
                "kv_cache": describe_kv_cache(runner),
                "kv_scales": describe_kv_scales(model),
                "memory": describe_memory() | describe_profile(self),
            }
        )


def describe_parameters(model: Any) -> dict[str, Any]:
    """Bytes and tensors by dtype, buffers included where they hold weights. Shared storage is counted once."""
    bytes_by_dtype: Counter[str] = Counter()
    tensors_by_dtype: Counter[str] = Counter()
    seen: set[int] = set()
    for _, tensor in model.named_parameters(remove_duplicate=True):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen and storage.nbytes():
            continue
        seen.add(storage.data_ptr())
        name = str(tensor.dtype).removeprefix("torch.")
        bytes_by_dtype[name] += tensor.numel() * tensor.element_size()
        tensors_by_dtype[name] += 1
    return {"bytes_by_dtype": dict(bytes_by_dtype), "tensors_by_dtype": dict(tensors_by_dtype)}


def describe_layers(model: Any) -> list[dict[str, Any]]:
    """Per linear, embedding or attention layer: its class, the method and the kernel chosen, its parameters' dtypes and shapes."""
    layers = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        scheme = getattr(module, "scheme", None)
        kernel = _kernel_name(scheme) or _kernel_name(method)
        layers.append(
            {
                "name": name,
                "layer": type(module).__name__,
                "method": type(method).__name__,
                "scheme": type(scheme).__name__ if scheme is not None else "",
                "kernel": kernel,
                "size": _layer_size(module),
                "parameters": {
                    key: [str(p.dtype).removeprefix("torch."), list(p.shape)]
                    for key, p in module.named_parameters(recurse=False)
                },
            }
        )
    return layers


def _layer_size(module: Any) -> list[int] | None:
    """[out, in] of this rank's part of a linear layer; None for other layers."""
    out = getattr(module, "output_size_per_partition", getattr(module, "output_size", None))
    into = getattr(module, "input_size_per_partition", getattr(module, "input_size", None))
    return [int(out), int(into)] if isinstance(out, int) and isinstance(into, int) else None


def _kernel_name(owner: Any) -> str:
    for attribute in ("kernel", "fp8_linear", "fp8_linear_kernel", "mp_linear_kernel"):
        kernel = getattr(owner, attribute, None)
        if kernel is not None:
            return type(kernel).__name__
    return ""


def describe_kv_cache(runner: Any) -> dict[str, Any]:
    """KV tensors as allocated: bytes, element dtypes, and the engine's own dtype setting. Shared storage counted once."""
    tensors: list[torch.Tensor] = []
    for entry in getattr(runner, "kv_caches", []):
        tensors.extend(part for part in (entry if isinstance(entry, list | tuple) else [entry]) if _is_tensor(part))
    seen: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return {
        "tensors": len(tensors),
        "bytes": sum(seen.values()),
        "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in tensors}),
        "engine_dtype": str(getattr(runner, "kv_cache_dtype", "")).removeprefix("torch."),
    }


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def describe_kv_scales(model: Any) -> dict[str, Any]:
    """K and V scales of the attention layers, from the engine's state: how many, and their smallest and largest value."""
    k_scales, v_scales, backends = [], [], set()
    for _, module in model.named_modules():
        if hasattr(module, "_k_scale_float") and hasattr(module, "_v_scale_float"):
            k_scales.append(float(module._k_scale_float))
            v_scales.append(float(module._v_scale_float))
            backends.add(_backend_name(module))
    if not k_scales:
        return {"layers": 0, "attention_backends": sorted(backends)}
    return {
        "layers": len(k_scales),
        "k_min": min(k_scales),
        "k_max": max(k_scales),
        "v_min": min(v_scales),
        "v_max": max(v_scales),
        "attention_backends": sorted(backends),
    }


def _backend_name(module: Any) -> str:
    backend = getattr(module, "attn_backend", None)
    get_name = getattr(backend, "get_name", None)
    try:
        return str(get_name()) if get_name else type(getattr(module, "impl", None)).__name__
    except NotImplementedError:
        return type(getattr(module, "impl", None)).__name__


def describe_memory() -> dict[str, Any]:
    """Highest memory this process held: device allocations where there is a device, else its resident set."""
    if torch.cuda.is_available():
        return {
            "peak_bytes": int(torch.cuda.max_memory_allocated()),
            "reserved_bytes": int(torch.cuda.max_memory_reserved()),
            "source": "torch.cuda.max_memory_allocated",
        }
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "source": "resident set"}


def describe_profile(worker: Any) -> dict[str, int | None]:
    """What the engine's own memory profiling found at its start, and what the driver sees used now. Bytes; None on the CPU."""
    found: dict[str, int | None] = {
        "activation_bytes": _whole(getattr(worker, "peak_activation_memory", None)),
        "graph_bytes": _whole(getattr(worker.model_runner, "evalq_graph_bytes", None) or _estimate_of_graphs(worker)),
        "driver_bytes": None,
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["driver_bytes"] = int(total - free)
    return found


def _estimate_of_graphs(worker: Any) -> Any:
    return getattr(worker, "cudagraph_memory_estimate", None) or None


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def record_graphs() -> None:
    """From now on, keep how much memory capturing graphs took: the engine logs it and forgets it. GPUs only."""
    if not torch.cuda.is_available():
        return
    for place in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
        try:
            runner = importlib.import_module(place).GPUModelRunner
        except (ImportError, AttributeError):
            continue
        engine_own = getattr(runner, "capture_model", None)
        if engine_own is None or hasattr(engine_own, "evalq_wrapped"):
            continue
        runner.capture_model = _remembering(engine_own)


def _remembering(engine_own: Any) -> Any:
    def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.evalq_graph_bytes = engine_own(self, *args, **kwargs)
        return self.evalq_graph_bytes

    capture.evalq_wrapped = True  # type: ignore[attr-defined]
    return capture


record_as_loaded()
record_graphs()
