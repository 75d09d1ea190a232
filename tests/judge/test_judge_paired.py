"""Paired estimates by hand, and against formulae and libraries that evalq does not use."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from evalq.judge.paired import (
    bca_interval,
    effective_df,
    gate_interval,
    ratio,
    resample_counts,
    studentised_interval,
)


def test_ratio_by_hand() -> None:
    # D = 6/6 = 1; residuals 0-1, 2-2, 4-3 = -1, 0, 1; linearised variance 3/2 * 2 / 36.
    found = ratio(np.array([0.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]), method="linearised")
    assert found.value == 1.0
    assert found.se == pytest.approx(math.sqrt(3 / 36))
    assert found.df == 2


def test_jackknife_leaves_out_one_document_at_a_time() -> None:
    d, w = np.array([0.3, -0.2, 1.4, 0.5]), np.array([2.0, 1.0, 7.0, 3.0])
    left_out = np.array([np.delete(d, i).sum() / np.delete(w, i).sum() for i in range(4)])
    expected = math.sqrt(3 / 4 * np.sum((left_out - left_out.mean()) ** 2))
    assert ratio(d, w).se == pytest.approx(expected, rel=1e-12)


def test_tokens_as_clusters_are_llama_cpps_paired_covariance() -> None:
    """llama.cpp's perplexity tool: variance of the mean difference from both variances and their covariance."""
    rng = np.random.default_rng(0)
    base = rng.gamma(1.0, 2.5, 300_000)
    cand = base + rng.normal(0.004, 0.3, 300_000)
    n = len(base)
    variance = [(np.mean(x * x) - np.mean(x) ** 2) / (n - 1) for x in (base, cand)]
    covariance = (np.mean(base * cand) - np.mean(base) * np.mean(cand)) / (n - 1)
    expected = math.sqrt(variance[0] + variance[1] - 2 * covariance)
    for method in ("linearised", "jackknife"):
        found = ratio(cand - base, np.ones(n), method=method)
        assert found.value == pytest.approx(np.mean(cand) - np.mean(base), abs=1e-12)
        assert found.se == pytest.approx(expected, rel=1e-9)


def test_clusters_are_summed_first() -> None:
    rng = np.random.default_rng(1)
    tokens, documents = rng.normal(size=500), rng.integers(0, 12, 500)
    sums = np.array([tokens[documents == i].sum() for i in range(12)])
    counts = np.array([(documents == i).sum() for i in range(12)], float)
    found, expected = ratio(tokens, np.ones(500), documents), ratio(sums, counts)
    assert (found.value, found.se) == pytest.approx((expected.value, expected.se), rel=1e-12)


def test_effective_df_is_the_trace_formula() -> None:
    w = np.exp(np.random.default_rng(2).normal(0, 1, 9))
    total = w.sum()
    maker = np.eye(9) - np.outer(w, np.ones(9)) / total
    form = maker.T @ np.diag(1 / (total - w) ** 2) @ maker @ np.diag(w)
    assert effective_df(w) == pytest.approx(np.trace(form) ** 2 / np.trace(form @ form), rel=1e-10)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 300), st.floats(0.1, 1e4))
def test_equal_documents_have_all_their_degrees_of_freedom(n: int, size: float) -> None:
    assert effective_df(np.full(n, size)) == pytest.approx(n - 1, rel=1e-6)


def test_bca_is_scipys() -> None:
    rng = np.random.default_rng(3)
    w = rng.integers(100, 4000, 40).astype(float)
    d = w * rng.normal(0.01, 0.01, 40)
    expected = scipy.stats.bootstrap(
        (d, w),
        lambda a, b, axis=-1: a.sum(axis=axis) / b.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        rng=np.random.default_rng(4),
    ).confidence_interval
    low, high = bca_interval(d, w, 0.95, resamples=20_000)
    width = expected.high - expected.low
    assert low == pytest.approx(expected.low, abs=0.03 * width)
    assert high == pytest.approx(expected.high, abs=0.03 * width)


def test_studentised_interval_written_out() -> None:
    rng = np.random.default_rng(5)
    w, n = rng.integers(100, 4000, 30).astype(float), 30
    d = w * rng.gamma(2.0, 0.01, 30)
    point = ratio(d, w)
    counts = resample_counts(n, 400, np.random.default_rng(9))
    t = []
    for row in counts:
        drawn = np.repeat(np.arange(n), row.astype(int))
        one = ratio(d[drawn], w[drawn], method="linearised")
        t.append(abs(one.value - point.value) / one.se)
    half = np.quantile(t, 0.95) * point.se
    expected = (point.value - half, point.value + half)
    assert studentised_interval(d, w, 0.95, resamples=400, seed=9) == pytest.approx(expected, rel=1e-9)


def test_the_gate_decides_by_the_corrected_interval_and_does_not_move() -> None:
    rng = np.random.default_rng(7)
    w = rng.integers(100, 4000, 25).astype(float)
    d = w * rng.lognormal(-5, 1, 25)
    found, first = gate_interval(d, w, 0.95)
    _, again = gate_interval(d, w, 0.95)
    assert first == again
    assert (first.low, first.high) == found.interval(0.95)
    assert first.high - found.value > found.value - first.low  # the long tail is on the right
    assert first.differ  # skewed damage: the bootstrap says something else


@settings(deadline=None, max_examples=50)
@given(st.floats(-0.1, 0.1))
def test_an_effect_moves_every_interval_by_itself(effect: float) -> None:
    rng = np.random.default_rng(8)
    w = rng.integers(100, 4000, 20).astype(float)
    d = w * rng.normal(0, 0.01, 20)
    for method in (bca_interval, studentised_interval):
        low, high = method(d, w, 0.95, 500)
        assert method(d + effect * w, w, 0.95, 500) == pytest.approx((low + effect, high + effect), abs=1e-9)


@pytest.mark.parametrize(
    ("d", "w"), [([1.0], [1.0]), ([1.0, math.nan], [1.0, 1.0]), ([1.0, 2.0], [1.0, 0.0]), ([math.inf, 1], [1, 1])]
)
def test_bad_documents_are_refused(d: list[float], w: list[float]) -> None:
    with pytest.raises(ValueError, match="document"):
        ratio(np.array(d), np.array(w))


@pytest.mark.parametrize("d", [[0.01, 0.02, 0.04, 0.03], [0.01, 0.02, 0.01, 0.4], [-0.4, 0.02, 0.01, 0.02]])
def test_p_values_are_the_tails_of_the_interval(d: list[float]) -> None:
    found = ratio(np.array(d), np.ones(4))
    low, high = found.interval(0.95)
    assert found.p_above(low) == pytest.approx(0.025)
    assert found.p_below(high) == pytest.approx(0.025)
