"""Units: what the engine fuses is one, patterns match exactly their modules, and ignored or vision parts are none."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from evalq.facts.schemes import matches
from evalq.quantize.tensors import TensorInfo
from evalq.quantize.units import targets_of, units_of

LEAVES = {
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (16, 8),
    "mlp.up_proj": (16, 8),
    "mlp.down_proj": (8, 16),
}


def tensor(name: str, shape: tuple[int, ...] = (8, 8)) -> TensorInfo:
    return TensorInfo(f"{name}.weight", Path("x"), "BF16", shape, 0, 0)


def dense(layers: int) -> list[TensorInfo]:
    parts = [tensor("model.embed_tokens", (9, 8)), tensor("lm_head", (9, 8)), tensor("model.norm", (8,))]
    return parts + [tensor(f"model.layers.{n}.{leaf}", shape) for n in range(layers) for leaf, shape in LEAVES.items()]


def test_fused_parts_are_one_unit() -> None:
    units = units_of(dense(2), ["lm_head"])
    assert [unit.name for unit in units[:4]] == [
        "0.self_attn.q_proj+k_proj+v_proj",
        "0.self_attn.o_proj",
        "0.mlp.gate_proj+up_proj",
        "0.mlp.down_proj",
    ]
    assert len(units) == 8
    assert units[0].weights == 64 + 32 + 32
    assert {unit.layer for unit in units} == {0, 1}


def test_experts_of_a_layer_are_one_unit_and_the_router_is_none() -> None:
    names = [f"model.layers.3.mlp.experts.{n}.{leaf}" for n in range(3) for leaf in ("gate_proj", "down_proj")]
    tensors = [tensor(name) for name in [*names, "model.layers.3.mlp.gate", "visual.blocks.0.attn.qkv"]]
    units = units_of(tensors, ["re:.*[.]gate$"])
    assert [(unit.kind, unit.layer, len(unit.modules)) for unit in units] == [("mlp.experts", 3, 6)]
    assert targets_of(units) == ["re:.*layers[.](3)[.]mlp[.]experts[.].*$"]


@given(st.sets(st.integers(0, 47)))
def test_patterns_match_the_modules_of_their_units_and_no_other(chosen: set[int]) -> None:
    units = units_of(dense(12), ["lm_head"])
    mine = [unit for place, unit in enumerate(units) if place in chosen]
    targets = targets_of(mine)
    wanted = {module for unit in mine for module in unit.modules}
    every = {module for unit in units for module in unit.modules}
    assert {module for module in every if any(matches(module, target) for target in targets)} == wanted
    assert len(targets) <= 4
    for target in targets:
        re.compile(target.removeprefix("re:"))
