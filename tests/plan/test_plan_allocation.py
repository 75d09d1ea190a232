"""The knapsack against every combination of small problems."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalq.plan.allocation import Choice, allocate, ladder, merged

costs = st.integers(1, 50).map(float)
damages = st.integers(0, 40).map(lambda n: n / 1000)
units_strategy = st.lists(
    st.lists(st.tuples(costs, damages), min_size=1, max_size=3).map(
        lambda rows: [Choice(f"o{n}", cost, damage) for n, (cost, damage) in enumerate(rows)]
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=30)
@given(units_strategy, st.integers(0, 100).map(lambda n: n / 1000))
def test_as_good_as_every_combination(units: list[list[Choice]], budget: float) -> None:
    found = allocate(units, budget)
    fitting = [
        combination
        for combination in itertools.product(*units)
        if sum(choice.damage for choice in combination) <= budget + 1e-12
    ]
    if found is None:
        assert not any(sum(c.damage for c in combination) < budget - 1e-9 for combination in fitting)
        return
    assert found.damage <= budget + 1e-9
    best = min(sum(choice.cost for choice in combination) for combination in fitting)
    assert math.isclose(found.cost, best, rel_tol=1e-6)
    assert 0.0 <= found.gap <= 1e-3


def test_hand_worked() -> None:
    """Two units of 100: at 4 bit each saves 75; the damages are 0.006 and 0.003, so only one fits a budget of 0.007."""
    units = [
        [Choice("bf16", 100.0, 0.0), Choice("int4", 25.0, 0.006)],
        [Choice("bf16", 100.0, 0.0), Choice("int8", 50.0, 0.0005), Choice("int4", 25.0, 0.003)],
    ]
    found = allocate(units, 0.007)
    assert found is not None
    assert found.options == ("int4", "int8")
    assert (found.cost, round(found.damage, 6)) == (75.0, 0.0065)
    assert [made.options for made in ladder(units, [0.0001, 0.004, 0.007, 0.02, 0.03])] == [
        ("int4", "int4"),
        ("int4", "int8"),
        ("bf16", "int4"),
        ("bf16", "bf16"),
    ]


def test_nothing_within_the_budget() -> None:
    assert allocate([[Choice("int4", 1.0, 0.5)]], 0.1) is None
    with pytest.raises(ValueError, match="every unit needs a choice"):
        allocate([[]], 1.0)


def test_units_in_common_have_what_all_of_them_have() -> None:
    first = [Choice("bf16", 10.0, 0.0), Choice("g128", 2.0, 0.1), Choice("g64", 3.0, 0.05)]
    second = [Choice("bf16", 20.0, 0.0), Choice("g64", 6.0, 0.01)]
    assert merged([first, second]) == [Choice("bf16", 30.0, 0.0), Choice("g64", 9.0, pytest.approx(0.06))]
