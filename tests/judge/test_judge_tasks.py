"""Accuracies: McNemar against statsmodels, flips, intervals, clusters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.contingency_tables import mcnemar as reference

from evalq.judge.pairs import ItemPairs
from evalq.judge.tasks import accuracy_difference, flips, mcnemar, non_inferior, tango_interval, wilson_interval
from evalq.records import Estimate


def pairs(baseline: np.ndarray, candidate: np.ndarray, clusters: np.ndarray | None = None) -> ItemPairs:
    return ItemPairs(baseline.astype(float), candidate.astype(float), clusters)


def changed(lost: int, won: int, right: int = 30, wrong: int = 30) -> ItemPairs:
    base = np.repeat([1, 0, 1, 0], [lost, won, right, wrong])
    return pairs(base, np.repeat([0, 1, 1, 0], [lost, won, right, wrong]))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_statsmodels(lost: int, won: int) -> None:
    data = changed(lost, won)
    found = mcnemar(data.baseline, data.candidate)
    assert (found.lost, found.won) == (lost, won)
    expected = reference([[30, lost], [won, 30]], exact=True).pvalue
    assert found.p_two_sided == pytest.approx(min(float(expected), 1.0), abs=1e-9)
    assert found.p_worse == pytest.approx(float(scipy.stats.binom.sf(lost - 1, lost + won, 0.5)), abs=1e-9)


def test_flips_count_both_directions() -> None:
    found = flips(changed(6, 4), "hellaswag", "acc", 0.95)
    assert found.value == 10 / 70
    expected = scipy.stats.binomtest(10, 70).proportion_ci(0.95, method="wilson")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert found.note == "6 right to wrong, 4 wrong to right"


@pytest.mark.parametrize(("changed_items", "n"), [(0, 50), (1, 50), (50, 50), (120, 817)])
def test_wilson_is_scipys(changed_items: int, n: int) -> None:
    expected = scipy.stats.binomtest(changed_items, n).proportion_ci(0.9, method="wilson")
    assert wilson_interval(changed_items, n, 0.9) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_tango_without_a_change_by_hand() -> None:
    # lost = won = 0: the likeliest P(lost) at a difference x > 0 is 0, so n x^2 = z^2 x (1 - x) and x = z^2/(n + z^2).
    room = 1.959964**2 / (100 + 1.959964**2)
    assert tango_interval(0, 0, 100, 0.95) == pytest.approx((-room, room), abs=1e-7)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 200))
def test_tango_holds_what_its_score_test_does_not_reject(lost: int, won: int, same: int) -> None:
    n = lost + won + same
    for bound in tango_interval(lost, won, n, 0.95):
        if abs(bound) > 1 - 1e-6:
            continue
        # The likeliest P(lost) when P(won) = P(lost) + bound, found by search and not by Tango's closed form.
        start, end = max(0.0, -bound) + 1e-12, (1.0 - bound) / 2.0 - 1e-12

        def loss(p: float, bound: float = bound) -> float:
            cells = ((lost, p), (won, p + bound), (same, 1.0 - 2.0 * p - bound))
            return -sum(k * math.log(max(q, 1e-300)) for k, q in cells if k)

        p = scipy.optimize.minimize_scalar(loss, bounds=(start, end), method="bounded", options={"xatol": 1e-12}).x
        score = (won - lost - n * bound) / np.sqrt(n * (2 * p + bound - bound**2))
        assert abs(score) == pytest.approx(1.959964, rel=1e-4)


def test_tango_and_wilson_cover_exactly_what_they_promise() -> None:
    """Exact coverage with 817 items of which 3 % and 2 % change sides: every outcome weighted by its probability."""
    n, lost_rate, won_rate = 817, 0.03, 0.02
    covered = 0.0
    for lost in range(5, 55):
        weight = scipy.stats.binom.pmf(lost, n, lost_rate)
        for won in range(1, 45):
            low, high = tango_interval(lost, won, n, 0.95)
            if low <= won_rate - lost_rate <= high:
                covered += weight * scipy.stats.binom.pmf(won, n - lost, won_rate / (1 - lost_rate))
    assert 0.94 <= covered <= 0.96
    flipped = sum(
        scipy.stats.binom.pmf(k, n, 0.05)
        for k in range(120)
        if wilson_interval(k, n, 0.95)[0] <= 0.05 <= wilson_interval(k, n, 0.95)[1]
    )
    assert 0.94 <= flipped <= 0.96


def test_no_change_still_has_an_interval() -> None:
    found = accuracy_difference(changed(0, 0), "hellaswag", "acc", 0.95)
    assert found.value == 0.0
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.0 < found.high


def test_continuous_values_get_a_student_interval() -> None:
    rng = np.random.default_rng(0)
    base = rng.random(50)
    shift = rng.normal(0, 0.05, 25)
    cand = base + 0.01 + np.concatenate([shift, -shift])  # symmetric: no correction for skewness
    found = accuracy_difference(pairs(base, cand), "truthfulqa_mc2", "acc", 0.95)
    expected = scipy.stats.ttest_rel(cand, base).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_items_of_one_source_are_one_observation() -> None:
    rng = np.random.default_rng(1)
    base = (rng.random(40) < 0.5).astype(float)
    cand = np.where(rng.random(40) < 0.1, 1 - base, base)
    alone = accuracy_difference(pairs(base, cand, np.arange(40).astype(str)), "t", "acc", 0.95)
    copies = np.tile(np.arange(40), 25).astype(str)
    tripled = accuracy_difference(pairs(np.tile(base, 25), np.tile(cand, 25), copies), "t", "acc", 0.95)
    assert (tripled.low, tripled.high) == pytest.approx((alone.low, alone.high), rel=1e-9)


@pytest.mark.parametrize(
    ("low", "high", "status"),
    [(-0.009, 0.01, "PASS"), (-0.01, 0.0, "PASS"), (-0.02, -0.0101, "FAIL"), (-0.02, 0.0, "INCONCLUSIVE")],
)
def test_non_inferiority(low: float, high: float, status: str) -> None:
    assert non_inferior(Estimate("x", 0.0, low, high, 0.95, 100, "m"), 0.01) == status


def test_no_interval_is_invalid() -> None:
    assert non_inferior(Estimate("x", None, None, None, 0.95, 0, "m"), 0.01) == "INVALID"


@pytest.mark.parametrize(("lost", "won"), [(0.04, 0.03), (0.015, 0.005), (0.01, 0.0)])
def test_f3_error_rates_when_the_margin_lies_inside_the_noise(lost: float, won: float) -> None:
    """Accuracy near 0.85 with a standard deviation of 0.009 has 1,574 items; the truth is exactly at a margin of 1 %."""
    counts = np.random.default_rng(0).multinomial(1574, [lost, won, 1 - lost - won], 4000)
    found = []
    for a, b, _ in counts.tolist():
        low, high = tango_interval(a, b, 1574, 0.95)
        found.append(non_inferior(Estimate("x", (b - a) / 1574, low, high, 0.95, 1574, "m"), lost - won))
    shares = {status: found.count(status) / len(found) for status in ("PASS", "FAIL", "INCONCLUSIVE")}
    room = 3 * (0.05 * 0.95 / len(found)) ** 0.5  # three Monte Carlo standard errors
    assert shares["PASS"] <= 0.05 + room
    assert shares["FAIL"] <= 0.05 + room
    assert shares["INCONCLUSIVE"] >= 0.9
