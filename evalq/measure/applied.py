"""Was the scheme really applied? Answered from the engine's state, never from what was asked for. Pure functions."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

from evalq.config import QuantConfig, QuantGroup, RunConfig
from evalq.kvrecord import is_quantised_kv
from evalq.measure.kv.scales import DYNAMIC, layers_of, problems_of, source_of
from evalq.measure.layers import describe, kernel_of, kinds
from evalq.records import Applied, LayerKind, Ledger, Scalar

FUSED_PARTS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
KV_TENSOR_DTYPES = {
    "bfloat16": {"bfloat16"},
    "float16": {"float16"},
    "fp8_e4m3": {"uint8", "float8_e4m3fn", "float8_e4m3fnuz"},
    "fp8_e5m2": {"uint8", "float8_e5m2", "float8_e5m2fnuz"},
}
SIXTEEN_BIT = {"bfloat16", "float16", "float32"}
WEIGHT_NAMES = ("weight_packed", "weight", "qweight", "w13_weight", "w2_weight")


def check_applied(config: RunConfig, settings: dict[str, Scalar], ranks: list[dict[str, Any]]) -> Applied:
    """Compare the scheme with what every rank of the engine holds. ranks: probe.EngineProbe.evalq_describe, parsed."""
    first = ranks[0]
    layers = layer_kinds(config, first)
    others = [kind for rank in ranks[1:] for kind in layer_kinds(config, rank)]
    kv_effective = str(settings.get("kv_cache_dtype"))
    scale_source = kv_scale_source(config.quant.kv_cache_dtype, first["kv_scales"])
    problems = _settings_problems(config, settings)
    for rank in ranks:
        problems.extend(_kv_problems(config.quant, kv_effective, rank))
        if config.engine.load_format != "dummy":  # whose scales are random numbers too
            source = kv_scale_source(config.quant.kv_cache_dtype, rank["kv_scales"])
            problems.extend(_scale_problems(config.quant, source))
        problems.extend(_weight_problems(config, rank))
    problems.extend(_layer_problems(config.quant, [*layers, *others]))
    return Applied(
        ok=not problems,
        problems=list(dict.fromkeys(problems)),
        kv_dtype_requested=config.quant.kv_cache_dtype,
        kv_dtype_effective=f"{kv_effective} ({', '.join(first['kv_cache']['dtypes']) or 'no tensors'})",
        kv_scale_source=scale_source,
        linear_methods=dict(Counter(kernel_of(layer) for layer in linear_layers(first))),
        parameter_dtypes={k: int(v) for k, v in Counter(row[1] for row in _loaded(first)).items()},
        attention_backend=", ".join(first["kv_scales"]["attention_backends"]),
        layers=kinds(layers),
    )


def with_layer_scales(
    applied: Applied,
    quant: QuantConfig,
    answers: list[dict[str, Any]],
    stored: dict[int, dict[str, float]],
    random_weights: bool = False,
) -> Applied:
    """The same proof with the KV scales of every attention layer looked at: source and problems, layer by layer.

    answers: probe.KvProbe.evalq_kv_layers, parsed, one per rank; stored: kv.scales.checkpoint_scales; random_weights:
    load_format=dummy, which fills scales with random numbers too, so that their values say nothing of the scheme.
    """
    ranks = [layers_of(answer) for answer in answers]
    found = (problem for layers in ranks for problem in problems_of(quant, layers, stored, random_weights))
    problems = [*applied.problems, *found]
    source = source_of(quant, ranks[0], stored)
    if random_weights and source == "unknown":
        source = "random (dummy weights)"
    return dataclasses.replace(applied, ok=not problems, problems=list(dict.fromkeys(problems)), kv_scale_source=source)


def kv_scale_source(kv_dtype: str, scales: dict[str, Any]) -> str:
    """Where the K and V scales come from: "none" for 16 bit, "dynamic", "default 1.0", or "checkpoint"."""
    if not is_quantised_kv(kv_dtype):
        return "none"
    if kv_dtype.endswith(DYNAMIC):
        return "dynamic"
    if not scales.get("layers"):
        return "unknown"
    values = [scales[name] for name in ("k_min", "k_max", "v_min", "v_max")]
    return "default 1.0" if all(value == 1.0 for value in values) else "checkpoint"


def _kv_problems(quant: QuantConfig, effective: str, rank: dict[str, Any]) -> list[str]:
    wanted = quant.kv_cache_dtype
    aliases = {wanted, "fp8"} if wanted == "fp8_e4m3" else {wanted}
    problems = []
    if effective not in aliases:
        problems.append(f"scheme {quant.name} asks for KV dtype {wanted} and the engine reports {effective}")
    found = set(rank["kv_cache"]["dtypes"])
    allowed = KV_TENSOR_DTYPES.get(wanted, found - SIXTEEN_BIT)
    if not found:
        problems.append("the engine shows no KV cache tensors, so the KV dtype cannot be confirmed")
    elif not found <= allowed:
        problems.append(
            f"scheme {quant.name} asks for KV dtype {wanted} and the KV tensors are {', '.join(sorted(found))}"
        )
    return problems


def _scale_problems(quant: QuantConfig, found: str) -> list[str]:
    claimed = quant.kv_scale_source
    if claimed in ("checkpoint", "computed") and found != "checkpoint":
        return [f"scheme {quant.name} claims KV scales from {claimed} and the engine uses {found}"]
    if claimed == "none" and found not in ("none",):
        return [f"scheme {quant.name} claims no KV scales and the engine uses {found}"]
    if (claimed == "dynamic") != (found == "dynamic"):
        return [f"scheme {quant.name} claims KV scales of source {claimed} and the engine uses {found}"]
    if claimed == "default 1.0" and found != "default 1.0":
        return [f"scheme {quant.name} claims KV scales of 1.0 and the engine uses {found}"]
    return []


def _settings_problems(config: RunConfig, settings: dict[str, Scalar]) -> list[str]:
    """The engine's own report against what was asked for (an engine may override a flag and only log it)."""
    engine = config.engine
    asked: dict[str, Scalar] = {
        "enforce_eager": engine.enforce_eager,
        "enable_chunked_prefill": engine.enable_chunked_prefill,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "seed": engine.seed,
        "dtype": config.model.dtype,
    }
    if engine.block_size:
        asked["block_size"] = engine.block_size
    return [
        f"engine.{name}={value} was asked for and the engine reports {settings.get(name)}"
        for name, value in asked.items()
        if settings.get(name) != value
    ]


def linear_layers(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """Layers with a matrix product: linear layers, experts and the output head; embeddings are left out."""
    return [
        layer
        for layer in rank["layers"]
        if "Embedding" not in layer["layer"]
        and "Attention" not in layer["layer"]
        and layer["layer"] != "ParallelLMHead"
    ]


def _loaded(rank: dict[str, Any]) -> list[list[Any]]:
    """[name, dtype, shape, bytes] of the parameters: as loaded where known, else as they are now."""
    if rank.get("as_loaded"):
        return list(rank["as_loaded"])
    return [
        [f"{layer['name']}.{key}", dtype, shape, 0]
        for layer in rank["layers"]
        for key, (dtype, shape) in layer["parameters"].items()
    ]


def _weight_problems(config: RunConfig, rank: dict[str, Any]) -> list[str]:
    """Every linear layer's weight dtype against the scheme; the first few layers that differ are named."""
    quant = config.quant
    if quant.origin == "checkpoint" and not quant.groups and "quantization_config" in config.model.arch:
        return []  # published quantised: the scheme says "as it is", whatever that is
    loaded = {row[0]: row[1] for row in _loaded(rank)}
    parts = {**FUSED_PARTS, **rank.get("packed_modules", {})}
    wrong: list[str] = []
    for layer in linear_layers(rank):
        found = _weight_dtype(layer, loaded, online=quant.origin == "engine")
        if found is None:
            continue
        wanted = _expected_dtypes(quant, _original_names(layer["name"], parts))
        if found not in wanted:
            wrong.append(f"{layer['name']} holds {found} weights, expected {' or '.join(sorted(wanted))}")
    if not wrong:
        return []
    more = f" (and {len(wrong) - 1} more layers)" if len(wrong) > 1 else ""
    return [f"scheme {quant.name} was not applied: {wrong[0]}{more}"]


def layer_kinds(config: RunConfig, rank: dict[str, Any]) -> list[LayerKind]:
    """Every linear layer of a rank: expected, found, kernel."""
    quant = config.quant
    silent = quant.origin == "engine" or (not quant.groups and "quantization_config" in config.model.arch)
    loaded = {row[0]: [row[1], row[2]] for row in _loaded(rank)} if quant.origin != "engine" else {}
    parts = {**FUSED_PARTS, **rank.get("packed_modules", {})}
    return [
        describe(layer, loaded, group_of(quant, _original_names(layer["name"], parts)), silent)
        for layer in linear_layers(rank)
    ]


def group_of(quant: QuantConfig, names: list[str]) -> QuantGroup | None:
    """The group of a scheme that the first of these checkpoint names belongs to; None = stays at 16 bit."""
    if quant.origin != "evalq":
        return None
    return next((g for g in quant.groups.values() if any(_targeted(name, g, quant.ignore) for name in names)), None)


def _layer_problems(quant: QuantConfig, layers: list[LayerKind]) -> list[str]:
    """What the layers' own notes say is not as the scheme says: the first, and how many more."""
    notes = [kind.note for kind in layers if kind.note]
    if not notes:
        return []
    more = f" (and {len(notes) - 1} more layers)" if len(notes) > 1 else ""
    return [f"scheme {quant.name} was not applied: {notes[0]}{more}"]


def _weight_dtype(layer: dict[str, Any], loaded: dict[str, str], online: bool) -> str | None:
    for name in WEIGHT_NAMES:
        if online and name in layer["parameters"]:
            return str(layer["parameters"][name][0])
        if f"{layer['name']}.{name}" in loaded and not online:
            return loaded[f"{layer['name']}.{name}"]
    return None


def _original_names(name: str, parts: dict[str, list[str]]) -> list[str]:
    """Checkpoint names of the layers that the engine fused into one."""
    prefix, _, last = name.rpartition(".")
    return [f"{prefix}.{part}" if prefix else part for part in parts.get(last, [last])]


def _expected_dtypes(quant: QuantConfig, names: list[str]) -> set[str]:
    if quant.origin == "engine":
        stays = any(_matches(name, quant.ignore) for name in names)
        return SIXTEEN_BIT if stays else {"float8_e4m3fn", "float8_e4m3fnuz", "int8", "uint8"}
    for group in quant.groups.values():
        if any(_targeted(name, group, quant.ignore) for name in names):
            return _stored_dtypes(group)
    return SIXTEEN_BIT


def _targeted(name: str, group: QuantGroup, ignore: list[str]) -> bool:
    return not _matches(name, ignore) and _matches(name, group.targets)


def _matches(name: str, patterns: list[str]) -> bool:
    for pattern in patterns:
        if pattern == "Linear":
            return True
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return True
        elif name == pattern or name.endswith(f".{pattern}"):
            return True
    return False


def _stored_dtypes(group: QuantGroup) -> set[str]:
    """dtypes in which compressed-tensors stores a group's weights."""
    weights = group.weights
    if weights is None:
        return SIXTEEN_BIT
    if weights.type == "float":
        return {"float8_e4m3fn", "float8_e4m3fnuz"} if weights.num_bits == 8 else {"uint8"}
    if group.input_activations is None:
        return {"int32"}  # packed, eight 4-bit or four 8-bit weights in one word
    return {"int8"} if weights.num_bits == 8 else {"int32", "int8"}


def measure_ledger(
    config: RunConfig, settings: dict[str, Scalar], ranks: list[dict[str, Any]], checkpoint_bytes: int | None
) -> Ledger:
    """The memory ledger from the engine's own state; bytes are summed over ranks."""
    by_dtype: Counter[str] = Counter()
    for rank in ranks:
        rows = rank.get("as_loaded") if config.quant.origin != "engine" else None
        if rows:
            for _, dtype, _, size in rows:
                by_dtype[dtype] += size
        else:
            by_dtype.update(rank["parameters"]["bytes_by_dtype"])
    pool_bytes = sum(rank["kv_cache"]["bytes"] for rank in ranks)
    pool_tokens = int(settings.get("num_blocks") or 0) * int(settings.get("block_size") or 0)
    return Ledger(
        weight_bytes=sum(by_dtype.values()) or None,
        weight_bytes_by_dtype=dict(by_dtype),
        checkpoint_bytes=checkpoint_bytes,
        kv_bytes_per_token=round(pool_bytes / pool_tokens) if pool_tokens and pool_bytes else None,
        kv_pool_tokens=pool_tokens or None,
        kv_pool_bytes=pool_bytes or None,
        kv_dtype=", ".join(ranks[0]["kv_cache"]["dtypes"]) or None,
        peak_bytes=max(rank["memory"]["peak_bytes"] for rank in ranks),
        peak_source=str(ranks[0]["memory"]["source"]),
        activation_bytes=_fullest(ranks, "activation_bytes"),
        graph_bytes=_fullest(ranks, "graph_bytes"),
        driver_bytes=_fullest(ranks, "driver_bytes"),
    )


def _fullest(ranks: list[dict[str, Any]], name: str) -> int | None:
    values = [rank["memory"].get(name) for rank in ranks]
    return max((int(value) for value in values if value is not None), default=None)
