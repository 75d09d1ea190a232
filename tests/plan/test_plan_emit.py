"""The engine's command: exact, and accepted by vLLM's own argument parser for every feasible model x quant."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from evalq.facts.confdir import names
from evalq.plan.answer import Answer, plan
from evalq.plan.compose import compose, parse
from evalq.plan.emit import engine_command


def answers(*overrides: str) -> list[Answer]:
    request = parse(list(overrides))
    return [plan(compose(request, chosen)) for chosen in request.cells()]


def command(*overrides: str) -> Any:
    answer = answers(*overrides)[0]
    return engine_command(answer.config, answer.gpu_facts, answer.settings)


def test_aiter_variables_and_flags() -> None:
    made = command("model=deepseek-v3.2", "quant=baseline", "gpu=mi325x", "engine.max_model_len=4096")
    assert made.env == {"VLLM_ROCM_USE_AITER": "1", "AITER_ENABLE_VSKIP": "0"}
    text = shlex.join(made.argv)
    assert text.startswith("vllm serve deepseek-ai/DeepSeek-V3.2 --dtype bfloat16 --kv-cache-dtype bfloat16")
    for flags in ("--tensor-parallel-size 8", "--block-size 1", "--max-model-len 4096", "--enable-prefix-caching"):
        assert flags in text
    assert made.render().startswith("VLLM_ROCM_USE_AITER=1 AITER_ENABLE_VSKIP=0 vllm serve")


def test_the_cpu_has_a_pool_and_no_share() -> None:
    made = command("model=smollm2-135m", "quant=baseline", "gpu=cpu")
    assert made.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "--gpu-memory-utilization" not in made.argv


def test_extra_arguments_and_online_quantization() -> None:
    made = command("model=llama3-8b", "gpu=h200", "quant.origin=engine", "quant.engine_quantization=fp8",
                   "engine.extra={kv_offloading_size: 64, compilation_config: {level: 3}}")  # fmt: skip
    text = shlex.join(made.argv)
    assert "--quantization fp8" in text
    assert "--kv-offloading-size 64" in text
    assert made.argv[made.argv.index("--compilation-config") + 1] == '{"level": 3}'


def test_made_checkpoints_are_named() -> None:
    made = command("model=llama3-8b", "quant=w4a16", "gpu=h200")
    assert made.argv[2] == "checkpoints/llama3-8b--w4a16"
    assert made.notes


@pytest.mark.engine
@pytest.mark.parametrize("gpu", ["h200", "mi325x", "cpu"])
def test_vllm_accepts_every_feasible_command(gpu: str) -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    argparse_utils = pytest.importorskip("vllm.utils.argparse_utils")
    parser = arg_utils.EngineArgs.add_cli_args(argparse_utils.FlexibleArgumentParser())
    feasible = [a for a in answers("model=all", "quant=all", f"gpu={gpu}") if a.feasible]
    assert len(feasible) >= len(names("quant"))
    for answer in feasible:
        argv = engine_command(answer.config, answer.gpu_facts, answer.settings).argv
        parsed = parser.parse_args(["--model", *argv[2:]])
        assert parsed.kv_cache_dtype == answer.settings.kv_cache_dtype
        assert parsed.tensor_parallel_size == answer.settings.tensor_parallel_size
        assert parsed.max_num_seqs == answer.settings.max_num_seqs
        assert parsed.enable_prefix_caching is answer.config.engine.enable_prefix_caching
