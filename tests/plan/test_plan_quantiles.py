"""Quantiles and tails against scipy."""

from __future__ import annotations

import math

import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from evalq.plan import quantiles as q


@settings(deadline=None, max_examples=50)
@given(st.floats(1e-6, 1 - 1e-6), st.floats(0.5, 5000))
def test_t_quantile_is_scipys(p: float, df: float) -> None:
    assert q.t_quantile(p, df) == pytest.approx(float(scipy.stats.t.ppf(p, df)), rel=1e-7, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.floats(-40, 40), st.floats(0.5, 5000))
def test_t_tail_is_scipys(t: float, df: float) -> None:
    assert q.t_tail(t, df) == pytest.approx(float(scipy.stats.t.sf(t, df)), rel=1e-8, abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 60), st.integers(0, 60))
def test_binomial_tail_is_scipys(successes: int, trials: int) -> None:
    expected = float(scipy.stats.binom.sf(successes - 1, trials, 0.5))
    assert q.binomial_upper_tail(successes, trials) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("successes", "trials"), [(0, 20), (3, 50), (50, 50), (17, 817), (1, 2)])
def test_share_interval_is_clopper_pearson(successes: int, trials: int) -> None:
    expected = scipy.stats.binomtest(successes, trials).proportion_ci(0.95)
    assert q.share_interval(successes, trials, 0.95) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_normal_values_of_the_tables() -> None:
    assert q.normal_quantile(0.975) == pytest.approx(1.959964, abs=1e-6)
    assert q.normal_tail(1.959964) == pytest.approx(0.025, abs=1e-7)
    assert q.t_tail(1.0, math.inf) == pytest.approx(q.normal_tail(1.0))


@pytest.mark.parametrize(("p", "df"), [(0.0, 5), (1.0, 5), (0.5, 0), (math.nan, 3)])
def test_impossible_requests_are_refused(p: float, df: float) -> None:
    with pytest.raises(ValueError, match="needs 0 < p < 1"):
        q.t_quantile(p, df)
