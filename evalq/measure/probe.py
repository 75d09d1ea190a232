"""What runs inside the engine's workers: the scorer hook and the questions about what was really loaded.

vLLM mixes `EngineProbe` into its worker class (`worker_extension_cls`), and collective calls reach the methods by name.
The hook replaces the step of the model runner that computes prompt log-probabilities: it is handed the final hidden states of
every token of the step, so it works under compiled graphs, chunked prefill and tensor parallelism, and it computes only the rows
that are scored, of all requests together, in blocks of bounded memory.
"""

from __future__ import annotations

import json
import resource
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

HOOKED = "_get_prompt_logprobs_dict"
BLOCK_BYTES = 128 << 20  # float32 logits held at once


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


@dataclass
class ScoreStore:
    """Rows scored since the last `take`; tensors stay on the device until then."""

    topk: int
    owners: list[np.ndarray] = field(default_factory=list)  # (rows,) request number
    positions: list[np.ndarray] = field(default_factory=list)  # (rows,) position of the predicted token in its prompt
    logprobs: list[torch.Tensor] = field(default_factory=list)  # (rows,) float32, nats
    top1_ids: list[torch.Tensor] = field(default_factory=list)  # (rows,) int64
    top1_logprobs: list[torch.Tensor] = field(default_factory=list)  # (rows,) float32
    topk_ids: list[torch.Tensor] = field(default_factory=list)  # (rows, k) int64
    topk_logprobs: list[torch.Tensor] = field(default_factory=list)  # (rows, k) float32


class EngineProbe:
    """Methods that vLLM adds to its worker. `self` is the worker; `self.model_runner` its model runner."""

    model_runner: Any

    def evalq_install_scorer(self) -> str:
        """Put the scorer in place of the engine's prompt log-probabilities; returns "" or why it does not fit."""
        runner = self.model_runner
        missing = [
            name
            for name in (HOOKED, "requests", "input_batch", "query_start_loc", "model")
            if not hasattr(runner, name)
        ]
        if missing:
            return f"this engine's model runner ({type(runner).__name__}) has no {', '.join(missing)}"
        engine_own = getattr(runner, HOOKED)
        runner.evalq_scores = ScoreStore(topk=0)

        def hook(hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> Any:
            score_step(runner, hidden_states, num_scheduled_tokens)
            return engine_own(hidden_states, num_scheduled_tokens)

        setattr(runner, HOOKED, hook)
        return ""

    def evalq_take_scores(self, topk_next: int = 0) -> dict[str, np.ndarray]:
        """Arrays of all rows scored since the last call (empty on ranks that do not hold logits), then start anew."""
        runner = self.model_runner
        store: ScoreStore = runner.evalq_scores
        runner.evalq_scores = ScoreStore(topk=topk_next)
        if not store.owners:
            return {}
        arrays = {
            "owner": np.concatenate(store.owners),
            "position": np.concatenate(store.positions),
            "logprob": _to_numpy(store.logprobs, np.float32),
            "top1_id": _to_numpy(store.top1_ids, np.int32),
            "top1_logprob": _to_numpy(store.top1_logprobs, np.float32),
        }
        if store.topk:
            arrays["topk_id"] = _to_numpy(store.topk_ids, np.int32)
            arrays["topk_logprob"] = _to_numpy(store.topk_logprobs, np.float32)
        return arrays

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
                "memory": describe_memory(),
            }
        )


def score_step(runner: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> None:
    """Score the rows of one engine step. hidden_states: (tokens of the step, hidden)."""
    rows: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    for request_id, scheduled in num_scheduled_tokens.items():
        request = runner.requests[request_id]
        asked = (getattr(request.sampling_params, "extra_args", None) or {}).get("evalq")
        if asked is None or request.prompt_token_ids is None:
            continue
        owner, first = asked  # positions first .. len(prompt) - 1 are scored
        start = request.num_computed_tokens
        prompt = request.prompt_token_ids
        low, high = max(start, first - 1), min(start + scheduled, len(prompt) - 1)
        if low >= high:
            continue
        offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]]) - start
        rows.append(np.arange(low + offset, high + offset))
        targets.append(np.asarray(prompt[low + 1 : high + 1], dtype=np.int64))
        owners.append(np.full(high - low, owner, dtype=np.int64))
        positions.append(np.arange(low + 1, high + 1))
    if rows:
        store: ScoreStore = runner.evalq_scores
        if score_rows(runner.model, hidden_states, np.concatenate(rows), np.concatenate(targets), store):
            store.owners.append(np.concatenate(owners))
            store.positions.append(np.concatenate(positions))


def score_rows(
    model: Any, hidden_states: torch.Tensor, rows: np.ndarray, targets: np.ndarray, store: ScoreStore
) -> bool:
    """Log-probabilities of `targets` after `rows` of hidden_states, in blocks; False where this rank holds no logits."""
    device = hidden_states.device
    row_index = torch.from_numpy(rows).to(device, non_blocking=True)
    target_index = torch.from_numpy(targets).to(device, non_blocking=True)
    block = 0
    done = 0
    while done < len(rows):
        stop = min(done + (block or 64), len(rows))
        logits = model.compute_logits(hidden_states.index_select(0, row_index[done:stop]))
        if logits is None:
            return False
        block = max(16, BLOCK_BYTES // (4 * logits.shape[-1]))
        _score_block(logits.float(), target_index[done:stop], store)
        done = stop
    return True


def _score_block(logits: torch.Tensor, targets: torch.Tensor, store: ScoreStore) -> None:
    """logits: (rows, vocabulary) float32. By log-sum-exp: over 49,152 words within 2e-6 nats of float64, without a bias.

    The engine's own prompt log-probabilities come from torch's float32 log_softmax, which on a CPU is 6e-6 nats a token high.
    """
    normaliser = torch.logsumexp(logits, dim=-1)
    top1 = logits.max(dim=-1)
    store.logprobs.append(logits.gather(1, targets[:, None]).squeeze(1) - normaliser)
    store.top1_ids.append(top1.indices)
    store.top1_logprobs.append(top1.values - normaliser)
    if store.topk:
        top = torch.topk(logits, store.topk, dim=-1)
        store.topk_ids.append(top.indices)
        store.topk_logprobs.append(top.values - normaliser[:, None])


def _to_numpy(parts: list[torch.Tensor], dtype: Any) -> np.ndarray:
    array: np.ndarray = torch.cat(parts).cpu().numpy().astype(dtype)
    return array


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
                "parameters": {
                    key: [str(p.dtype).removeprefix("torch."), list(p.shape)]
                    for key, p in module.named_parameters(recurse=False)
                },
            }
        )
    return layers


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


record_as_loaded()
