"""Scales layer by layer: claimed, stored, used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evalq.config import QuantConfig
from evalq.measure.kv.scales import checkpoint_scales, layer_number, layers_of, problems_of, source_of

DEFAULT = QuantConfig("fp8-kv", kv_cache_dtype="fp8_e4m3", kv_scale_source="default 1.0")
CALIBRATED = QuantConfig("cal", "evalq", kv_cache_dtype="fp8_e4m3", kv_scale_source="computed")
STORED = {0: {"k": 0.5, "v": 0.25}, 1: {"k": 0.75, "v": 0.125}}


def engine(scales: list[tuple[float, float]], dtype: str = "fp8_e4m3", computed: bool = False) -> Any:
    """What evalq_kv_layers answers, deepest layer first: the order must not matter."""
    layers = {
        f"model.layers.{i}.self_attn.attn": {
            "k_scale": [k], "v_scale": [v], "kv_dtype": dtype, "implementation": "X", "computed_by_engine": computed,
        }
        for i, (k, v) in enumerate(scales)
    }  # fmt: skip
    return layers_of(dict(reversed(layers.items())))


LOADED = [(0.5, 0.25), (0.75, 0.125)]
ONES = [(1.0, 1.0), (1.0, 1.0)]


def test_scales_as_claimed() -> None:
    assert problems_of(CALIBRATED, engine(LOADED), STORED) == []
    assert source_of(CALIBRATED, engine(LOADED), STORED) == "computed"
    assert problems_of(DEFAULT, engine(ONES), {}) == []
    assert source_of(DEFAULT, engine(ONES), {}) == "default 1.0"
    own = QuantConfig("own", kv_cache_dtype="fp8_e4m3", kv_scale_source="checkpoint")
    assert source_of(own, engine(LOADED), STORED) == "checkpoint"
    doubled = engine([(1.0, 0.5), (1.5, 0.25)])  # AMD's E4M3
    assert problems_of(CALIBRATED, doubled, STORED) == []


def test_found_but_not_loaded_names_the_layer() -> None:
    """a4."""
    found = problems_of(CALIBRATED, engine([(0.5, 0.25), (1.0, 1.0)]), STORED)
    assert len(found) == 1
    assert "KV scales found but not loaded: model.layers.1.self_attn.attn uses 1 and 1" in found[0]
    assert "the checkpoint has 0.75 and 0.125" in found[0]
    assert "(and 1 more layers)" in problems_of(CALIBRATED, engine(ONES), STORED)[0]
    assert source_of(CALIBRATED, engine(ONES), STORED) == "default 1.0"


def test_claims_without_a_checkpoint_that_has_them() -> None:
    assert "the checkpoint has no KV scales" in problems_of(CALIBRATED, engine(ONES), {})[0]
    assert "uses KV scales 0.5 and 0.25, not 1.0" in problems_of(DEFAULT, engine(LOADED), STORED)[0]
    assert source_of(DEFAULT, engine(LOADED), {}) == "unknown"
    assert source_of(DEFAULT, engine(ONES, computed=True), {}) == "computed at run time"
    assert source_of(DEFAULT, [], {}) == "unknown"


@pytest.mark.parametrize(
    ("dtype", "source"), [("bfloat16", "none"), ("int8_per_token_head", "dynamic"), ("fp8_ds_mla", "dynamic")]
)
def test_other_formats(dtype: str, source: str) -> None:
    quant = QuantConfig("x", kv_cache_dtype=dtype, kv_scale_source=source)
    assert source_of(quant, engine(ONES, dtype), {}) == source
    assert problems_of(quant, engine(ONES, dtype), {}) == []


def test_a_layer_that_keeps_16_bit_is_named() -> None:
    """a2, a3: one layer left at the model's own dtype."""
    layers = [*engine(ONES)[:1], *engine(ONES, "bfloat16")[1:]]
    assert (
        "model.layers.1.self_attn.attn keeps its KV cache as bfloat16, not fp8_e4m3"
        in problems_of(DEFAULT, layers, {})[0]
    )
    assert problems_of(DEFAULT, engine(ONES, "fp8"), {}) == []
    baseline = QuantConfig("baseline", kv_cache_dtype="bfloat16")
    assert problems_of(baseline, engine(ONES, "auto"), {}) == []
    assert "keeps its KV cache as fp8_e4m3, not bfloat16" in problems_of(baseline, engine(ONES), {})[0]


def test_names_of_checkpoints(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file(
        {
            "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
            "model.layers.0.self_attn.v_scale": torch.tensor([0.25]),
            "model.layers.11.self_attn.k_proj.k_scale": torch.tensor([0.5, 0.75]),
            "model.layers.11.self_attn.v_proj.v_scale": torch.tensor(0.125),
            "model.layers.0.mlp.up_proj.weight_scale": torch.tensor(9.0),
        },
        tmp_path / "a.safetensors",
    )
    assert checkpoint_scales(tmp_path) == {0: {"k": 0.5, "v": 0.25}, 11: {"k": 0.75, "v": 0.125}}
    assert [layer_number(name) for name in ("model.layers.7.x", "transformer.h.12.attn", "x")] == [7, 12, -1]
