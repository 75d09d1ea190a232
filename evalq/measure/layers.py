"""Expected against found, layer by layer: dtype and shape of what is stored, the kernel that the engine chose."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from evalq.config import QuantGroup
from evalq.records import LayerKind

# Kernels and schemes that unpack weights to 16 bit and multiply with 16-bit activations.
WEIGHT_ONLY = re.compile(r"marlin|machete|A16|weight_?only|exllama|allspark", re.IGNORECASE)
PACK_BITS = 32


def describe(layer: dict[str, Any], loaded: dict[str, list[Any]], group: QuantGroup | None, ignored: bool) -> LayerKind:
    """One layer as a LayerKind of its own. loaded: parameter name -> [dtype, shape] as the checkpoint stores it.

    ignored: nothing is known about what the scheme wants of this layer.
    """
    stored = _stored(layer, loaded)
    found = ", ".join(f"{key} {dtype} {shape}" for key, (dtype, shape) in stored.items()) or "nothing"
    expected = "as the checkpoint has it" if ignored else expected_text(group, layer.get("size"))
    note = "" if ignored else "; ".join([*_shape_notes(layer, stored, group), *_fallback_notes(layer, group)])
    return LayerKind(_general(layer["name"]), 1, kernel_of(layer), expected, found, note)


def kinds(layers: list[LayerKind]) -> list[LayerKind]:
    """Layers that are alike in everything, counted together, in order."""
    counted = Counter(layers)
    return [LayerKind(k.name, count, k.kernel, k.expected, k.found, k.note) for k, count in counted.items()]


def kernel_of(layer: dict[str, Any]) -> str:
    """Classes of method, scheme and kernel, as far as the engine shows them."""
    return "/".join(part for part in (layer["method"], layer["scheme"], layer["kernel"]) if part)


def expected_text(group: QuantGroup | None, size: list[int] | None) -> str:
    """What the scheme wants of a layer, in words."""
    if group is None or group.weights is None:
        return f"16 bit{f' {size}' if size else ''}"
    args = group.weights
    shape = packed_shape(group, size)
    activations = group.input_activations
    inputs = f"{activations.num_bits}-bit {activations.type}" if activations else "16-bit"
    return f"{args.num_bits}-bit {args.type} weights{f' {shape}' if shape else ''}, {args.strategy} scales, {inputs} activations"


def packed_shape(group: QuantGroup, size: list[int] | None) -> list[int] | None:
    """Shape of the stored weight of an (out, in) layer: packed words for weight-only integers, else as it is."""
    if size is None or group.weights is None:
        return None
    out, into = size
    if group.weights.type == "int" and group.input_activations is None:
        return [out, -(-into // (PACK_BITS // group.weights.num_bits))]
    return [out, into]


def weight_only_fallback(layer: dict[str, Any], group: QuantGroup | None) -> bool:
    """Whether a scheme with quantised activations runs on a kernel that multiplies in 16 bit."""
    wanted = group is not None and group.input_activations is not None
    return wanted and bool(WEIGHT_ONLY.search(f"{layer['scheme']} {layer['kernel']}"))


def _stored(layer: dict[str, Any], loaded: dict[str, list[Any]]) -> dict[str, list[Any]]:
    prefix = f"{layer['name']}."
    found = {name.removeprefix(prefix): value for name, value in loaded.items() if name.startswith(prefix)}
    kept = found or {key: list(value) for key, value in layer["parameters"].items()}
    return {key: value for key, value in kept.items() if "weight" in key and "shape" not in key}


def _shape_notes(layer: dict[str, Any], stored: dict[str, list[Any]], group: QuantGroup | None) -> list[str]:
    wanted = packed_shape(group, layer.get("size")) if group is not None else layer.get("size")
    weight = stored.get("weight_packed") or stored.get("weight")
    if wanted is None or weight is None or len(weight[1]) != 2 or list(weight[1]) == list(wanted):
        return []
    return [f"{layer['name']} stores {list(weight[1])}, expected {list(wanted)}"]


def _fallback_notes(layer: dict[str, Any], group: QuantGroup | None) -> list[str]:
    if not weight_only_fallback(layer, group):
        return []
    return [f"weight-only fallback: {layer['name']} runs {kernel_of(layer)}, which multiplies in 16 bit"]


def _general(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
