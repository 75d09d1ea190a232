"""K and V scales layer by layer: what the engine uses, what the checkpoint holds, what the scheme claims. Pure but for one read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalq.config import QuantConfig

STORED = re.compile(r"^(?P<module>.*?)(\.(k_proj|v_proj|attn))?\.(?P<kind>[kv])_scale$")
SAME = 1e-3  # relative: some engines keep scales in 16 bit
FNUZ = 2.0  # AMD's E4M3 has half the range, and vLLM doubles the scales there
DYNAMIC = ("_per_token_head", "_ds_mla")


@dataclass(frozen=True)
class LayerScales:
    """One attention layer: its number, its engine name, its scales as used."""

    number: int
    name: str
    k: float
    v: float
    kv_dtype: str
    computed_by_engine: bool


def layers_of(answer: dict[str, Any]) -> list[LayerScales]:
    """From probe.KvProbe.evalq_kv_layers, in order of layer. A scale per head counts with its largest."""
    found = [
        LayerScales(
            layer_number(name),
            name,
            max(layer["k_scale"]),
            max(layer["v_scale"]),
            str(layer["kv_dtype"]),
            bool(layer["computed_by_engine"]),
        )
        for name, layer in answer.items()
    ]
    return sorted(found, key=lambda layer: layer.number)


def layer_number(name: str) -> int:
    """The first number in a module's name; -1 without one."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return int(numbers[0]) if numbers else -1


def checkpoint_scales(folder: Path) -> dict[int, dict[str, float]]:
    """layer number -> {"k": scale, "v": scale} as the checkpoint's safetensors files hold them; empty when they hold none."""
    from safetensors import safe_open

    scales: dict[int, dict[str, float]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                match = STORED.match(name)
                if match:
                    value = opened.get_tensor(name).float().max().item()
                    scales.setdefault(layer_number(match["module"]), {})[match["kind"]] = float(value)
    return scales


def source_of(quant: QuantConfig, layers: list[LayerScales], stored: dict[int, dict[str, float]]) -> str:
    """Where the scales in use come from: none, dynamic, default 1.0, checkpoint, computed (by evalq), or what else is seen."""
    if quant.kv_cache_dtype in ("bfloat16", "float16"):
        return "none"
    if quant.kv_cache_dtype.endswith(DYNAMIC):
        return "dynamic"
    if not layers:
        return "unknown"
    if any(layer.computed_by_engine for layer in layers):
        return "computed at run time"
    if stored and all(_matches(layer, stored) for layer in layers):
        return "computed" if quant.kv_scale_source == "computed" else "checkpoint"
    if all(layer.k == layer.v == 1.0 for layer in layers):
        return "default 1.0"
    return "unknown"


def problems_of(
    quant: QuantConfig, layers: list[LayerScales], stored: dict[int, dict[str, float]], any_scale: bool = False
) -> list[str]:
    """What is not as the scheme claims, with the first layer named. any_scale: the values of the scales are not looked at."""
    aliases = {quant.kv_cache_dtype, *({"fp8"} if quant.kv_cache_dtype == "fp8_e4m3" else ())}
    sixteen = quant.kv_cache_dtype in ("bfloat16", "float16")
    found = [f"{layer.name} keeps its KV cache as {layer.kv_dtype}, not {quant.kv_cache_dtype}" for layer in layers
             if layer.kv_dtype not in aliases and not (sixteen and layer.kv_dtype == "auto")]  # fmt: skip
    if any_scale:
        pass
    elif quant.kv_scale_source in ("checkpoint", "computed"):
        found += [_unloaded(layer, stored) for layer in layers if not _matches(layer, stored)]
    elif quant.kv_scale_source == "default 1.0":
        found += [f"{layer.name} uses KV scales {layer.k:g} and {layer.v:g}, not 1.0" for layer in layers
                  if not layer.k == layer.v == 1.0]  # fmt: skip
    if not found:
        return []
    more = f" (and {len(found) - 1} more layers)" if len(found) > 1 else ""
    return [f"scheme {quant.name} was not applied: {found[0]}{more}"]


def _unloaded(layer: LayerScales, stored: dict[int, dict[str, float]]) -> str:
    held = stored.get(layer.number)
    if not held:
        return f"the checkpoint has no KV scales for {layer.name}, which uses {layer.k:g} and {layer.v:g}"
    return (
        f"KV scales found but not loaded: {layer.name} uses {layer.k:g} and {layer.v:g}, "
        f"the checkpoint has {held.get('k', math.nan):g} and {held.get('v', math.nan):g}"
    )


def _matches(layer: LayerScales, stored: dict[int, dict[str, float]]) -> bool:
    held = stored.get(layer.number, {})
    return all(
        kind in held and any(math.isclose(used, factor * held[kind], rel_tol=SAME) for factor in (1.0, FNUZ))
        for kind, used in (("k", layer.k), ("v", layer.v))
    )
