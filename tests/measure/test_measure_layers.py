"""Expected against found, layer by layer: packed shapes, kernels, weight-only fallbacks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from evalq.config import ModelConfig, QuantArgs, QuantConfig, QuantGroup, RunConfig
from evalq.measure.applied import check_applied, group_of, layer_kinds
from evalq.measure.layers import describe, expected_text, kinds, packed_shape, weight_only_fallback

W8A8 = QuantGroup(["re:.*self_attn.*"], QuantArgs(8, "int", "channel"), QuantArgs(8, "int", "token", dynamic=True))
FP8 = QuantGroup(["Linear"], QuantArgs(8, "float", "channel"), QuantArgs(8, "float", "token", dynamic=True))
W4 = QuantGroup(["re:.*mlp.*"], QuantArgs(4, "int", "group", 64))


def layer(name: str = "model.layers.3.mlp.gate_up_proj", scheme: str = "", kernel: str = "") -> dict[str, Any]:
    return {
        "name": name, "layer": "ColumnParallelLinear", "method": "M", "scheme": scheme, "kernel": kernel,
        "parameters": {}, "size": [3072, 576],
    }  # fmt: skip


def test_packed_shapes() -> None:
    """4 bit: eight weights in an int32 word."""
    assert packed_shape(W4, [3072, 576]) == [3072, 72]
    assert packed_shape(dataclasses.replace(W4, weights=QuantArgs(8, "int", "channel")), [3072, 576]) == [3072, 144]
    assert packed_shape(W8A8, [960, 576]) == packed_shape(FP8, [960, 576]) == [960, 576]
    assert packed_shape(W4, None) is None


def test_expected_in_words() -> None:
    assert expected_text(W4, [3072, 576]) == "4-bit int weights [3072, 72], group scales, 16-bit activations"
    assert expected_text(FP8, None) == "8-bit float weights, channel scales, 8-bit float activations"
    assert expected_text(None, [3072, 576]) == "16 bit [3072, 576]"


def test_layer_as_the_scheme_says() -> None:
    loaded = {
        "model.layers.3.mlp.gate_up_proj.weight_packed": ["int32", [3072, 72]],
        "model.layers.3.mlp.gate_up_proj.weight_shape": ["int64", [2]],
    }
    found = describe(layer(scheme="CompressedTensorsWNA16", kernel="MarlinLinearKernel"), loaded, W4, False)
    assert found.note == ""
    assert found.name == "model.layers.*.mlp.gate_up_proj"
    assert found.found == "weight_packed int32 [3072, 72]"
    assert found.kernel == "M/CompressedTensorsWNA16/MarlinLinearKernel"


def test_other_shape_names_the_layer() -> None:
    loaded = {"model.layers.3.mlp.gate_up_proj.weight_packed": ["int32", [3072, 144]]}
    note = describe(layer(), loaded, W4, False).note
    assert note == "model.layers.3.mlp.gate_up_proj stores [3072, 144], expected [3072, 72]"
    half = {"model.layers.3.mlp.gate_up_proj.weight": ["bfloat16", [3072, 288]]}
    assert "stores [3072, 288], expected [3072, 576]" in describe(layer(), half, None, False).note
    assert describe(layer(), half, None, True).note == "", "nothing is known of a checkpoint that is taken as it is"


@pytest.mark.parametrize(
    ("group", "scheme", "kernel", "fallback"),
    [
        (FP8, "CompressedTensorsW8A8Fp8", "CutlassFP8ScaledMMLinearKernel", False),
        (FP8, "CompressedTensorsW8A16Fp8", "", True),
        (FP8, "CompressedTensorsW8A8Fp8", "MarlinFP8ScaledMMLinearKernel", True),
        (W8A8, "CompressedTensorsW8A8Int8", "CutlassInt8ScaledMMLinearKernel", False),
        (W8A8, "CompressedTensorsWNA16", "MarlinLinearKernel", True),
        (W4, "CompressedTensorsWNA16", "MarlinLinearKernel", False),  # 16-bit activations are what it wants
        (None, "", "", False),
    ],
)
def test_weight_only_fallback(group: QuantGroup | None, scheme: str, kernel: str, fallback: bool) -> None:
    assert weight_only_fallback(layer(scheme=scheme, kernel=kernel), group) is fallback


def test_fallback_makes_the_scheme_not_applied() -> None:
    quant = QuantConfig("fp8-weights", "evalq", kv_cache_dtype="bfloat16", groups={"linear": FP8})
    name = "model.layers.0.self_attn.o_proj"
    rank = {
        "as_loaded": [[f"{name}.weight", "float8_e4m3fn", [576, 576], 1]],
        "layers": [{**layer(name, "CompressedTensorsW8A16Fp8"), "size": [576, 576]}],
        "parameters": {}, "packed_modules": {}, "memory": {},
        "kv_cache": {"dtypes": ["bfloat16"]},
        "kv_scales": {"layers": 1, "k_min": 1.0, "k_max": 1.0, "v_min": 1.0, "v_max": 1.0, "attention_backends": ["X"]},
    }  # fmt: skip
    config = RunConfig(model=ModelConfig(name="m", bos="never"), quant=quant)
    settings: dict[str, Any] = {"kv_cache_dtype": "bfloat16"}
    applied = check_applied(config, settings, [rank])
    wanted = f"scheme fp8-weights was not applied: weight-only fallback: {name} runs M/CompressedTensorsW8A16Fp8"
    assert any(problem.startswith(wanted) for problem in applied.problems)
    assert not applied.ok
    assert applied.layers[0].layers == 1
    assert [kind.note for kind in layer_kinds(config, rank)] == [applied.layers[0].note]


def test_alike_layers_are_counted_together() -> None:
    loaded: dict[str, list[Any]] = {}
    some = [describe(layer(f"model.layers.{i}.mlp.down_proj"), loaded, None, False) for i in range(30)]
    assert [(kind.name, kind.layers) for kind in kinds(some)] == [("model.layers.*.mlp.down_proj", 30)]


def test_group_of_a_fused_layer() -> None:
    quant = QuantConfig("x", "evalq", groups={"a": W8A8, "f": W4}, kv_cache_dtype="bfloat16", ignore=["lm_head"])
    assert group_of(quant, ["model.layers.0.self_attn.q_proj"]) is W8A8
    assert group_of(quant, ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]) is W4
    assert group_of(quant, ["lm_head"]) is None
    assert group_of(dataclasses.replace(quant, origin="checkpoint"), ["model.layers.0.mlp.gate_proj"]) is None
