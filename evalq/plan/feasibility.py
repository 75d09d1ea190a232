"""Will it run? Every rule that a cell breaks, and the rule behind an engine's error text."""

from __future__ import annotations

import re

from evalq.config import RunConfig
from evalq.errors import InfeasibleError
from evalq.facts.gpus import GpuFacts
from evalq.facts.models import ModelFacts, facts_of
from evalq.facts.schemes import assign
from evalq.plan.memory import cell_memory, resolve_gpu
from evalq.plan.rulebook import RETIRED_FLAGS, RETIRED_QUANTIZATIONS, RULES
from evalq.plan.rules_device import check_amd, check_capabilities, check_cpu, check_kv_format
from evalq.plan.rules_engine import check_counts, check_flags, check_memory, check_offload, check_scheduler
from evalq.plan.rules_shape import check_layers, check_parallelism, check_scheme
from evalq.plan.settings import Settings, engine_settings
from evalq.plan.violation import Look, Violation

CHECKS = (
    check_scheme,
    check_capabilities,
    check_kv_format,
    check_parallelism,
    check_layers,
    check_counts,
    check_memory,
    check_scheduler,
    check_offload,
    check_flags,
    check_amd,
    check_cpu,
)


def violations(
    config: RunConfig,
    facts: ModelFacts | None = None,
    gpu: GpuFacts | None = None,
    settings: Settings | None = None,
) -> list[Violation]:
    """Every rule the cell breaks, errors first. Facts and settings are worked out when not given."""
    facts = facts or facts_of(config.model)
    gpu = gpu or resolve_gpu(config)
    settings = settings or engine_settings(config, facts, gpu)
    look = Look(
        config=config,
        facts=facts,
        gpu=gpu,
        settings=settings,
        assigned=assign(facts, config.quant),
        memory=cell_memory(config, facts, gpu, settings),
    )
    found = [violation for check in CHECKS for violation in check(look)]
    return sorted(found, key=lambda violation: violation.severity != "error")


def require_feasible(config: RunConfig) -> list[Violation]:
    """The warnings of a cell that can run. Errors: InfeasibleError (exit code 4) naming every rule it breaks."""
    found = violations(config)
    errors = [str(violation) for violation in found if violation.severity == "error"]
    if errors:
        raise InfeasibleError("\n".join(errors))
    return found


# Patterns of the engine's error texts -> rule. Texts: vLLM 0.32, Triton, PyTorch and the two articles.
_ERRORS: tuple[tuple[str, str], ...] = (
    (r"device_gemm.*does not support this GEMM problem|does not support this GEMM problem", "aiter-gemm"),
    (r"MXFP4 is not (available|supported)|MXFP4.*(not available|unsupported)", "mxfp4-device"),
    (r"attention heads \(\d+\) must be divisible by tensor parallel size|heads.*divisible by.*tensor", "tp-heads"),
    (r"not divisible by weight quantization block_[nk]", "block-divides"),
    (r"not divisible by.*group[_ ]size|group_size.*(not|does not).*divi", "group-divides"),
    (r"No available memory for the cache blocks", "weights-fit"),
    (r"larger than the available KV cache|tokens that can be stored in KV cache", "kv-room"),
    (r"Free memory on device .* is less than", "memory-unavailable"),
    (r"out of memory|OutOfMemoryError", "out-of-memory"),
    (r"Quantization method specified in the model config .* does not match", "quantised-already"),
    (r"fp8_e5m2 kv-cache is not supported with fp8 checkpoints", "e5m2-fp8-checkpoint"),
    (r"fp8e4nv not supported|native FP8 \(fp8e4nv\)|fp8e4nv", "fp8-kv-device"),
    (r"FP8.*(compute capability|not supported on)|Minimum capability: 89", "fp8-weights-device"),
    (r"Int8 not supported|int8.*not supported on SM", "int8-device"),
    (r"User-specified max_model_len|is greater than the derived max_model_len", "context-length"),
    (r"max_num_batched_tokens .* is smaller than max_model_len", "batched-below-length"),
    (r"max_num_batched_tokens .* must be greater than or equal to max_num_seqs", "batched-below-seqs"),
    (r"AITER MLA requires|aiter.*heads", "aiter-mla-heads"),
    (r"number of experts.*divisible|experts.*must be divisible", "ep-experts"),
    (r"block.?size.*(MLA|mla)|(MLA|mla).*block.?size", "mla-block-size"),
    (r"fp8_ds_mla", "ds-mla-format"),
)


def known_errors() -> tuple[tuple[str, str], ...]:
    """(pattern of an engine's error text, id of the rule behind it), in the order in which they are tried."""
    return _ERRORS


def explain(text: str) -> list[Violation]:
    """The rules behind an engine's error text, most specific first; empty when none is known."""
    found = [rule for pattern, rule in _ERRORS if re.search(pattern, text, re.IGNORECASE | re.DOTALL)]
    answers = [_as_answer(rule, RULES[rule].demand, RULES[rule].remedy) for rule in dict.fromkeys(found)]
    return [*_explain_flags(text), *answers]


def _explain_flags(text: str) -> list[Violation]:
    answers = []
    for name in re.findall(r"--([a-z0-9][a-z0-9-]*)", text):
        replaced = RETIRED_FLAGS.get(name.replace("-", "_"))
        if replaced:
            answers.append(_as_answer("retired-flag", f"--{name} is gone", f"instead: {replaced}"))
    for name, replaced in RETIRED_QUANTIZATIONS.items():
        if name in text and not answers:
            answers.append(_as_answer("retired-flag", f"quantization {name} does not exist", f"instead: {replaced}"))
    return answers


def _as_answer(rule: str, message: str, remedy: str) -> Violation:
    return Violation(rule, RULES[rule].severity, message, remedy, RULES[rule].source)
