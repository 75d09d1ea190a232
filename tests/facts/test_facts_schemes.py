"""What schemes store: bytes by hand, matching as compressed-tensors does it, published checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalq.config import QuantArgs, QuantConfig, QuantGroup
from evalq.errors import ConfigError
from evalq.facts.models import ModelFacts, model_facts
from evalq.facts.schemes import (
    ITEM_BYTES,
    LayerScheme,
    assign,
    bits_per_weight,
    matches,
    stored_tensors,
)
from evalq.plan.compose import compose, parse

W4 = LayerScheme("pack-quantized", 4, "group", 64, 16, "g")
INT8 = LayerScheme("int-quantized", 8, "channel", None, 8, "g")
FP8 = LayerScheme("float-quantized", 8, "channel", None, 8, "g")
BLOCK = LayerScheme("fp8-block", 8, "block", 128, 8, "g")
MXFP4 = LayerScheme("mxfp4", 4, "group", 32, 16, "g")


def facts_named(name: str) -> ModelFacts:
    request = parse([f"model={name}"])
    return model_facts(compose(request, request.cells()[0]).model.arch)


def sizes(shape: tuple[int, int], scheme: LayerScheme | None) -> dict[str, int]:
    return {tensor.suffix: tensor.nbytes for tensor in stored_tensors(shape, 0, scheme, "bfloat16")}


def test_bytes_by_hand() -> None:
    assert sizes((576, 1536), None) == {"weight": 576 * 1536 * 2}
    assert sizes((576, 1536), W4) == {
        "weight_packed": 576 * 192 * 4, "weight_scale": 576 * 24 * 2, "weight_shape": 16,
    }  # fmt: skip
    assert sizes((576, 1536), INT8) == {"weight": 576 * 1536, "weight_scale": 576 * 4}
    assert sizes((576, 1536), FP8) == {"weight": 576 * 1536, "weight_scale": 576 * 4}
    assert sizes((576, 1536), BLOCK) == {"weight": 576 * 1536, "weight_scale_inv": 5 * 12 * 4}
    assert sizes((576, 1536), MXFP4) == {"weight": 576 * 768, "weight_scale": 576 * 48}


def test_bits_per_weight() -> None:
    assert bits_per_weight(None, (64, 64)) == 16.0
    assert bits_per_weight(W4, (4096, 4096)) == pytest.approx(4.25, abs=0.001)
    assert bits_per_weight(MXFP4, (4096, 4096)) == pytest.approx(4.25)


@given(out=st.integers(1, 300), into=st.integers(1, 300), bias=st.integers(0, 300))
def test_packing_never_loses_a_weight(out: int, into: int, bias: int) -> None:
    tensors = {t.suffix: t for t in stored_tensors((out, into), bias, W4, "bfloat16")}
    packed = tensors["weight_packed"]
    assert packed.shape[0] == out
    assert packed.shape[1] * 8 >= into > (packed.shape[1] - 1) * 8
    assert all(t.nbytes % ITEM_BYTES[t.dtype] == 0 for t in tensors.values())
    assert ("bias" in tensors) == (bias > 0)


def test_matching() -> None:
    assert matches("model.layers.3.mlp.up_proj", "re:.*mlp[.](gate|up)_proj$")
    assert not matches("model.layers.3.mlp.down_proj", "re:.*mlp[.](gate|up)_proj$")
    assert not matches("model.layers.3.mlp.up_proj", "re:mlp")  # from the start, as re.match
    assert matches("lm_head", "lm_head")
    with pytest.raises(ConfigError, match="no regular expression"):
        matches("x", "re:(")


def test_names_go_before_the_class_and_ignore_before_all() -> None:
    weights = QuantArgs(num_bits=8)
    quant = QuantConfig(
        name="x",
        origin="evalq",
        kv_cache_dtype="bfloat16",
        groups={
            "rest": QuantGroup(["Linear"], weights, None),
            "first": QuantGroup(["re:.*layers[.]0[.].*"], QuantArgs(num_bits=4, strategy="group", group_size=32), None),
        },
        ignore=["lm_head", "re:.*o_proj"],
    )
    by_layer = {}
    for module, scheme in assign(facts_named("llama3-8b"), quant):
        for layer in module.layers or (-1,):
            by_layer[module.name.replace("{layer}", str(layer))] = scheme
    assert by_layer["lm_head"] is None
    assert by_layer["model.layers.0.self_attn.o_proj"] is None
    first, second = by_layer["model.layers.0.mlp.up_proj"], by_layer["model.layers.1.mlp.up_proj"]
    assert first is not None
    assert first.group == "first"
    assert second is not None
    assert second.group == "rest"
    assert by_layer["model.embed_tokens"] is None


def test_published_weights_keep_their_own_scheme() -> None:
    baseline = QuantConfig(name="baseline", origin="checkpoint", kv_cache_dtype="bfloat16")
    deepseek = {m.name: s for m, s in assign(facts_named("deepseek-v3.2"), baseline)}
    experts = deepseek["model.layers.{layer}.mlp.experts.0.up_proj"]
    assert experts is not None
    assert experts.format == "fp8-block"
    assert deepseek["lm_head"] is None
    kimi = {m.name: s for m, s in assign(facts_named("kimi-k2.5"), baseline)}
    packed = kimi["language_model.model.layers.{layer}.mlp.experts.0.up_proj"]
    assert packed is not None
    assert (packed.format, packed.num_bits, packed.group_size) == ("pack-quantized", 4, 32)
    assert kimi["language_model.model.layers.{layer}.self_attn.o_proj"] is None
    assert kimi["language_model.model.layers.{layer}.mlp.shared_experts.up_proj"] is None
    assert kimi["mm_projector.proj.0"] is None


def test_online_fp8_leaves_head_and_embeddings() -> None:
    quant = QuantConfig(name="x", origin="engine", engine_quantization="fp8", kv_cache_dtype="bfloat16")
    kinds = {m.name: s for m, s in assign(facts_named("llama3-8b"), quant)}
    assert kinds["lm_head"] is None
    assert kinds["model.embed_tokens"] is None
    assert kinds["model.layers.{layer}.mlp.up_proj"] is not None


def test_unknown_online_scheme() -> None:
    quant = QuantConfig(name="x", origin="engine", engine_quantization="fp9", kv_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match="did you mean fp8"):
        assign(facts_named("llama3-8b"), quant)
