"""Alpha spending, and the gate's error rates by a fast simulation (the full one is jobs/bench/gate_simulation.py)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from evalq.errors import RecordError
from evalq.judge.paired import gate_interval, ratio
from evalq.judge.sequential import look_confidence, next_look
from evalq.judge.simulation import EFFECTS, TAILS, Draws, batch_intervals, draw, gate_bounds, rates, sequential_bounds

DRAWS = 2000
ROOM = 3 * (0.05 * 0.95 / DRAWS) ** 0.5  # three Monte Carlo standard errors at 5 %


def test_levels_by_hand() -> None:
    # Cubes of 1/2 and 1: a first look at half the data gets 1/8 of 5 %, the last 7/8.
    assert look_confidence([50, 100], 50, 0.95) == pytest.approx(1 - 0.05 / 8)
    assert look_confidence([50, 100], 100, 0.95) == pytest.approx(1 - 0.05 * 7 / 8)
    assert look_confidence([], 31, 0.95) == 0.95


@pytest.mark.parametrize("looks", [[20, 40, 62], [62], [10, 11, 500]])
def test_all_looks_together_spend_alpha(looks: list[int]) -> None:
    assert sum(1 - look_confidence(looks, n, 0.95) for n in looks) == pytest.approx(0.05)


def test_more_than_planned_is_refused() -> None:
    with pytest.raises(RecordError, match=r"end gate\.looks at 70"):
        look_confidence([20, 62], 70, 0.95)


def test_next_look() -> None:
    assert next_look([20, 40, 62], 20) == 40
    assert next_look([20, 40, 62], 62) is None


def test_the_simulation_uses_the_gates_own_interval() -> None:
    data = draw("skewed", 25, 3, 0.004, np.random.default_rng(0))
    batch = batch_intervals(data, 0.95, 4000, np.random.default_rng(1))
    for i in range(3):
        found, interval = gate_interval(data.d[i], data.w[i], 0.95, resamples=4000)
        linear = ratio(data.d[i], data.w[i], method="linearised").interval(0.95)
        assert (batch["gate"][0][i], batch["gate"][1][i]) == pytest.approx((interval.low, interval.high), rel=1e-9)
        assert (batch["linearised"][0][i], batch["linearised"][1][i]) == pytest.approx(linear, rel=1e-9)
        plain = dataclasses.replace(found, skewness=0.0).interval(0.95)
        assert (batch["jackknife"][0][i], batch["jackknife"][1][i]) == pytest.approx(plain, rel=1e-9)
        width = interval.high - interval.low
        check = batch["check"][0][i], batch["check"][1][i]
        assert check == pytest.approx(interval.bootstrap, abs=0.05 * width)
    assert np.array_equal(gate_bounds(data, 0.95)[1], batch["gate"][1])


@pytest.mark.parametrize("tail", ["normal", "t3", "skewed", "very skewed"])
@pytest.mark.parametrize("documents", [20, 62])
def test_error_rates_and_coverage_of_one_look(tail: str, documents: int) -> None:
    rng = np.random.default_rng([1, list(TAILS).index(tail), documents])
    low, high = gate_bounds(draw(tail, documents, DRAWS, 0.004, rng), 0.95)
    assert 0.93 - ROOM <= float(np.mean((low <= 0) & (high >= 0))) <= 0.97 + ROOM
    for effect in EFFECTS:
        found = rates([(documents, low, high)], effect)
        assert found.false_pass(0.01, 0.015) <= 0.05 + ROOM
        assert found.false_fail(0.015) <= 0.05 + ROOM


def test_mirrored_damage_mirrors_the_gate() -> None:
    data = draw("very skewed", 20, 200, 0.004, np.random.default_rng(4))
    low, high = gate_bounds(data, 0.95)
    mirrored_low, mirrored_high = gate_bounds(Draws(-data.d, data.w), 0.95)
    assert mirrored_low == pytest.approx(-high, rel=1e-9)
    assert mirrored_high == pytest.approx(-low, rel=1e-9)


@pytest.mark.parametrize("tail", ["t3", "very skewed"])
def test_error_rates_of_several_looks(tail: str) -> None:
    rng = np.random.default_rng([2, list(TAILS).index(tail)])
    bounds = sequential_bounds(draw(tail, 62, DRAWS, 0.004, rng), (20, 40, 62), 0.95)
    for effect in EFFECTS:
        found = rates(bounds, effect)
        assert found.false_pass(0.01, 0.015) <= 0.05 + ROOM
        assert found.false_fail(0.015) <= 0.05 + ROOM
    assert rates(bounds, 0.0).documents < 35  # clear cases stop early
    assert rates(bounds, 0.03).documents < 35


def test_the_check_covers_and_the_rejected_intervals_do_not() -> None:
    """What is reported covers; the textbook interval and BCa, reported nowhere, pass too much skewed damage."""
    rng = np.random.default_rng(3)
    found = batch_intervals(draw("skewed", 62, DRAWS, 0.004, rng), 0.95, 399, rng)
    for name in ("gate", "check"):
        low, high = found[name]
        assert 0.93 - ROOM <= float(np.mean((low <= 0) & (high >= 0))) <= 0.97 + ROOM
    above = {name: float(np.mean(high < 0)) for name, (_, high) in found.items()}
    assert min(above["linearised"], above["bca"]) > 0.05
    assert above["gate"] < above["check"] < above["linearised"]


def test_rates_add_up() -> None:
    low, high = np.array([-0.02, -0.001, 0.004]), np.array([-0.01, 0.001, 0.006])
    found = rates([(5, low, high)], 0.01)
    assert found.passed + found.warned + found.inconclusive + found.failed == pytest.approx(1.0)
    assert isinstance(Draws(low[None], high[None]), Draws)
