"""From units, options and their damages to whole schemes: the candidates that an engine then has to prove."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evalq.config import QuantConfig, QuantGroup
from evalq.facts.gpus import GpuFacts
from evalq.facts.options import OPTIONS, SIXTEEN_BIT, Option
from evalq.facts.schemes import stored_tensors
from evalq.plan.allocation import Allocation, Choice, ladder, merged
from evalq.plan.roofline import arithmetic_rate
from evalq.quantize.sensitivity import Sensitivity
from evalq.quantize.units import Unit, targets_of

RUNGS = 32  # budgets of the ladder, from the gentlest allocation to the most damaging


@dataclass(frozen=True)
class Candidate:
    """A scheme, its options by unit, and what the search expects of it."""

    name: str
    quant: QuantConfig
    options: tuple[str, ...]  # in the units' order
    weight_bytes: int  # of the units alone
    cost: float  # bytes, or seconds per decoding step
    kld_nats: float  # sum of the units' damages, by fake quantisation


def unit_bytes(unit: Unit, option: Option | None, dtype: str) -> int:
    """Bytes of a unit's tensors as the engine keeps them."""
    scheme = option.scheme() if option else None
    return sum(tensor.nbytes for shape in unit.shapes for tensor in stored_tensors(shape, 0, scheme, dtype, "engine"))


def unit_seconds(unit: Unit, option: Option | None, dtype: str, gpu: GpuFacts, requests: int) -> float:
    """Lower bound of a unit's time in one decoding step of `requests` requests: bytes read, or operations at the peak."""
    assert gpu.bandwidth_bytes_per_second is not None  # asked for by the caller
    reading = unit_bytes(unit, option, dtype) / gpu.bandwidth_bytes_per_second
    computing = 2.0 * unit.weights * requests / arithmetic_rate(option.scheme() if option else None, gpu)
    return max(reading, computing)


def choices(
    units: Sequence[Unit],
    options: Sequence[Option],
    table: Sensitivity,
    costs: Mapping[tuple[str, str], float],
) -> list[list[Choice]]:
    """For each unit: 16 bit without damage, and every option that fits it. costs: (unit, option) -> cost."""
    result = []
    for unit in units:
        row = [Choice(SIXTEEN_BIT, costs[unit.name, SIXTEEN_BIT], 0.0)]
        for option in options:
            damage = table.of(unit.name, option.name)
            if damage is not None:
                row.append(Choice(option.name, costs[unit.name, option.name], damage.kld_nats))
        result.append(row)
    return result


def allocations(units: Sequence[Unit], table: list[list[Choice]], by_kind: bool) -> list[Allocation]:
    """A ladder of allocations for budgets between the gentlest and the most damaging, cheapest first."""
    groups = _groups(units, by_kind)
    rows = [merged([table[place] for place in places]) for places in groups]
    most = sum(max(choice.damage for choice in row) for row in rows)
    least = min((c.damage for row in rows for c in row if c.damage > 0), default=0.0)
    if most <= 0:
        return []
    low = max(least, most / 1e5)
    budgets = [low * (most / low) ** (step / (RUNGS - 1)) for step in range(RUNGS)] if most > low else [most]
    return [_spread(found, groups, len(units)) for found in ladder(rows, budgets)]


def _groups(units: Sequence[Unit], by_kind: bool) -> list[list[int]]:
    if not by_kind:
        return [[place] for place in range(len(units))]
    kinds: dict[str, list[int]] = {}
    for place, unit in enumerate(units):
        kinds.setdefault(unit.kind, []).append(place)
    return list(kinds.values())


def _spread(found: Allocation, groups: list[list[int]], count: int) -> Allocation:
    options = [SIXTEEN_BIT] * count
    for option, places in zip(found.options, groups, strict=True):
        for place in places:
            options[place] = option
    return dataclasses.replace(found, options=tuple(options))


def candidate(
    name: str,
    units: Sequence[Unit],
    chosen: Sequence[str],
    table: list[list[Choice]],
    base: QuantConfig,
    dtype: str,
) -> Candidate:
    """The scheme that gives each unit its option. base: method, ignore and KV dtype."""
    groups: dict[str, QuantGroup] = {}
    for option in (OPTIONS[name] for name in OPTIONS if name in chosen):
        mine = [unit for unit, picked in zip(units, chosen, strict=True) if picked == option.name]
        groups[option.name] = option.group(targets_of(mine))
    picked = [next(c for c in row if c.option == option) for row, option in zip(table, chosen, strict=True)]
    needs = list(dict.fromkeys(OPTIONS[name].capability for name in groups))
    quant = dataclasses.replace(base, name=name, origin="evalq", groups=groups, needs=needs)
    return Candidate(
        name,
        quant,
        tuple(chosen),
        sum(unit_bytes(u, OPTIONS.get(o), dtype) for u, o in zip(units, chosen, strict=True)),
        sum(choice.cost for choice in picked),
        sum(choice.damage for choice in picked),
    )


def uniform(
    units: Sequence[Unit], option: Option, table: list[list[Choice]], base: QuantConfig, dtype: str
) -> Candidate:
    """Every unit that can have the option has it; the others stay 16 bit."""
    chosen = [option.name if any(c.option == option.name for c in row) else SIXTEEN_BIT for row in table]
    return candidate(f"uniform-{option.name.replace('_', '-')}", units, chosen, table, base, dtype)


def next_rung(rungs: Sequence[Candidate], low: int, high: int, wanted_kld: float) -> int:
    """Which rung to try between `low` and `high` (both excluded): the one whose expected damage is nearest to `wanted_kld`.

    Rungs go from cheap and damaging to dear and gentle. Never further than three quarters into the bracket, so that a wrong
    expectation costs a few trials and not all of them.
    """
    inside = range(low + 1, high)
    margin = max(0, len(inside) // 4)
    allowed = inside[margin : len(inside) - margin] or inside

    def distance(place: int) -> float:
        return abs(math.log(max(rungs[place].kld_nats, 1e-12)) - math.log(max(wanted_kld, 1e-12)))

    return min(allowed, key=distance)
