"""Alpha spending, and the gate's error rates by a fast simulation (the full one is jobs/bench/gate_simulation.py)."""

from __future__ import annotations

import numpy as np
import pytest

from evalq.errors import RecordError
from evalq.judge.paired import gate_interval, ratio
from evalq.judge.sequential import look_confidence, next_look
from evalq.judge.simulation import EFFECTS, TAILS, Draws, batch_intervals, draw, rates, sequential_bounds

DRAWS = 1200
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
        student = found.interval(0.95)
        assert (batch["jackknife"][0][i], batch["jackknife"][1][i]) == pytest.approx(student, rel=1e-9)
        linear = ratio(data.d[i], data.w[i], method="linearised").interval(0.95)
        assert (batch["linearised"][0][i], batch["linearised"][1][i]) == pytest.approx(linear, rel=1e-9)
        width = interval.high - interval.low
        assert batch["gate"][0][i] == pytest.approx(interval.low, abs=0.05 * width)
        assert batch["gate"][1][i] == pytest.approx(interval.high, abs=0.05 * width)


@pytest.mark.parametrize("tail", ["normal", "t3", "skewed"])
@pytest.mark.parametrize("documents", [20, 62])
def test_error_rates_and_coverage_of_one_look(tail: str, documents: int) -> None:
    rng = np.random.default_rng([1, list(TAILS).index(tail), documents])
    low, high = batch_intervals(draw(tail, documents, DRAWS, 0.004, rng), 0.95, 799, rng)["gate"]
    assert 0.93 - ROOM <= float(np.mean((low <= 0) & (high >= 0))) <= 0.97 + ROOM
    for effect in EFFECTS:
        found = rates([(documents, low, high)], effect)
        assert found.false_pass(0.01, 0.015) <= 0.05 + ROOM
        assert found.false_fail(0.015) <= 0.05 + ROOM


@pytest.mark.parametrize("tail", ["t3", "skewed"])
def test_error_rates_of_several_looks(tail: str) -> None:
    rng = np.random.default_rng([2, list(TAILS).index(tail)])
    bounds = sequential_bounds(draw(tail, 62, DRAWS, 0.004, rng), (20, 40, 62), 0.95, 1999, rng)
    for effect in EFFECTS:
        found = rates(bounds, effect)
        assert found.false_pass(0.01, 0.015) <= 0.05 + ROOM
        assert found.false_fail(0.015) <= 0.05 + ROOM
    assert rates(bounds, 0.0).documents < 35  # clear cases stop early
    assert rates(bounds, 0.03).documents < 35


def test_a_student_interval_alone_would_pass_too_much() -> None:
    """Why the gate takes the outer bounds: with skewed damage and 20 documents the plain interval is too short."""
    rng = np.random.default_rng(3)
    found = batch_intervals(draw("skewed", 20, 3000, 0.004, rng), 0.95, 399, rng)
    assert float(np.mean(found["linearised"][1] < 0)) > 0.06
    assert float(np.mean(found["gate"][1] < 0)) < float(np.mean(found["linearised"][1] < 0))


def test_rates_add_up() -> None:
    low, high = np.array([-0.02, -0.001, 0.004]), np.array([-0.01, 0.001, 0.006])
    found = rates([(5, low, high)], 0.01)
    assert found.passed + found.warned + found.inconclusive + found.failed == pytest.approx(1.0)
    assert isinstance(Draws(low[None], high[None]), Draws)
