"""The ledger: figures by hand, against what an H200 measured, and properties of splitting."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalq.config import QuantConfig, RunConfig
from evalq.facts.gpus import GIB, gpu_facts
from evalq.facts.models import ModelFacts, facts_of, model_facts
from evalq.plan import memory
from evalq.plan.compose import compose, parse
from evalq.plan.memory import (
    gpu_memory,
    kv_bytes_for_context,
    kv_bytes_per_layer,
    kv_bytes_per_token,
    predict_ledger,
    stage_layers,
    stage_weight_bytes,
    weight_bytes,
)
from evalq.plan.settings import engine_settings

BASELINE = QuantConfig(name="baseline", origin="checkpoint", kv_cache_dtype="bfloat16")


def cell(*overrides: str) -> RunConfig:
    request = parse(list(overrides))
    return compose(request, request.cells()[0])


def facts_named(name: str) -> ModelFacts:
    return facts_of(cell(f"model={name}").model)


@pytest.mark.parametrize(
    ("model", "dtype", "nbytes"),
    [
        ("smollm2-135m", "bfloat16", 2 * 30 * 3 * 64 * 2),
        ("llama3-8b", "bfloat16", 131_072),
        ("llama3-8b", "fp8_e4m3", 65_536),
        ("llama3-8b", "int8_per_token_head", 2 * 32 * 8 * (128 + 4)),
        ("llama3.1-405b", "bfloat16", 516_096),
        ("kimi-k2.5", "bfloat16", 61 * 576 * 2),
        ("kimi-k2.5", "fp8_e4m3", 61 * 576),
        ("deepseek-v3.2", "bfloat16", 61 * (576 * 2 + 132)),
        ("deepseek-v3.2", "fp8_ds_mla", 61 * (656 + 132)),
        ("qwen3-vl-235b", "bfloat16", 2 * 94 * 4 * 128 * 2),
    ],
)
def test_kv_bytes_per_token(model: str, dtype: str, nbytes: int) -> None:
    assert kv_bytes_per_token(facts_named(model), dtype) == nbytes


def test_the_819_gb_claim() -> None:
    facts = facts_named("llama3.1-405b")
    assert kv_bytes_for_context(facts, "bfloat16", 32768) == 16_911_433_728  # 16.9 GB, not 819 GB


def test_latents_are_whole_on_every_gpu_and_heads_are_replicated() -> None:
    kimi, llama = facts_named("kimi-k2.5"), facts_named("llama3-8b")
    assert kv_bytes_per_token(kimi, "bfloat16", tp=4) == 4 * kv_bytes_per_token(kimi, "bfloat16")
    assert kv_bytes_per_token(llama, "bfloat16", tp=8) == kv_bytes_per_token(llama, "bfloat16")
    assert kv_bytes_per_token(llama, "bfloat16", tp=16) == 2 * kv_bytes_per_token(llama, "bfloat16")


def test_sliding_windows_hold_their_window_and_one_step() -> None:
    arch = {
        "architectures": ["MistralForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "sliding_window": 100,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    facts = model_facts(arch)
    each = kv_bytes_per_layer(facts, "bfloat16")
    assert each == 2 * 2 * 16 * 2
    assert kv_bytes_for_context(facts, "bfloat16", 1000) == each * (100 + 1000)
    assert kv_bytes_for_context(facts, "bfloat16", 1000, step_tokens=50) == each * (150 + 1000)
    assert kv_bytes_for_context(facts, "bfloat16", 60) == each * 120


# Measured on one H200 with Llama-3-8B shapes, vLLM at utilisation 0.5 and its own scheduler defaults there.
H200 = ["model=llama3-8b", "gpu=h200", "gpu.memory_utilization=0.5", "engine.max_num_batched_tokens=16384",
        "engine.max_num_seqs=1024"]  # fmt: skip


def test_against_an_h200_bf16() -> None:
    ledger = predict_ledger(cell(*H200, "quant=baseline"))
    assert ledger["weight_bytes"] is not None
    assert ledger["weight_bytes"] / GIB == pytest.approx(14.96, rel=0.01)
    assert ledger["kv_pool_tokens"] == pytest.approx(433_664, rel=0.03)


def test_against_an_h200_fp8_online_and_fp8_kv() -> None:
    online = cell(*H200, "quant=baseline", "quant.origin=engine", "quant.engine_quantization=fp8")
    weights = predict_ledger(online)["weight_bytes"]
    assert weights is not None
    assert weights / GIB == pytest.approx(8.49, rel=0.01)
    assert predict_ledger(cell(*H200, "quant=fp8-kv"))["kv_pool_tokens"] == pytest.approx(866_832, rel=0.03)


def test_ledger_has_the_names_of_the_record() -> None:
    from evalq.records import Ledger

    ledger = predict_ledger(cell("model=smollm2-135m", "quant=baseline", "gpu=cpu", "engine.block_size=16"))
    assert set(ledger) <= {field.name for field in dataclasses.fields(Ledger)}
    assert ledger["weight_bytes"] == 269_030_016
    assert ledger["kv_bytes_per_token"] == 23_040
    assert ledger["kv_pool_tokens"] == 2 * GIB // (23_040 * 16) * 16


def test_stages_as_vllm_divides_layers() -> None:
    assert [len(stage) for stage in stage_layers(32, 4)] == [8, 8, 8, 8]
    assert [len(stage) for stage in stage_layers(61, 2)] == [31, 30]
    assert [len(stage) for stage in stage_layers(126, 4)] == [31, 32, 32, 31]


@given(tp=st.sampled_from([1, 2, 4, 8]), pp=st.integers(1, 8))
def test_splitting_keeps_every_weight(tp: int, pp: int) -> None:
    facts = facts_named("llama3-8b")
    whole, split = weight_bytes(facts, BASELINE), weight_bytes(facts, BASELINE, tp=tp, pp=pp)
    norms = 2 * facts.parameters_by_part()["norms"]
    assert split == whole + (tp - 1) * norms  # norms are the only weights that every GPU of a group has
    assert len(stage_weight_bytes(facts, BASELINE, tp=tp, pp=pp)) == pp


def test_expert_parallelism_splits_experts_alike() -> None:
    facts = facts_named("qwen3-vl-235b")
    assert weight_bytes(facts, BASELINE, tp=8, ep=True) == weight_bytes(facts, BASELINE, tp=8)


def test_vocabulary_is_padded_before_it_is_split() -> None:
    assert memory.padded_vocab(100) == 128
    assert memory.padded_vocab(128_256) == 128_256


@given(utilization=st.floats(0.2, 0.95))
def test_pool_grows_with_utilisation_and_the_sum_is_the_budget(utilization: float) -> None:
    config = cell("model=llama3-8b", "quant=baseline", "gpu=h200")
    config.gpu.memory_utilization = utilization
    facts, gpu = facts_of(config.model), gpu_facts("h200")
    found = gpu_memory(facts, config.quant, gpu, engine_settings(config, facts, gpu))
    assert found.budget is not None
    assert found.fixed + found.kv_pool == found.budget


def test_smaller_schemes_take_less() -> None:
    facts = facts_named("llama3-8b")
    sizes = {
        name: weight_bytes(facts, cell("model=llama3-8b", f"quant={name}").quant)
        for name in ("baseline", "fp8-weights", "int8-w8a8", "mixed-4-8", "w4a16")
    }
    assert sizes["w4a16"] < sizes["int8-w8a8"] == sizes["fp8-weights"] < sizes["mixed-4-8"] < sizes["baseline"]
    # q, k, v, o int8 with a float32 scale per row; gate and up 4 bit in groups of 64; the rest 16 bit
    attention = 32 * (41_943_040 + 4 * (4096 + 1024 + 1024 + 4096))
    gate_up = 32 * 2 * (14336 * 4096 // 2 + 14336 * 64 * 2 + 16)
    rest = 2 * (32 * 4096 * 14336 + 2 * 128_256 * 4096 + 266_240)
    assert sizes["mixed-4-8"] == attention + gate_up + rest


def test_the_engine_keeps_copies_for_latent_attention() -> None:
    config = cell("model=kimi-k2.5", "quant=baseline", "gpu=h200")
    facts, gpu = facts_of(config.model), gpu_facts("h200")
    settings = dataclasses.replace(engine_settings(config, facts, gpu), tensor_parallel_size=8)
    assert gpu_memory(facts, config.quant, gpu, settings).absorbed == 61 * 8 * (128 + 128) * 512 * 2
