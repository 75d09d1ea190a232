"""The correction for skewness: by hand, against scipy, and its inverse."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from evalq.judge.paired import ratio
from evalq.judge.skewness import concentration, ends, level, rate_skewness


def test_skewness_is_scipys_beyond_its_noise() -> None:
    values = np.random.default_rng(0).lognormal(0, 1, 40)
    found = rate_skewness(values - values.mean(), np.ones(40))
    assert found == pytest.approx(scipy.stats.skew(values, bias=False), rel=1e-12)


def test_skewness_within_its_noise_is_none() -> None:
    values = np.array([-1.0, 0.0, 1.05, -1.0, 0.0, 1.0])
    assert abs(scipy.stats.skew(values, bias=False)) > 0
    assert rate_skewness(values - values.mean(), np.ones(6)) == 0.0


@pytest.mark.parametrize("values", [[1.0, 5.0], [2.0, 2.0, 2.0, 2.0], [1e150, 0.0, 0.0, 0.0, 0.0]])
def test_few_constant_or_huge_values_are_numbers(values: list[float]) -> None:
    assert np.isfinite(rate_skewness(np.array(values) - np.mean(values), np.ones(len(values))))


def test_concentration_by_hand() -> None:
    assert concentration(np.full(16, 7.0)) == pytest.approx(0.25)
    # 1 + 8 over (1 + 4)^1.5
    assert concentration(np.array([1.0, 2.0])) == pytest.approx(9 / 5**1.5)


def test_ends_by_hand() -> None:
    # t = 2: (1 + 8)/6 = 1.5. Skewness 2, weight 0.5, 80 documents: blind = 1.5/sqrt(80) < 0.5, so wide = 2 + 2*1.5*0.5;
    # narrow = 2 - 0.2 * 1.5. With 20 documents blind = 3/sqrt(20) > 0.5.
    assert [float(x) for x in ends(2.0, 2.0, 0.5, 80)] == pytest.approx([1.7, 3.5])
    assert [float(x) for x in ends(2.0, -2.0, 0.5, 80)] == pytest.approx([3.5, 1.7])
    assert float(ends(2.0, 2.0, 0.5, 20)[1]) == pytest.approx(2 + 3 * 3 / 20**0.5)
    assert [float(x) for x in ends(2.0, 9.0, 1.0, 80)] == pytest.approx([4 / 3, 15.5])  # never below two thirds
    assert [float(x) for x in ends(2.0, 0.0, 0.5, 80)] == [2.0, 2.0]


@settings(deadline=None, max_examples=100)
@given(st.floats(0.01, 12), st.floats(-20, 20), st.floats(0.01, 1), st.integers(3, 5000), st.booleans())
def test_level_is_the_inverse_of_ends(t: float, skewness: float, weight: float, n: int, below: bool) -> None:
    reach = float(ends(t, skewness, weight, n)[0 if below else 1])
    found = level(reach, skewness, weight, n, below)
    assert float(ends(found, skewness, weight, n)[0 if below else 1]) == pytest.approx(reach, rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(st.floats(-20, 20), st.floats(0.01, 1), st.integers(3, 5000))
def test_a_higher_level_reaches_further(skewness: float, weight: float, n: int) -> None:
    below, above = ends(np.linspace(0.0, 12.0, 200), skewness, weight, n)
    assert (np.diff(below) > 0).all()
    assert (np.diff(above) > 0).all()


def test_a_long_document_cannot_hide_the_skewness_of_the_others() -> None:
    w = np.array([50_000.0, *[1000.0] * 19])
    d = w * np.array([0.01, *[0.004, 0.005, 0.006] * 6, 0.1])
    assert ratio(d, w).skewness > 4.0
    assert "corrected for skewness" in ratio(d, w).method
