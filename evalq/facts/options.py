"""The ways in which one layer's weights can be stored that an engine has kernels for: the choices of a search.

Names are those of search.options; 16 bit is always a choice and has no entry. Formats are the presets of compressed-tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from evalq.config import QuantArgs, QuantGroup, nearest
from evalq.errors import ConfigError
from evalq.facts.gpus import GpuFacts
from evalq.facts.schemes import LayerScheme, layer_scheme

SIXTEEN_BIT = "bf16"


@dataclass(frozen=True)
class Option:
    """One choice for a group of layers. `family`: options whose damage differs by the rounding of weights alone."""

    name: str
    capability: str
    family: str
    weights: QuantArgs
    input_activations: QuantArgs | None
    calibrated_only: bool = False  # needs zero points, which evalq's own rounding does not write

    def group(self, targets: list[str]) -> QuantGroup:
        """The option as a group of a scheme."""
        return QuantGroup(targets, self.weights, self.input_activations)

    def fits(self, in_features: int) -> bool:
        """Whether its scales divide a layer of this width."""
        return self.weights.group_size is None or in_features % self.weights.group_size == 0

    def scheme(self) -> LayerScheme:
        return layer_scheme(self.name, self.group(["Linear"]))


def _int4(size: int, symmetric: bool = True) -> Option:
    name = f"int4_g{size}" + ("" if symmetric else "_asym")
    args = QuantArgs(4, "int", "group", size, symmetric)
    return Option(name, "int4_weights", "int4", args, None, not symmetric)


_ROWS = (
    Option("fp8", "fp8_weights", "fp8", QuantArgs(8, "float", "channel"), QuantArgs(8, "float", "token", dynamic=True)),
    Option("int8", "int8_matmul", "int8", QuantArgs(8, "int", "channel"), QuantArgs(8, "int", "token", dynamic=True)),
    Option("int8_w8a16", "w8a16", "int8_w8a16", QuantArgs(8, "int", "channel"), None),
    *(_int4(size, symmetric) for symmetric in (True, False) for size in (32, 64, 128)),
)
OPTIONS = {row.name: row for row in _ROWS}


def options_of(names: list[str], gpu: GpuFacts, method: str) -> tuple[list[Option], dict[str, str]]:
    """Options that the device and the method have, and why each other one was left out.

    Errors: ConfigError for an unknown name, or when nothing is left.
    """
    unknown = [name for name in names if name not in OPTIONS]
    if unknown:
        raise ConfigError(f"search.options: {unknown[0]!r} is unknown; {nearest(unknown[0], tuple(OPTIONS))}")
    left_out: dict[str, str] = {}
    chosen = []
    for option in (OPTIONS[name] for name in dict.fromkeys(names)):
        if not gpu.can(option.capability):
            left_out[option.name] = f"{gpu.title} has no kernel for it ({option.capability})"
        elif option.calibrated_only and method == "rtn":
            left_out[option.name] = "zero points need search.method=gptq, awq or autoround"
        else:
            chosen.append(option)
    if not chosen:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ConfigError(f"search.options leaves nothing to choose on {gpu.name} ({why}); name others")
    return chosen, left_out
