"""Groups of matrices that share one scheme because the engine fuses them: the units of sensitivity and search."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from evalq.facts.schemes import matches
from evalq.quantize.scheme import EXPERT, FUSED, VISION_PART, linear_modules
from evalq.quantize.tensors import TensorInfo

LAYER = re.compile(r"^(?P<before>.*\.)(?P<layer>\d+)\.(?P<after>[^0-9].*)$")


@dataclass(frozen=True)
class Unit:
    """Matrices with one scheme. `shapes`: (out_features, in_features) of each; layer -1: outside the layers."""

    name: str
    layer: int
    kind: str  # name within the layer, e.g. self_attn.q_proj+k_proj+v_proj
    modules: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]

    @property
    def weights(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes)


def units_of(tensors: Iterable[TensorInfo], ignore: Iterable[str]) -> list[Unit]:
    """Units in the order of the checkpoint; ignored modules and vision encoders are none."""
    patterns = list(ignore)
    families: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for module, info in linear_modules(tensors).items():
        if any(matches(module, pattern) for pattern in patterns) or VISION_PART.search(module):
            continue
        families.setdefault(_family(module), []).append((module, info.shape))
    return [_unit(members) for members in families.values()]


def _family(module: str) -> str:
    """Modules with equal text are one unit."""
    expert = EXPERT.match(module)
    if expert:
        return f"{expert[1]}:experts"
    prefix, _, leaf = module.rpartition(".")
    fused = next((family for family in FUSED if leaf in family), None)
    return f"{prefix}:{fused[0]}" if fused else module


def _unit(members: list[tuple[str, tuple[int, ...]]]) -> Unit:
    modules = tuple(module for module, _ in members)
    first = LAYER.match(modules[0])
    expert = EXPERT.match(modules[0])
    if expert:
        inner = LAYER.match(expert[1] + ".x")
        layer, kind = (int(inner["layer"]) if inner else -1), "mlp.experts"
    elif first:
        inside = [module[first.end("layer") + 1 :] for module in modules]
        parent = inside[0].rpartition(".")[0]
        layer, kind = int(first["layer"]), f"{parent}." + "+".join(name.rpartition(".")[2] for name in inside)
    else:
        layer, kind = -1, modules[0]
    shapes = tuple((shape[0], shape[1]) for _, shape in members)
    return Unit(kind if layer < 0 else f"{layer}.{kind}", layer, kind, modules, shapes)


def targets_of(units: Iterable[Unit]) -> list[str]:
    """Patterns that match exactly the modules of some units, few and readable: one per kind."""
    by_kind: dict[str, list[Unit]] = {}
    for unit in units:
        by_kind.setdefault(unit.kind, []).append(unit)
    return [_pattern(members) for members in by_kind.values()]


def _pattern(members: list[Unit]) -> str:
    first = members[0]
    if first.layer < 0:
        return first.modules[0]
    expert = EXPERT.match(first.modules[0])
    place = LAYER.match(f"{expert[1]}.x" if expert else first.modules[0])
    assert place is not None  # a unit with a layer has its number in its name
    layers = "|".join(str(unit.layer) for unit in sorted(members, key=lambda unit: unit.layer))
    before = place["before"].rstrip(".").rpartition(".")[2]
    parent = place["after"].rpartition(".")[0].replace(".", "[.]")
    if expert:
        return f"re:.*{before}[.]({layers})[.]{parent}[.].*$"
    leaves = "|".join(dict.fromkeys(name.rpartition(".")[2] for name in first.modules))
    return f"re:.*{before}[.]({layers})[.]{parent}[.]({leaves})$"
