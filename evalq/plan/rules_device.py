"""Rules about the device: what it can compute, KV formats, and AMD's switches."""

from __future__ import annotations

from collections.abc import Iterator

from evalq.facts.gpus import CAPABILITIES
from evalq.plan.rulebook import RULES
from evalq.plan.violation import Look, Violation, broken

# Capability that a scheme may need -> the rule that speaks for it; the others are spoken for by "capability".
_SPOKEN_FOR = {
    "fp8_weights": "fp8-weights-device",
    "fp8_kv": "fp8-kv-device",
    "fp8_kv_e5m2": "fp8-kv-device",
    "int8_matmul": "int8-device",
    "mxfp4": "mxfp4-device",
}
_FORMAT_NEEDS = {"float-quantized": "fp8_weights", "fp8-block": "fp8_weights", "mxfp4": "mxfp4"}
_KV_NEEDS = {
    "fp8_e4m3": "fp8_kv",
    "fp8_ds_mla": "fp8_kv",
    "fp8_per_token_head": "fp8_kv",
    "fp8_e5m2": "fp8_kv_e5m2",
}


def check_capabilities(look: Look) -> Iterator[Violation]:
    """fp8-weights-device, fp8-kv-device, int8-device, mxfp4-device, capability: each missing thing once."""
    missing: dict[str, str] = {}
    for _, scheme in look.assigned:
        if scheme is None:
            continue
        need = _FORMAT_NEEDS.get(scheme.format, "int4_weights" if scheme.num_bits == 4 else "")
        if scheme.format == "int-quantized" and scheme.activation_bits == 8:
            need = "int8_matmul"
        missing.setdefault(need, f"{scheme.num_bits}-bit weights")
    missing.setdefault(_KV_NEEDS.get(look.settings.kv_cache_dtype, ""), f"a {look.settings.kv_cache_dtype} KV cache")
    for need in look.config.quant.needs:
        missing.setdefault(need, f"quant={look.config.quant.name}")
    for need, what in missing.items():
        if need and not look.gpu.can(need):
            rule = RULES[_SPOKEN_FOR.get(need, "capability")]
            yield broken(rule, f"{what}: {look.gpu.title} lacks {CAPABILITIES.get(need, need)}")


def check_cpu(look: Look) -> Iterator[Violation]:
    """w8a16-cpu, cpu-tp, fp8-cpu-slow."""
    if look.gpu.vendor != "cpu":
        return
    schemes = [(module, scheme) for module, scheme in look.assigned if scheme is not None]
    for _, scheme in schemes:
        if scheme.num_bits == 8 and not scheme.is_float and scheme.activation_bits == 16:
            yield broken(RULES["w8a16-cpu"], f"the group {scheme.group!r} has 8-bit weights with 16-bit activations")
            break
    if any(scheme.is_float for _, scheme in schemes):
        yield broken(RULES["fp8-cpu-slow"], f"quant={look.config.quant.name} computes in FP8 on the CPU engine")
    if look.settings.gpus > 1:
        yield broken(RULES["cpu-tp"], f"the CPU engine is asked for {look.settings.gpus} devices")


def check_kv_format(look: Look) -> Iterator[Violation]:
    """ds-mla-format, per-head-scales-mla, e5m2-fp8-checkpoint, fp8-kv-vision."""
    kv, attention = look.settings.kv_cache_dtype, look.facts.attention
    if kv == "fp8_ds_mla" and attention != "sparse-mla":
        yield broken(RULES["ds-mla-format"], f"kv_cache_dtype=fp8_ds_mla does not go with the attention ({attention})")
    if kv.endswith("_per_token_head") and attention != "gqa":
        yield broken(RULES["per-head-scales-mla"], f"kv_cache_dtype={kv} does not go with latent attention")
    formats = {scheme.format for _, scheme in look.assigned if scheme is not None}
    if kv == "fp8_e5m2" and formats & {"float-quantized", "fp8-block"} and look.config.quant.origin != "engine":
        yield broken(RULES["e5m2-fp8-checkpoint"], "kv_cache_dtype=fp8_e5m2 is asked for with FP8 weights")
    if kv.startswith("fp8") and look.facts.architecture.startswith("Qwen3VL"):
        severity = "error" if look.gpu.is_rocm else "warning"
        yield broken(
            RULES["fp8-kv-vision"], f"kv_cache_dtype={kv} is asked for with {look.config.model.name}", severity
        )


def check_amd(look: Look) -> Iterator[Violation]:
    """mla-block-size, gqa-block-size, and the AITER rules; nothing on other devices."""
    if not look.gpu.is_rocm:
        return
    block, latent = look.settings.block_size, look.facts.attention != "gqa"
    given = f"block size {block}" if block else "the engine's default block size"
    if latent and block != 1 and look.gpu.arch == "gfx942":
        yield broken(RULES["mla-block-size"], f"{given} with latent attention on {look.gpu.title}")
    if not latent and block not in (None, 16):
        yield broken(RULES["gqa-block-size"], f"{given} with grouped-query attention on {look.gpu.title}")
    yield from _aiter(look, latent)


def _aiter(look: Look, latent: bool) -> Iterator[Violation]:
    env, tp = look.settings.env, look.settings.tensor_parallel_size
    on = env.get("VLLM_ROCM_USE_AITER", "0").lower() in ("1", "true")
    heads = look.facts.num_heads // tp
    if latent and on and env.get("VLLM_ROCM_USE_AITER_MLA", "1").lower() in ("1", "true") and heads < 16:
        yield broken(RULES["aiter-mla-heads"], f"tensor_parallel_size={tp} leaves {heads} heads per GPU under AITER")
    if look.facts.architecture.startswith("Deepseek"):
        if env.get("AITER_ENABLE_VSKIP") != "0":
            yield broken(RULES["aiter-vskip"], f"AITER_ENABLE_VSKIP is {env.get('AITER_ENABLE_VSKIP', 'not set')}")
        if not on:
            yield broken(RULES["aiter-deepseek"], "VLLM_ROCM_USE_AITER is off")
    if look.facts.architecture.startswith("Kimi"):
        if on:
            yield broken(RULES["aiter-kimi"], f"VLLM_ROCM_USE_AITER is {env['VLLM_ROCM_USE_AITER']}")
        if tp != 4:
            yield broken(RULES["kimi-tp"], f"tensor_parallel_size={tp} leaves {heads} heads per GPU")
