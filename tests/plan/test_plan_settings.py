"""Needs of a model: filled in where the config is silent, never over what the user chose."""

from __future__ import annotations

from evalq.config import RunConfig
from evalq.facts.gpus import gpu_facts
from evalq.facts.models import facts_of
from evalq.plan.compose import compose, parse
from evalq.plan.feasibility import violations
from evalq.plan.settings import engine_settings, with_needs


def cell(*overrides: str) -> RunConfig:
    request = parse(list(overrides))
    return compose(request, request.cells()[0])


def needy(gpu: str, *overrides: str) -> RunConfig:
    config = cell("model=deepseek-v3.2", f"gpu={gpu}", *overrides)
    return with_needs(config, facts_of(config.model), gpu_facts(gpu))


def test_needs_are_written_into_the_config() -> None:
    engine = needy("mi325x").engine
    assert (engine.tensor_parallel_size, engine.block_size) == (8, 1)
    assert engine.env == {"VLLM_ROCM_USE_AITER": "1", "AITER_ENABLE_VSKIP": "0"}
    assert needy("h200").engine.block_size is None
    assert needy("h200").engine.env == {}


def test_the_user_wins() -> None:
    engine = needy("mi325x", "engine.block_size=16", "engine.env.AITER_ENABLE_VSKIP=1").engine
    assert engine.block_size == 16
    assert engine.env["AITER_ENABLE_VSKIP"] == "1"
    assert needy("mi325x", "engine.tensor_parallel_size=16").engine.tensor_parallel_size == 16


def test_several_gpus_mean_nothing_to_the_cpu_engine() -> None:
    assert needy("cpu").engine.tensor_parallel_size == 1


def test_writing_twice_changes_nothing() -> None:
    once = needy("mi325x")
    assert with_needs(once, facts_of(once.model), gpu_facts("mi325x")) == once


def test_the_longest_window_sets_the_length() -> None:
    config = cell("model=llama3-8b", "gpu=h200", "tasks.perplexity_window=4096", "tasks.choice_window=512")
    facts, gpu = facts_of(config.model), gpu_facts("h200")
    assert engine_settings(config, facts, gpu).max_model_len == 4096 + 64
    config.tasks.perplexity_window = 8192
    assert engine_settings(config, facts, gpu).max_model_len == 8192 + 64
    assert [v.rule for v in violations(config)] == ["context-length"]  # the model has 8,192 positions
