"""Which layer gets what, and every way in which a scheme does not fit a model."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from tiny_checkpoint import (
    FP8,
    INT8,
    INT8_INPUT,
    fp8,
    int4,
    int8,
    mixed,
    scheme,
    tiny_tensors,
    w4a16,
    write_checkpoint,
)

from evalq.config import QuantArgs, QuantConfig, QuantGroup
from evalq.errors import ConfigError
from evalq.quantize.scheme import Layer, assign_layers
from evalq.quantize.tensors import check_folder, read_config


def assign(folder: Path, quant: QuantConfig) -> dict[str, Layer]:
    return assign_layers(check_folder(folder), read_config(folder), quant)


def refused(folder: Path, quant: QuantConfig) -> str:
    with pytest.raises(ConfigError) as error:
        assign(folder, quant)
    return str(error.value)


def test_linear_means_every_projection_and_nothing_else(tiny: Path) -> None:
    layers = assign(tiny, w4a16())
    assert len(layers) == 14
    assert all("proj" in name for name in layers)


def test_mixed_leaves_down_alone(tiny: Path) -> None:
    layers = assign(tiny, mixed())
    assert layers["model.layers.1.self_attn.o_proj"].group == "attention"
    assert layers["model.layers.0.mlp.up_proj"].group == "feed_forward"
    assert "model.layers.0.mlp.down_proj" not in layers
    assert len(layers) == 12


def test_a_pattern_goes_before_the_class(tiny: Path) -> None:
    quant = scheme(
        rest=QuantGroup(["Linear"], INT8, INT8_INPUT), gates=QuantGroup(["re:.*(gate|up)_proj$"], int4(), None)
    )
    layers = assign(tiny, quant)
    assert layers["model.layers.0.mlp.gate_proj"].group == "gates"
    assert layers["model.layers.0.mlp.down_proj"].group == "rest"


def test_group_size_that_does_not_divide(tiny: Path) -> None:
    assert refused(tiny, w4a16(group_size=48)).startswith(
        "group_size=48 does not divide in_features=64 (model.layers.0.mlp.down_proj"
    ) or "group_size=48 does not divide in_features=64" in refused(tiny, w4a16(group_size=48))
    assert "use 32 or 64" in refused(tiny, w4a16(group_size=48))
    assert "in_features=128" in refused(tiny, w4a16(group_size=48))
    assert "use 32, 64 or 128" in refused(tiny, w4a16(group_size=48))


def test_fused_layers_must_share(tiny: Path) -> None:
    quant = scheme(a=QuantGroup(["re:.*q_proj$"], INT8, INT8_INPUT), b=QuantGroup(["re:.*(k|v)_proj$"], int4(), None))
    text = refused(tiny, quant)
    assert "self_attn.k_proj (group b)" in text
    assert "self_attn.q_proj (group a)" in text
    only_gate = scheme(g=QuantGroup(["re:.*gate_proj$"], int4(), None))
    assert "mlp.up_proj (16 bit)" in refused(tiny, only_gate)


def test_target_without_a_match_names_the_nearest(tiny: Path) -> None:
    text = refused(tiny, scheme(a=QuantGroup(["re:.*self_atn[.](q|k)_proj$"], INT8, INT8_INPUT)))
    assert "re:.*self_atn" in text
    assert "matches no layer" in text
    assert "model.layers.*.self_attn.q_proj" in text


def test_overlapping_groups_are_refused(tiny: Path) -> None:
    quant = scheme(a=QuantGroup(["re:.*proj$"], INT8, INT8_INPUT), b=QuantGroup(["re:.*o_proj$"], int4(), None))
    assert "groups a and b" in refused(tiny, quant)


def test_vision_tower_is_refused_by_name_case_b7(tmp_path: Path) -> None:
    tensors = {**tiny_tensors(), "model.visual.blocks.0.attn.qkv.weight": torch.ones(96, 32, dtype=torch.bfloat16)}
    folder = write_checkpoint(tmp_path / "vl", tensors)
    text = refused(folder, fp8())
    assert "model.visual.blocks.0.attn.qkv" in text
    assert "re:.*visual.*" in text
    quant = fp8()
    quant.ignore.append("re:.*visual.*")
    assert not any("visual" in name for name in assign(folder, quant))


def test_experts_share_one_scheme(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.0.mlp.experts.{e}.{name}.weight": torch.ones(32, 32, dtype=torch.bfloat16)
        for e in range(2)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    folder = write_checkpoint(tmp_path / "moe", tensors)
    assert len(assign(folder, w4a16())) == 6
    half = scheme(g=QuantGroup(["re:.*(gate|up)_proj$"], int4(), None))
    assert "must share a scheme" in refused(folder, half)


def test_stacked_experts_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    folder = write_checkpoint(tmp_path / "moe", {**tiny_tensors(), name: torch.ones(2, 8, 8, dtype=torch.bfloat16)})
    assert name in refused(folder, fp8())


def test_quantised_and_transposed_sources_are_refused(tmp_path: Path) -> None:
    done = write_checkpoint(tmp_path / "fp8", tiny_tensors(), quantization_config={"quant_method": "fp8"})
    assert "quantised already (fp8)" in refused(done, int8())
    gpt2 = write_checkpoint(tmp_path / "gpt2", tiny_tensors(), model_type="gpt2")
    assert "transposed" in refused(gpt2, int8())
    ints = {name: tensor.to(torch.int8) for name, tensor in tiny_tensors().items()}
    assert "I8" in refused(write_checkpoint(tmp_path / "ints", ints), int8())


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (QuantGroup(["Linear"], QuantArgs(8, "int", "channel", symmetric=False), None), "symmetric"),
        (QuantGroup(["Linear"], QuantArgs(8, "int", "tensor"), None), "strategy"),
        (QuantGroup(["Linear"], QuantArgs(8, "float", "block"), None), "strategy"),
        (QuantGroup(["Linear"], QuantArgs(3, "int", "channel"), None), "num_bits=3"),
        (QuantGroup(["Linear"], QuantArgs(4, "float", "channel"), None), "num_bits=4"),
        (QuantGroup(["Linear"], INT8, QuantArgs(8, "int", "tensor")), "input_activations"),
        (QuantGroup(["Linear"], FP8, INT8_INPUT), "input_activations"),
        (QuantGroup(["Linear"], None, None), "no weights"),
        (QuantGroup(["re:(", "Linear"], INT8, None), "regular expression"),
    ],
)
def test_what_evalq_cannot_make(tiny: Path, group: QuantGroup, words: str) -> None:
    assert words in refused(tiny, scheme(g=group))


def test_a_scheme_without_a_checkpoint_to_make(tiny: Path) -> None:
    baseline = QuantConfig(name="baseline", origin="checkpoint", kv_cache_dtype="bfloat16")
    assert "no checkpoint to make" in refused(tiny, baseline)
