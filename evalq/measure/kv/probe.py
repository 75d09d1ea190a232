"""What runs inside the engine's workers for the KV cache: its scales, damage on purpose, and how tokens were scheduled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

PROMPT_STEP = "_get_prompt_logprobs_dict"


class KvProbe:
    """Methods that vLLM adds to its worker, by way of probe.EngineProbe."""

    model_runner: Any

    def evalq_kv_layers(self) -> str:
        """JSON: attention layer -> its K and V scales, KV dtype, backend implementation."""
        return json.dumps({name: _describe(layer) for name, layer in attention_layers(_model(self.model_runner))})

    def evalq_scale_kv(self, factor: float) -> int:
        """Multiply every K and V scale as loaded by `factor` (1 = as loaded); returns the number of layers reached.

        In place, since captured graphs hold the addresses; the Python floats too, which some kernels are handed.
        """
        runner = self.model_runner
        kept: dict[str, Any] = getattr(runner, "evalq_own_scales", {})
        count = 0
        for name, layer in attention_layers(_model(runner)):
            with torch.inference_mode():
                own = kept.setdefault(name, _own_scales(layer))
                _set_scales(layer, own, factor)
            count += 1
        runner.evalq_own_scales = kept
        return count

    def evalq_erase_kv(self) -> int:
        """Set every byte of the KV cache to 0; returns the bytes erased."""
        erased = 0
        with torch.inference_mode():  # the engine may have made them in it, and then they change in it only
            for storage in kv_storages(self.model_runner):
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
                erased += storage.nbytes()
        return erased

    def evalq_block_kv_writes(self, blocked: bool) -> int:
        """Let nothing be written to the cache, or let it be written again; returns the number of layers reached."""
        count = 0
        for _, layer in attention_layers(_model(self.model_runner)):
            implementation: Any = getattr(layer, "impl", None)
            if not hasattr(type(implementation), "do_kv_cache_update"):
                continue
            count += 1
            if blocked:
                implementation.do_kv_cache_update = lambda *_, **__: None
            else:
                implementation.__dict__.pop("do_kv_cache_update", None)
        return count

    def evalq_watch_steps(self) -> str:
        """From now on note how each scored request's tokens were scheduled; returns "" or why that is not possible."""
        runner = self.model_runner
        if not hasattr(runner, PROMPT_STEP):
            return f"this engine's model runner ({type(runner).__name__}) has no {PROMPT_STEP}"
        runner.evalq_steps = []
        if getattr(runner, "evalq_watched", False):
            return ""
        before = getattr(runner, PROMPT_STEP)

        def watch(hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> Any:
            runner.evalq_steps.extend(scheduled_rows(runner, num_scheduled_tokens))
            return before(hidden_states, num_scheduled_tokens)

        setattr(runner, PROMPT_STEP, watch)
        runner.evalq_watched = True
        return ""

    def evalq_take_steps(self) -> list[tuple[int, int, int]]:
        """(request number, first token, tokens) of every step since the last call."""
        runner = self.model_runner
        taken: list[tuple[int, int, int]] = getattr(runner, "evalq_steps", [])
        runner.evalq_steps = []
        return taken


def _model(runner: Any) -> Any:
    return runner.get_model() if hasattr(runner, "get_model") else runner.model


def attention_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Layers that own a KV cache with K and V scales, by name."""
    for name, module in model.named_modules():
        if hasattr(module, "_k_scale") and hasattr(module, "_v_scale") and hasattr(module, "kv_cache_dtype"):
            yield name, module


def kv_storages(runner: Any) -> list[Any]:
    """The storages behind the runner's KV tensors, each once."""
    found: dict[int, Any] = {}
    for entry in getattr(runner, "kv_caches", []):
        for part in entry if isinstance(entry, list | tuple) else [entry]:
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()
                found[storage.data_ptr()] = storage
    return list(found.values())


def scheduled_rows(runner: Any, num_scheduled_tokens: dict[str, int]) -> list[tuple[int, int, int]]:
    """(request number, first token, tokens) of the scored requests of one step."""
    rows = []
    for request_id, scheduled in num_scheduled_tokens.items():
        request = runner.requests[request_id]
        asked = (getattr(request.sampling_params, "extra_args", None) or {}).get("evalq")
        if asked is not None:
            rows.append((int(asked[0]), int(request.num_computed_tokens), int(scheduled)))
    return rows


def _own_scales(layer: Any) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for part in ("_k_scale", "_v_scale"):
        for name in (part, f"{part}_cpu"):
            if isinstance(getattr(layer, name, None), torch.Tensor):
                kept[name] = getattr(layer, name).detach().clone()
        if hasattr(layer, f"{part}_float"):
            kept[f"{part}_float"] = getattr(layer, f"{part}_float")
    return kept


def _set_scales(layer: Any, own: dict[str, Any], factor: float) -> None:
    for name, value in own.items():
        if isinstance(value, torch.Tensor):
            getattr(layer, name).copy_(value * factor if factor != 1.0 else value)
        else:
            setattr(layer, name, value * factor if factor != 1.0 else value)


def _describe(layer: Any) -> dict[str, Any]:
    return {
        "k_scale": _numbers(layer._k_scale),
        "v_scale": _numbers(layer._v_scale),
        "kv_dtype": str(layer.kv_cache_dtype),
        "implementation": type(getattr(layer, "impl", None)).__name__,
        "computed_by_engine": bool(getattr(layer, "calculate_kv_scales", False)),
    }


def _numbers(value: Any) -> list[float]:
    return [float(x) for x in torch.as_tensor(value).detach().flatten().tolist()]
