"""Figures of event lists, by hand and by property."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_builder import request
from scipy import stats

from evalq.loads.figures import (
    T_975,
    after_warm_up,
    is_good,
    output_bound,
    percentile,
    run_figures,
    spread,
    spreads,
)

times = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


def test_rates_and_latencies_of_two_requests_by_hand() -> None:
    """11 tokens each: 0.1 + 10 x 0.01 = 0.2 s, and 0.3 + 10 x 0.03 = 0.6 s; both within 2 s."""
    figures = run_figures([request(), request(ttft=0.3, gap=0.03)], 2.0)
    assert figures["output_tokens_per_second"] == 11.0
    assert figures["input_tokens_per_second"] == 50.0
    assert figures["total_tokens_per_second"] == 61.0
    assert figures["requests_per_second"] == 1.0
    assert figures["ttft_mean_seconds"] == pytest.approx(0.2)
    assert figures["tpot_p50_seconds"] == pytest.approx(0.02)
    assert figures["latency_p99_seconds"] == pytest.approx(0.2 + 0.99 * 0.4)
    assert figures["itl_p90_seconds"] == pytest.approx(0.03)
    assert figures["requests_failed"] == 0.0
    assert "goodput_requests_per_second" not in figures
    assert "joules_per_token" not in figures


def test_failed_requests_count_in_no_rate() -> None:
    figures = run_figures([request(), request(ok=False)], 1.0)
    assert figures["requests_failed"] == 1.0
    assert figures["output_tokens_per_second"] == 11.0


def test_nothing_answered_has_no_figures() -> None:
    assert run_figures([request(ok=False)], 1.0) == {"requests_failed": 1.0}
    assert run_figures([], 0.0) == {"requests_failed": 0.0}


def test_goodput_keeps_every_objective() -> None:
    slow_first, slow_tokens = request(ttft=1.5), request(gap=0.2)
    slo = {"ttft_seconds": 1.0, "tpot_seconds": 0.05}
    assert [is_good(r, slo) for r in (request(), slow_first, slow_tokens)] == [True, False, False]
    figures = run_figures([request(), slow_first, slow_tokens], 2.0, slo)
    assert figures["goodput_requests_per_second"] == 0.5
    assert figures["goodput_share"] == pytest.approx(1 / 3)


def test_one_token_has_no_time_per_token_and_keeps_that_objective() -> None:
    only = request(tokens=1)
    assert only.tpot is None
    assert is_good(only, {"tpot_seconds": 0.0001})


def test_energy_per_token_by_hand() -> None:
    """22 J over 11 + 11 output tokens, and over 122 tokens in all."""
    figures = run_figures([request(), request()], 1.0, joules=22.0)
    assert figures["joules_per_output_token"] == 1.0
    assert figures["joules_per_token"] == pytest.approx(22 / 122)


def test_e3_slow_first_seconds_are_outside_the_window() -> None:
    """e3: two slow requests first, four fast ones after: with them 4 times slower than without."""
    slow = [request(start=0.0, ttft=5.0), request(start=0.1, ttft=5.0)]
    fast = [request(start=6.0 + i) for i in range(4)]
    kept, seconds = after_warm_up([*slow, *fast], 2)
    assert kept == fast
    assert seconds == pytest.approx(3.2)
    assert run_figures(kept, seconds)["ttft_p99_seconds"] == pytest.approx(0.1)


def test_request_sent_before_warm_up_was_over_is_left_out() -> None:
    kept, _ = after_warm_up([request(start=0.0, ttft=5.0), request(start=1.0), request(start=7.0)], 1)
    assert [r.start for r in kept] == [7.0]
    assert after_warm_up([request()], 1) == ([], 0.0)


@given(times, st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


def test_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


@given(st.lists(st.floats(0.001, 1e5), min_size=1, max_size=20))
def test_median_lies_in_its_range(values: list[float]) -> None:
    found = spread(values)
    assert found.low is not None
    assert found.value is not None
    assert found.high is not None
    assert found.low <= found.value <= found.high
    assert (found.run_to_run is None) == (len(values) == 1)


def test_t_is_students() -> None:
    assert pytest.approx([stats.t.ppf(0.975, n) for n in range(1, 11)], abs=6e-4) == list(T_975)


@pytest.mark.parametrize("repeats", [3, 5])
def test_run_to_run_covers_pairs_of_identical_runs(repeats: int) -> None:
    """Of 4,000 pairs of runs with normal repeats, 95 % differ by less than the reported spread; nine of ten are asked for."""
    draw = random.Random(7)
    covered = 0
    for _ in range(4000):
        first, second = ([draw.gauss(100.0, 5.0) for _ in range(repeats)] for _ in range(2))
        reported = spread(first)
        assert reported.run_to_run is not None
        assert reported.value is not None
        covered += abs(reported.value - (spread(second).value or math.nan)) < reported.run_to_run
    assert 0.93 < covered / 4000 < 0.97


def test_spreads_only_of_figures_that_every_repeat_has() -> None:
    found = spreads([{"a": 1.0, "b": 2.0}, {"a": 3.0}])
    assert list(found) == ["a"]
    assert found["a"].value == 2.0
    assert spreads([]) == {}


def test_output_bound_by_hand() -> None:
    """5 prompt tokens for each output token at 50,000/s are 0.1 ms; 10,000 decoded/s are 0.1 ms: 5,000/s in all."""
    assert output_bound(50_000, 10_000, 500, 100) == pytest.approx(5_000)
