"""A rounded layer in compressed-tensors' own words: quantization_config, tensor names and layouts.

Written without the library, whose import takes longer than rounding a small model, and whose versions differ in the
fields they add (vLLM 0.26 to 0.32 pin 0.15 to 0.17); the tests read what is written here with the library.
Layouts: pack-quantized = weight_packed int32, weight_scale 16 bit, weight_shape; int-, float- and naive-quantized =
weight int8 or E4M3, weight_scale float32.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from evalq.config import QuantArgs, QuantConfig, QuantGroup
from evalq.quantize.scheme import Layer
from evalq.quantize.tensors import ITEM_BYTES

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import torch

    from evalq.quantize.rounding import Rounded

PACKED, INT, FLOAT, NAIVE, MIXED = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
)


@dataclasses.dataclass(frozen=True)
class Stored:
    """Name, safetensors dtype and shape of a tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


def storage_format(group: QuantGroup) -> str:
    """How compressed-tensors stores a group that evalq makes."""
    assert group.weights is not None  # checked by evalq.quantize.scheme
    if group.weights.type == "int":
        return PACKED if group.input_activations is None else INT
    return NAIVE if group.input_activations is None else FLOAT


def scale_dtype(layer: Layer) -> str:
    """Packed weights have 16-bit scales, of the model's own kind; all others float32, as vLLM's parameters are."""
    if storage_format(layer.scheme) != PACKED:
        return "F32"
    return layer.info.dtype if layer.info.dtype in ("F16", "BF16") else "BF16"


def stored_tensors(layer: Layer) -> list[Stored]:
    """What a layer is stored as, known before it is rounded."""
    rows, columns = layer.info.shape
    weights, module = layer.weights, layer.module
    groups = columns // weights.group_size if weights.group_size else 1
    scale_shape: tuple[int, ...] = (1,) if weights.strategy == "tensor" else (rows, groups)
    scale = Stored(f"{module}.weight_scale", scale_dtype(layer), scale_shape)
    if storage_format(layer.scheme) == PACKED:
        words = -(-columns // (32 // weights.num_bits))
        packed = Stored(f"{module}.weight_packed", "I32", (rows, words))
        tensors = [packed, scale, Stored(f"{module}.weight_shape", "I64", (2,))]
        if not weights.symmetric:  # zero points are packed along the rows
            tensors.append(Stored(f"{module}.weight_zero_point", "I32", (-(-rows // (32 // weights.num_bits)), groups)))
        return tensors
    return [Stored(f"{module}.weight", "I8" if weights.type == "int" else "F8_E4M3", (rows, columns)), scale]


def round_layer(
    layer: Layer, weight: torch.Tensor, clip_search: bool, pool: Executor
) -> tuple[dict[str, torch.Tensor], Rounded]:
    """Round one matrix (out_features, in_features); returns its stored tensors by name and what rounding cost.

    Errors: ValueError when a weight is not finite.
    """
    import torch

    from evalq.quantize.rounding import Codes, pack_int32, round_weight, tensor_scale

    args, module = layer.weights, layer.module
    codes = Codes(args.num_bits, args.type == "float")
    if args.strategy == "tensor":
        rounded = tensor_scale(weight, codes, clip_search, pool)
    else:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[scale_dtype(layer)]
        rounded = round_weight(weight, codes, args.group_size or weight.shape[1], dtype, clip_search, pool)
    if storage_format(layer.scheme) != PACKED:
        return {f"{module}.weight": rounded.codes, f"{module}.weight_scale": rounded.scales}, rounded
    tensors = {
        f"{module}.weight_packed": pack_int32(rounded.codes, args.num_bits),
        f"{module}.weight_scale": rounded.scales,
        f"{module}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    return tensors, rounded


def quantization_config(quant: QuantConfig, ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json. `ignored`: Linear modules that stay 16 bit, by name."""
    formats = {name: storage_format(group) for name, group in quant.groups.items()}
    groups = {
        name: {
            "targets": list(group.targets),
            "weights": _args(group.weights),
            "input_activations": _args(group.input_activations),
            "format": formats[name],
        }
        for name, group in quant.groups.items()
    }
    return {
        "quant_method": "compressed-tensors",
        "format": next(iter(formats.values())) if len(set(formats.values())) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*quant.ignore, *ignored],
    }


def _args(args: QuantArgs | None) -> dict[str, Any] | None:
    return dataclasses.asdict(args) if args is not None else None
