"""Capacity, the smallest group of GPUs, the roofline, and the articles' claims."""

from __future__ import annotations

import dataclasses

import pytest

from evalq.config import RunConfig
from evalq.facts.gpus import gpu_facts
from evalq.facts.models import facts_of
from evalq.plan.answer import Ask, plan
from evalq.plan.claims import claims
from evalq.plan.compose import compose, parse
from evalq.plan.roofline import roofline, share_of_experts, step_bytes
from evalq.plan.settings import engine_settings
from evalq.plan.show import as_data, matrix, one_cell


def cell(*overrides: str) -> RunConfig:
    request = parse(list(overrides))
    return compose(request, request.cells()[0])


def test_the_smallest_group_that_fits_is_chosen() -> None:
    # 141.1 GB of weights: one A100-80GB never, two just so.
    answer = plan(cell("model=llama3-70b", "quant=baseline", "gpu=a100-80g", "gpu.memory_utilization=0.95"))
    assert (answer.gpus, answer.smallest_tp, answer.feasible) == (2, 2, True)
    assert plan(cell("model=llama3-70b", "quant=w4a16", "gpu=a100-80g")).gpus == 1


def test_what_the_user_says_stays() -> None:
    overrides = ["model=llama3-70b", "quant=baseline", "gpu=a100-80g", "engine.tensor_parallel_size=1"]
    answer = plan(cell(*overrides), Ask(explicit=frozenset({"engine.tensor_parallel_size"})))
    assert answer.gpus == 1
    assert not answer.feasible


def test_needs_of_the_model_are_followed() -> None:
    answer = plan(cell("model=deepseek-v3.2", "quant=baseline", "gpu=mi325x"))
    assert answer.gpus == 8
    assert answer.settings.block_size == 1
    assert answer.settings.env == {"VLLM_ROCM_USE_AITER": "1", "AITER_ENABLE_VSKIP": "0"}
    assert plan(cell("model=deepseek-v3.2", "quant=baseline", "gpu=h200")).settings.env == {}


def test_sparse_latents_are_packed_where_the_backend_packs_them() -> None:
    assert plan(cell("model=deepseek-v3.2", "quant=fp8-kv", "gpu=h200")).settings.kv_cache_dtype == "fp8_ds_mla"
    assert plan(cell("model=deepseek-v3.2", "quant=fp8-kv", "gpu=b200")).settings.kv_cache_dtype == "fp8_e4m3"


def test_context_and_concurrency() -> None:
    ask = Ask(context=32768, concurrency=1000)
    answer = plan(cell("model=llama3.1-405b", "quant=baseline", "gpu=mi325x"), ask)
    assert answer.kv_bytes_per_request == 32768 * 516_096
    assert answer.kv_bytes_asked == 1000 * 32768 * 516_096
    assert answer.largest_concurrency < 1000
    assert answer.smallest_tp is None
    assert answer.largest_context <= 131_072
    pool = answer.memory.kv_pool
    per_request = answer.kv_bytes_per_request // answer.gpus
    assert answer.largest_concurrency == pool // per_request


def test_largest_context_is_what_the_pool_or_the_model_allows() -> None:
    wide = plan(cell("model=llama3-8b", "quant=baseline", "gpu=h200"))
    assert wide.largest_context == 8192
    tight = plan(cell("model=llama3-8b", "quant=baseline", "gpu=rtx4090", "gpu.memory_utilization=0.72"))
    assert 0 < tight.largest_context < 8192
    assert tight.largest_context <= tight.memory.kv_pool // tight.memory.kv_per_token


def test_offload_pool_in_tokens() -> None:
    answer = plan(cell("model=llama3.1-405b", "gpu=mi325x", "engine.extra={kv_offloading_size: 64}"))
    assert answer.offload_tokens == 64 * 1024**3 // 516_096


def test_roofline_by_hand() -> None:
    config = cell("model=llama3-8b", "quant=baseline", "gpu=h200")
    facts, gpu = facts_of(config.model), gpu_facts("h200")
    settings = engine_settings(config, facts, gpu)
    weights = 2 * (facts.active_parameters())
    assert step_bytes(facts, config.quant, settings, 0, 1) == weights
    bound = roofline(facts, config.quant, gpu, settings, context=1, concurrency=1)
    assert bound is not None
    assert bound.decode_tokens_per_second == pytest.approx(4.8e12 / weights, rel=0.001)
    assert bound.decode_bound_by == "memory"
    assert bound.prefill_tokens_per_second == pytest.approx(989.4e12 / weights, rel=0.001)
    # An H200 scored 43,000 tokens/s of prompts in bf16 and 67,600 with FP8 weights: below the bounds, as they must be.
    fp8 = roofline(facts, cell("model=llama3-8b", "quant=fp8-weights").quant, gpu, settings, 1, 1)
    assert fp8 is not None
    assert bound.prefill_tokens_per_second > 43_000
    assert fp8.prefill_tokens_per_second > 67_600


def test_experts_touched() -> None:
    facts = facts_of(cell("model=qwen3-vl-235b").model)
    assert share_of_experts(facts, 1) == pytest.approx(8 / 128)
    assert share_of_experts(facts, 1000) == pytest.approx(1.0)
    assert share_of_experts(facts_of(cell("model=llama3-8b").model), 1) == 1.0


def test_no_roofline_for_the_cpu() -> None:
    assert plan(cell("model=smollm2-135m", "gpu=cpu")).roofline is None


def test_claims() -> None:
    rows = {claim.says: claim.computes for claim in claims()}
    assert "16.9 GB" in rows["at 32K: 819 GB"]
    assert "516,096 B" in rows["Llama-3.1-405B, BF16 KV: 26.2 MB per token"]
    assert "16.9 TB" in rows["1,000 requests of 32K: 800 TB"]
    assert rows["FP8 KV halves KV memory"].startswith("0.50")


def test_text_and_data_agree() -> None:
    answer = plan(cell("model=llama3-8b", "quant=fp8-kv", "gpu=a100-80g"))
    text, data = one_cell(answer), as_data(answer)
    assert "REFUSED" in text
    assert "fp8-kv-device" in text
    assert data["feasible"] is False
    assert data["violations"][0]["rule"] == "fp8-kv-device"
    assert f"{data['predicted']['kv_pool_tokens']:,} tokens" in text
    assert "fp8-kv-device" in matrix([answer])
    assert dataclasses.is_dataclass(answer)
