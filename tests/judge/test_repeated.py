"""Repeated series of verdicts on the same documents keep one error rate together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalq.judge.repeated import confidence_at, level, share


def test_by_hand() -> None:
    assert [share(n) for n in range(4)] == pytest.approx([0.8, 0.1, 0.05, 0.025])
    assert level([]) == pytest.approx(0.8)
    assert level([False]) == pytest.approx(0.1)
    assert level([True]) == pytest.approx(0.9)  # 0.8 handed on, and 0.1 of its own
    assert level([False, False]) == pytest.approx(0.05)
    assert level([True, False]) == pytest.approx(0.05)
    assert level([False, True]) == pytest.approx(0.15)
    assert level([True, True]) == pytest.approx(0.95)
    assert confidence_at(0.95, 0.8) == pytest.approx(0.96)
    assert confidence_at(0.95, 0.1) == pytest.approx(0.995)


@given(st.lists(st.booleans(), max_size=40))
def test_no_more_than_the_whole_is_ever_spent(history: list[bool]) -> None:
    levels = [level(history[:n]) for n in range(len(history) + 1)]
    assert all(0.0 < one <= 1.0 for one in levels)
    spent = sum(one for one, passed in zip(levels, history, strict=False) if not passed)
    assert spent + levels[-1] <= 1.0 + 1e-12  # what tests that did not pass had, and the next one's


@pytest.mark.parametrize("harmful", [0.3, 1.0])
def test_many_searches_together_pass_wrongly_no_more_often_than_one_may(harmful: float) -> None:
    """Of 12 series on the same documents, a share is harmful (its p is uniform), the others pass surely."""
    rng, alpha, runs = np.random.default_rng(1), 0.025, 20_000
    wrong = 0
    for _ in range(runs):
        history: list[bool] = []
        for _ in range(12):
            is_harmful = rng.random() < harmful
            passed = not is_harmful or rng.random() < alpha * level(history)
            if is_harmful and passed:
                wrong += 1
                break
            history.append(passed)
    assert wrong / runs < alpha + 3 * (alpha * (1 - alpha) / runs) ** 0.5
