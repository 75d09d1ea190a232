"""Which option for which group of layers: the cheapest choice whose damages add up to no more than a budget.

A multiple-choice knapsack, solved exactly by HiGHS through scipy.optimize.milp; what it could not prove in its time is a
stated gap. That damages add up is an assumption (second order: small and independent errors), so an allocation is only
a candidate until an engine has measured it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TIME_LIMIT_SECONDS = 20.0
RELATIVE_GAP = 1e-4


class Choice(NamedTuple):
    """One option of one unit. cost: bytes or seconds; damage: nats per token, 0 or more."""

    option: str
    cost: float
    damage: float


@dataclass(frozen=True)
class Allocation:
    """One option per unit, in the units' order. `gap`: no allocation within the budget is cheaper by more than this share."""

    options: tuple[str, ...]
    cost: float
    damage: float
    budget: float
    gap: float


def allocate(units: Sequence[Sequence[Choice]], budget: float) -> Allocation | None:
    """The cheapest allocation within `budget`; None when even the least damage is above it.

    Errors: ValueError for a unit without a choice or a damage below 0.
    """
    if any(not choices for choices in units) or any(c.damage < 0 for choices in units for c in choices):
        raise ValueError("every unit needs a choice, and no damage may be below 0")
    if sum(min(choice.damage for choice in choices) for choices in units) > budget:
        return None
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    flat = [choice for choices in units for choice in choices]
    owners = np.repeat(np.arange(len(units)), [len(choices) for choices in units])
    cost = np.array([choice.cost for choice in flat])
    scale = float(np.abs(cost).max()) or 1.0
    damage = np.array([choice.damage for choice in flat])
    one_each = coo_array((np.ones(len(flat)), (owners, np.arange(len(flat)))), shape=(len(units), len(flat)))
    limit = max(budget, 1e-300)
    solved = milp(
        cost / scale,
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(damage[None, :] / limit, -np.inf, 1.0 if budget > 0 else 0.0),
        ],
        options={"time_limit": TIME_LIMIT_SECONDS, "mip_rel_gap": RELATIVE_GAP},
    )
    if solved.x is None:
        return None
    taken = [flat[place] for place in _picked(solved.x, owners, len(units))]
    total = sum(choice.cost for choice in taken)
    bound = solved.mip_dual_bound * scale if solved.mip_dual_bound is not None else total
    gap = max(0.0, (total - bound) / total) if total > 0 else 0.0
    return Allocation(tuple(c.option for c in taken), total, sum(c.damage for c in taken), budget, gap)


def _picked(x: NDArray[np.float64], owners: NDArray[np.int64], count: int) -> list[int]:
    """The place of each unit's chosen variable; a solver's 1 may be 0.9999999."""
    best: list[int] = [-1] * count
    for place, (value, owner) in enumerate(zip(x, owners, strict=True)):
        if best[owner] < 0 or value > x[best[owner]]:
            best[owner] = place
    return best


def ladder(units: Sequence[Sequence[Choice]], budgets: Sequence[float]) -> list[Allocation]:
    """Distinct allocations for rising budgets, from the most damaging and cheapest to the gentlest."""
    found: dict[tuple[str, ...], Allocation] = {}
    for budget in sorted(budgets):
        made = allocate(units, budget)
        if made is not None:
            found.setdefault(made.options, made)
    return sorted(found.values(), key=lambda made: (made.cost, made.damage))


def merged(units: Sequence[Sequence[Choice]]) -> list[Choice]:
    """Units that must have one option in common, as one: costs and damages added, options that all of them have."""
    common = [choice.option for choice in units[0] if all(any(c.option == choice.option for c in u) for u in units)]
    sums = []
    for option in common:
        mine = [next(c for c in choices if c.option == option) for choices in units]
        sums.append(Choice(option, sum(c.cost for c in mine), sum(c.damage for c in mine)))
    return sums
