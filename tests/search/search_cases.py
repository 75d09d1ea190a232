"""SmolLM2's groups of layers with made-up damages, for the tests of the search."""

from __future__ import annotations

import random
from pathlib import Path

from evalq.config import QuantConfig
from evalq.facts.options import OPTIONS, SIXTEEN_BIT
from evalq.plan.allocation import Choice
from evalq.quantize.sensitivity import Damage, Sensitivity
from evalq.quantize.tensors import TensorInfo
from evalq.quantize.units import units_of
from evalq.search.candidates import choices, unit_bytes

SHAPES = {
    "self_attn.q_proj": (576, 576), "self_attn.k_proj": (192, 576), "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576), "mlp.gate_proj": (1536, 576), "mlp.up_proj": (1536, 576), "mlp.down_proj": (576, 1536),
}  # fmt: skip
BASE = QuantConfig(name="base", kv_cache_dtype="bfloat16", ignore=["lm_head"])
NAMES = ("int8", "int4_g32", "int4_g64", "int4_g128")


def tensors() -> dict[str, TensorInfo]:
    names = [(f"model.layers.{n}.{leaf}.weight", shape) for n in range(30) for leaf, shape in SHAPES.items()]
    return {name: TensorInfo(name, Path("x"), "BF16", shape, 0, 0) for name, shape in names}


UNITS = units_of(tensors().values(), ["lm_head"])


def table(seed: int = 0) -> tuple[list[list[Choice]], Sensitivity]:
    chance = random.Random(seed)
    harm = {"int8": 1e-5, "int4_g32": 1e-4, "int4_g64": 2e-4, "int4_g128": 4e-4}
    damages = [
        Damage(unit.name, name, harm[name] * chance.uniform(0.2, 5), "fake", 0.01)
        for unit in UNITS
        for name in NAMES
        if all(OPTIONS[name].fits(into) for _, into in unit.shapes)
    ]
    found = Sensitivity(damages, 100, "cpu", 1.0)
    costs = {(u.name, SIXTEEN_BIT): float(unit_bytes(u, None, "bfloat16")) for u in UNITS}
    costs |= {(u.name, n): float(unit_bytes(u, OPTIONS[n], "bfloat16")) for u in UNITS for n in NAMES}
    return choices(UNITS, [OPTIONS[name] for name in NAMES], found, costs), found
