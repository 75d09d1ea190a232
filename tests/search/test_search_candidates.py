"""Candidates are schemes that evalq can make, and give each unit exactly its option."""

from __future__ import annotations

import random

import pytest
from search_cases import BASE, UNITS, table, tensors

from evalq.errors import ConfigError
from evalq.facts.gpus import gpu_facts
from evalq.facts.models import facts_of
from evalq.facts.options import OPTIONS, SIXTEEN_BIT, options_of
from evalq.plan.compose import compose, parse
from evalq.plan.memory import weight_bytes
from evalq.quantize.scheme import assign_layers
from evalq.quantize.units import Unit
from evalq.search.candidates import (
    Candidate,
    allocations,
    candidate,
    next_rung,
    uniform,
    unit_seconds,
)


def made(chosen: list[str]) -> Candidate:
    return candidate("c", UNITS, chosen, table()[0], BASE, "bfloat16")


def test_every_layer_gets_its_option() -> None:
    chance = random.Random(1)
    chosen = [chance.choice([SIXTEEN_BIT, "int8", "int4_g64"]) for _ in UNITS]
    layers = assign_layers(tensors(), {"model_type": "llama"}, made(chosen).quant)
    for unit, option in zip(UNITS, chosen, strict=True):
        for name in unit.modules:
            assert (layers[name].group if name in layers else SIXTEEN_BIT) == option


def test_bytes_are_the_planners() -> None:
    config = compose(parse([]), {"model": "smollm2-135m", "quant": "baseline", "gpu": "cpu"})
    facts = facts_of(config.model)
    chosen = [SIXTEEN_BIT if n % 3 == 0 else "int8" if n % 3 == 1 else "int4_g32" for n in range(len(UNITS))]
    plain, mixed = made([SIXTEEN_BIT] * len(UNITS)), made(chosen)
    assert (
        weight_bytes(facts, config.quant) - weight_bytes(facts, mixed.quant) == plain.weight_bytes - mixed.weight_bytes
    )


def test_uniform_leaves_what_does_not_fit() -> None:
    one = uniform(UNITS, OPTIONS["int4_g128"], table()[0], BASE, "bfloat16")
    assert one.name == "uniform-int4-g128"
    assert one.options.count("int4_g128") == 30  # down_proj, whose width 1536 = 12 x 128
    assert uniform(UNITS, OPTIONS["int8"], table()[0], BASE, "bfloat16").options.count("int8") == 120


def test_the_ladder_rises_in_bytes_and_falls_in_damage() -> None:
    found = allocations(UNITS, table()[0], by_kind=False)
    assert len(found) > 10
    assert [one.cost for one in found] == sorted(one.cost for one in found)
    assert [one.damage for one in found] == sorted((one.damage for one in found), reverse=True)
    assert all(one.gap < 0.01 for one in found)
    alike = allocations(UNITS, table()[0], by_kind=True)
    assert all(
        len({o for o, u in zip(one.options, UNITS, strict=True) if u.kind == UNITS[0].kind}) == 1 for one in alike
    )
    assert len(alike[0].options) == len(UNITS)


def test_options_need_kernels_and_zero_points_a_method() -> None:
    chosen, left_out = options_of(["fp8", "int8", "int4_g64", "int4_g64_asym"], gpu_facts("a100-80g"), "rtn")
    assert [option.name for option in chosen] == ["int8", "int4_g64"]
    assert "no kernel" in left_out["fp8"]
    assert "search.method=gptq" in left_out["int4_g64_asym"]
    assert len(options_of(["int4_g64_asym"], gpu_facts("h200"), "gptq")[0]) == 1
    with pytest.raises(ConfigError, match="did you mean int4_g64"):
        options_of(["int4_64"], gpu_facts("h200"), "rtn")
    with pytest.raises(ConfigError, match="leaves nothing to choose"):
        options_of(["int8"], gpu_facts("b200"), "rtn")


def test_time_is_the_larger_of_reading_and_computing() -> None:
    unit = Unit("u", 0, "k", ("m",), ((1000, 1000),))
    h200 = gpu_facts("h200")
    alone = unit_seconds(unit, None, "bfloat16", h200, 1)
    assert alone == pytest.approx(2e6 / 4.8e12)
    assert unit_seconds(unit, OPTIONS["int4_g32"], "bfloat16", h200, 1) < 0.3 * alone
    many = unit_seconds(unit, OPTIONS["int4_g32"], "bfloat16", h200, 2000)
    assert many == pytest.approx(2e6 * 2000 / 989.4e12)  # 4-bit weights are multiplied in 16 bit
    assert unit_seconds(unit, OPTIONS["int8"], "bfloat16", h200, 2000) == pytest.approx(many / 2, rel=1e-3)


def test_the_next_rung_is_near_the_expected_damage_and_inside() -> None:
    rungs = [Candidate(f"r{n}", BASE, (), 0, float(n), 0.5 / 2**n) for n in range(16)]
    assert next_rung(rungs, -1, 16, 0.5 / 2**7) == 7
    assert next_rung(rungs, -1, 16, 1.0) == 4  # at most three quarters into the bracket
    assert next_rung(rungs, 6, 8, 1.0) == 7
    assert next_rung(rungs, 7, 10, 1e-9) == 9
