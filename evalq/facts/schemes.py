"""What each scheme stores for each layer: tensors, dtypes, shapes, as compressed-tensors writes and vLLM keeps them.

pack-quantized   weight_packed int32 [out, in * bits / 32, rounded up], weight_scale 16 bit [out, in / group],
                 weight_shape int64[2]
int-quantized    weight int8 [out, in], weight_scale [out, 1]
float-quantized  weight E4M3 [out, in], weight_scale [out, 1] or [1]
fp8-block        weight E4M3 [out, in], weight_scale_inv float32 [out / block, in / block, rounded up]
mxfp4            weight 4 bit [out, in], one 8-bit exponent per 32 weights

Sources: compressed-tensors 0.17 (packed and naive compressors), OCP Microscaling Formats v1.0, DeepSeek-V3's config.
Matching follows compressed-tensors: "re:" patterns match from the start of the module's name, anything else is the
whole name; a name goes before the class name Linear; `ignore` goes before all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from evalq.config import QuantArgs, QuantConfig, QuantGroup, nearest
from evalq.errors import ConfigError
from evalq.facts.models import ModelFacts
from evalq.facts.modules import Module

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4, "I8": 1, "F8_E4M3": 1, "U8": 1}
MODEL_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
PACK_BITS = 32  # compressed-tensors packs into int32
FP8_BLOCK = 128
MXFP4_GROUP = 32
ONLINE = ("fp8", "fp8_per_tensor", "fp8_per_block", "int8_per_channel_weight_only", "mxfp4")
VISION_NAME = re.compile(r"(^|\.)(visual|vision_\w+|mm_projector)(\.|$)")


class Tensor(NamedTuple):
    suffix: str
    dtype: str  # key of ITEM_BYTES
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class LayerScheme:
    """How one layer's weight is stored."""

    format: str  # one of those above
    num_bits: int
    strategy: str  # tensor | channel | group | block
    group_size: int | None  # input features per scale
    activation_bits: int  # 16 = not quantised
    group: str  # name of the quant group, "checkpoint" or "engine"
    symmetric: bool = True  # False: packed weights have zero points

    @property
    def is_float(self) -> bool:
        return self.format in ("float-quantized", "fp8-block", "mxfp4")


class Assigned(NamedTuple):
    """Layers of one Module that share a scheme; scheme None = stays at the model's dtype."""

    module: Module
    scheme: LayerScheme | None


def matches(module: str, pattern: str) -> bool:
    """compressed-tensors' rule for names."""
    if pattern.startswith("re:"):
        return _compiled(pattern[3:]).match(module) is not None
    return module == pattern


@lru_cache(maxsize=512)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"re:{pattern} is no regular expression ({error}); correct the target or ignore") from error


def assign(facts: ModelFacts, quant: QuantConfig) -> tuple[Assigned, ...]:
    """Every module of the model with the scheme that its layers get. Errors: ConfigError for an unknown scheme."""
    return _assign_cached(scheme_key(facts, quant))


@dataclass(frozen=True)
class SchemeKey:
    """What the stored bytes of a model depend on, cheap to hash; facts and quant ride along."""

    text: tuple[str, str]
    facts: ModelFacts = field(compare=False)
    quant: QuantConfig = field(compare=False)


def scheme_key(facts: ModelFacts, quant: QuantConfig) -> SchemeKey:
    """A key for caches: equal keys store equal bytes."""
    text = repr((quant.origin, quant.engine_quantization, quant.groups, quant.ignore))
    return SchemeKey((facts.identity, text), facts, quant)


@lru_cache(maxsize=512)
def _assign_cached(key: SchemeKey) -> tuple[Assigned, ...]:
    modules, quant, published = key.facts.modules, key.quant, key.facts.quantization
    if quant.origin == "engine" and not published:
        return _assign_online(modules, quant)
    if quant.origin == "evalq":
        return _assign_groups(modules, quant.groups, quant.ignore)
    return _assign_published(modules, published) if published else tuple(Assigned(m, None) for m in modules)


def _assign_groups(
    modules: tuple[Module, ...], groups: Mapping[str, QuantGroup], ignore: list[str]
) -> tuple[Assigned, ...]:
    schemes = {name: layer_scheme(name, group) for name, group in groups.items() if group.weights is not None}
    assigned: list[Assigned] = []
    for module in modules:
        if module.kind != "Linear":
            assigned.append(Assigned(module, None))
            continue
        by_group: dict[str | None, list[int]] = {}
        for layer in module.layers or (-1,):
            name = module.name.replace("{layer}", str(layer))
            by_group.setdefault(_group_of(name, groups, ignore), []).append(layer)
        for group_name, layers in by_group.items():
            part = replace(module, layers=tuple(layers)) if module.layers else module
            assigned.append(Assigned(part, None if group_name is None else schemes.get(group_name)))
    return tuple(assigned)


def _group_of(name: str, groups: Mapping[str, QuantGroup], ignore: list[str]) -> str | None:
    if any(matches(name, pattern) for pattern in ignore):
        return None
    for group_name, group in groups.items():
        if any(matches(name, target) for target in group.targets):
            return group_name
    return next((group_name for group_name, group in groups.items() if "Linear" in group.targets), None)


def layer_scheme(name: str, group: QuantGroup) -> LayerScheme:
    """How the layers of one quant group are stored."""
    weights = group.weights
    assert weights is not None  # groups without weights are left out by the caller
    activation_bits = group.input_activations.num_bits if group.input_activations else 16
    if weights.type == "float" and weights.num_bits == 8:
        kind = "fp8-block" if weights.strategy == "block" else "float-quantized"
    elif weights.type == "float":
        kind = "mxfp4"
    else:
        kind = "int-quantized" if weights.num_bits == 8 and activation_bits == 8 else "pack-quantized"
    size = FP8_BLOCK if kind == "fp8-block" else weights.group_size
    return LayerScheme(kind, weights.num_bits, weights.strategy, size, activation_bits, name, weights.symmetric)


def _assign_online(modules: tuple[Module, ...], quant: QuantConfig) -> tuple[Assigned, ...]:
    """vLLM's online quantization: every linear layer and expert; embeddings, head, routers and norms stay.

    Its `ignore` is not reachable from --quantization alone, so vision layers are quantised too.
    """
    method = str(quant.engine_quantization)
    if method not in ONLINE:
        raise ConfigError(f"quant.engine_quantization={method!r}: {nearest(method, ONLINE)}")
    scheme = {
        "fp8_per_block": LayerScheme("fp8-block", 8, "block", FP8_BLOCK, 8, "engine"),
        "int8_per_channel_weight_only": LayerScheme("int-quantized", 8, "channel", None, 16, "engine"),
        "mxfp4": LayerScheme("mxfp4", 4, "group", MXFP4_GROUP, 16, "engine"),
    }.get(method, LayerScheme("float-quantized", 8, "tensor", None, 8, "engine"))
    return tuple(
        Assigned(m, scheme if m.kind == "Linear" and m.part != "head" and not _online_skips(m) else None)
        for m in modules
    )


def _online_skips(module: Module) -> bool:
    # The indexer's key and weight projections are built without a quantization config (vLLM 0.32, deepseek_v2.Indexer).
    return module.part == "indexer" and not module.name.endswith("wq_b")


def _assign_published(modules: tuple[Module, ...], own: Mapping[str, Any]) -> tuple[Assigned, ...]:
    """What a checkpoint's own quantization_config says: FP8 blocks, compressed-tensors groups or MXFP4 experts."""
    method = own.get("quant_method")
    if method == "compressed-tensors":
        groups = {name: _published_group(group) for name, group in own["config_groups"].items()}
        text_only = tuple(m for m in modules if m.part != "vision")
        vision = tuple(Assigned(m, None) for m in modules if m.part == "vision")
        return (*_assign_groups(text_only, groups, list(own.get("ignore") or ())), *vision)
    if method == "fp8":
        block = own.get("weight_block_size")
        scheme = LayerScheme("fp8-block", 8, "block", int(block[0]), 8, "checkpoint") if block else _PER_TENSOR
        return tuple(Assigned(m, scheme if _published_fp8(m, own) else None) for m in modules)
    if method == "mxfp4":
        scheme = LayerScheme("mxfp4", 4, "group", MXFP4_GROUP, 16, "checkpoint")
        return tuple(Assigned(m, scheme if m.part == "experts" else None) for m in modules)
    known = ("compressed-tensors", "fp8", "mxfp4")
    raise ConfigError(f"the checkpoint's quant_method={method!r} is not known: {nearest(str(method), known)}")


_PER_TENSOR = LayerScheme("float-quantized", 8, "tensor", None, 8, "checkpoint")


def _published_group(group: Mapping[str, Any]) -> QuantGroup:
    def args(value: Mapping[str, Any] | None) -> QuantArgs | None:
        keys = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic")
        return QuantArgs(**{key: value[key] for key in keys if key in value}) if value else None

    return QuantGroup(list(group["targets"]), args(group.get("weights")), args(group.get("input_activations")))


def _published_fp8(module: Module, own: Mapping[str, Any]) -> bool:
    if module.kind != "Linear" or module.part in ("head", "vision"):
        return False
    if module.part == "indexer":  # DeepSeek V3.2 publishes weights_proj in 16 bit
        return not module.name.endswith("weights_proj")
    return not any(skip in module.name for skip in own.get("modules_to_not_convert") or ())


def stored_tensors(
    shape: tuple[int, ...], bias: int, scheme: LayerScheme | None, dtype: str, stage: str = "checkpoint"
) -> tuple[Tensor, ...]:
    """Tensors of one layer. `stage` engine: channel scales become float32, and nothing else changes in size."""
    base = MODEL_DTYPES[dtype]
    tail = (Tensor("bias", base, (bias,)),) if bias else ()
    if scheme is None:
        return (Tensor("weight", base, shape), *tail)
    return (*_weight_tensors(shape, scheme, base, stage), *tail)


def _weight_tensors(shape: tuple[int, ...], scheme: LayerScheme, base: str, stage: str) -> tuple[Tensor, ...]:
    out, into = shape
    if scheme.format == "pack-quantized":
        groups = math.ceil(into / scheme.group_size) if scheme.group_size else 1
        tensors = (
            Tensor("weight_packed", "I32", (out, math.ceil(into * scheme.num_bits / PACK_BITS))),
            Tensor("weight_scale", base, (out, groups)),
            Tensor("weight_shape", "I64", (2,)),
        )
        if scheme.symmetric:
            return tensors
        return (*tensors, Tensor("weight_zero_point", "I32", (math.ceil(out * scheme.num_bits / PACK_BITS), groups)))
    if scheme.format == "fp8-block":
        block = scheme.group_size or FP8_BLOCK
        scales = (math.ceil(out / block), math.ceil(into / block))
        return (Tensor("weight", "F8_E4M3", shape), Tensor("weight_scale_inv", "F32", scales))
    if scheme.format == "mxfp4":
        return (
            Tensor("weight", "U8", (out, math.ceil(into / 2))),
            Tensor("weight_scale", "U8", (out, math.ceil(into / MXFP4_GROUP))),
        )
    stored = "I8" if scheme.format == "int-quantized" else "F8_E4M3"
    scale_dtype = "F32" if stage == "engine" else CHANNEL_SCALE_DTYPE
    scale = (1,) if scheme.strategy == "tensor" else (out, 1)
    return (Tensor("weight", stored, shape), Tensor("weight_scale", scale_dtype, scale))


# evalq writes channel scales in float32, which is what vLLM's kernels take; compressed-tensors allows 16 bit as well.
CHANNEL_SCALE_DTYPE = "F32"


def bits_per_weight(scheme: LayerScheme | None, shape: tuple[int, int], dtype: str = "bfloat16") -> float:
    """Stored bits per weight with everything that belongs to it (scales, padding); 16.0 for 16 bit."""
    nbytes = sum(tensor.nbytes for tensor in stored_tensors(shape, 0, scheme, dtype))
    return 8.0 * nbytes / math.prod(shape)
