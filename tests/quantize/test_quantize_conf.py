"""conf/quant: every scheme fits its schema, says its KV dtype, and fits the shapes of the small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from evalq.config import QuantConfig, RunConfig
from evalq.config_check import check
from evalq.errors import ConfigError
from evalq.facts.gpus import CAPABILITIES
from evalq.quantize.scheme import assign_layers, check_scheme
from evalq.quantize.tensors import TensorInfo

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "quant"
NAMES = [
    "baseline", "fp8-ds-mla-kv", "fp8-kv", "fp8-kv-calibrated", "fp8-kv-e5m2", "fp8-kv-per-head", "fp8-static",
    "fp8-weights", "fp8-weights-kv", "int4-kv-per-head", "int8-kv-per-head", "int8-w8a8", "mixed-4-8", "w4a16",
]  # fmt: skip
HIDDEN, INTERMEDIATE, KV = 576, 1536, 192  # SmolLM2-135M


def load(name: str, *overrides: str) -> QuantConfig:
    data = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert data.pop("defaults") == ["base_quant", "_self_"]
    merged = OmegaConf.merge(OmegaConf.structured(QuantConfig), data, OmegaConf.from_dotlist(list(overrides)))
    quant = OmegaConf.to_object(merged)
    assert isinstance(quant, QuantConfig)
    return quant


def smollm2() -> dict[str, TensorInfo]:
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN), "self_attn.v_proj": (KV, HIDDEN)}
    shapes |= {"self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE)}
    shapes |= {"mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN)}
    tensors = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    tensors["model.embed_tokens.weight"] = (49152, HIDDEN)
    return {name: TensorInfo(name, Path("x"), "BF16", shape, 0, 0) for name, shape in tensors.items()}


def test_the_folder_holds_exactly_these() -> None:
    assert sorted(file.name for file in FOLDER.iterdir()) == sorted(f"{name}.yaml" for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_scheme_is_a_valid_config(name: str) -> None:
    quant = load(name)
    assert quant.name == name
    assert set(quant.needs) <= set(CAPABILITIES)
    with pytest.raises(ConfigError) as error:  # the model is empty here
        check(RunConfig(quant=quant))
    assert not [problem for problem in error.value.problems if "quant" in problem]
    assert (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").startswith(f"# {name}: ")


@pytest.mark.parametrize("name", NAMES)
def test_made_schemes_fit_the_small_model(name: str) -> None:
    quant = load(name)
    if quant.origin != "evalq" or not quant.groups:
        return
    check_scheme(quant)
    layers = assign_layers(smollm2(), {"model_type": "llama"}, quant)
    assert len(layers) == (6 if name == "mixed-4-8" else 7)


def test_no_two_schemes_are_the_same() -> None:
    def effective(name: str) -> Any:
        quant = load(name)
        return quant.origin, quant.kv_cache_dtype, str(quant.groups)

    assert len({str(effective(name)) for name in NAMES}) == len(NAMES)


def test_group_size_can_be_overridden_and_is_checked() -> None:
    quant = load("mixed-4-8", "groups.feed_forward.weights.group_size=128")
    with pytest.raises(ConfigError, match="group_size=128 does not divide in_features=576"):
        assign_layers(smollm2(), {}, quant)
