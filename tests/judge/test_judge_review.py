"""Human review: published and hand-worked figures, and simulated reviewers whose effect is known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalq.errors import RecordError
from evalq.judge.agreement import krippendorff
from evalq.judge.review import Answer, ReviewResult, advice, analyse, read_result, signed_rank_p
from evalq.records import Estimate, to_json

IDS = ("review-1", "b", "c")
NO = math.nan
PUBLISHED = np.array(  # Krippendorff 2011, example C: four observers, twelve units
    [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, NO, NO, NO],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, NO, 3],
        [NO, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, NO],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, NO],
    ]
)


@pytest.mark.parametrize(("ordinal", "alpha"), [(False, 0.743), (True, 0.815)])
def test_alpha_of_the_published_example(ordinal: bool, alpha: float) -> None:
    found = krippendorff("x", PUBLISHED, ordinal)
    assert found.value == pytest.approx(alpha, abs=5e-4)
    assert found.n == 11, "the unit with one rating says nothing"
    assert found.low is not None
    assert found.high is not None
    assert found.low < alpha < found.high


def test_alpha_without_anything_to_agree_on() -> None:
    assert krippendorff("x", np.full((2, 5), 3.0), True).value is None
    assert krippendorff("x", np.array([[1.0, NO], [NO, 2.0]]), True).value is None


@given(st.lists(st.integers(1, 5), min_size=3, max_size=12))
def test_two_who_always_agree_have_alpha_one(ratings: list[int]) -> None:
    found = krippendorff("x", np.array([ratings, ratings], float), True)
    assert found.value is None if len(set(ratings)) == 1 else found.value == pytest.approx(1.0)


def test_signed_ranks_by_hand() -> None:
    """Ranks 1 to 4, the smallest negative: W- = 1, P(W- <= 1) = 2/16, two-sided 4/16."""
    assert signed_rank_p(np.array([-1.0, 2.0, 3.0, 4.0, 0.0])) == pytest.approx(0.25)
    assert signed_rank_p(np.array([1.0, 1.0])) == pytest.approx(0.5), "ties: midranks 1.5, W- = 0 in 1 of 4"
    assert signed_rank_p(np.zeros(5)) == 1.0


def test_signed_ranks_agree_with_scipy() -> None:
    wilcoxon = pytest.importorskip("scipy.stats").wilcoxon
    rng = np.random.default_rng(1)
    for n in (6, 15, 30):
        d = rng.normal(0.3, 1.0, n)
        assert signed_rank_p(d) == pytest.approx(wilcoxon(d, method="exact").pvalue, rel=1e-9)


def simulated(rng: np.random.Generator, effect: float, prompts: int = 40, reviewers: int = 3) -> list[Answer]:
    """Reviewers who see a latent quality of each prompt and side, each with a bias and noise of their own."""
    quality = rng.normal(3.2, 0.6, prompts)
    change = effect + rng.normal(0.0, 0.5, prompts)
    answers = []
    for reviewer in range(reviewers):
        bias = rng.normal(0.0, 0.3)
        first = quality + bias + rng.normal(0.0, 0.5, prompts)
        second = quality + change + bias + rng.normal(0.0, 0.5, prompts)
        for i in range(prompts):
            before, after = (int(np.clip(round(x), 1, 5)) for x in (first[i], second[i]))
            gap = second[i] - first[i]
            preference = 0 if abs(gap) < 0.3 else 1 if gap > 0 else -1
            answers.append(Answer(f"r{reviewer}", f"p{i:03d}", preference, before, after, 1, int(rng.random() > 0.1)))
    return answers


def by_name(result: ReviewResult) -> dict[str, Estimate]:
    return {estimate.name: estimate for estimate in result.estimates}


def test_a_known_effect_is_recovered() -> None:
    """Over 60 simulated reviews the interval holds the true loss of 0.5 points about as often as it says."""
    inside, found_worse = 0, 0
    for seed in range(60):
        result = analyse(simulated(np.random.default_rng(seed), -0.5), IDS, 40, 0)
        estimate = by_name(result)["coherence_difference_points"]
        assert estimate.low is not None
        assert estimate.high is not None
        inside += estimate.low <= -0.5 <= estimate.high
        found_worse += (result.sign_p or 1.0) < 0.05 and (result.wilcoxon_p or 1.0) < 0.05
    assert inside >= 52  # P(X <= 51) < 0.5 % for Binomial(60, 0.95) when the scale's ends pull the mean in a little
    assert found_worse >= 57


def test_no_effect_is_rarely_found() -> None:
    false = sum(
        (analyse(simulated(np.random.default_rng(seed), 0.0), IDS, 40, 0).wilcoxon_p or 1.0) < 0.05
        for seed in range(60)
    )
    assert false <= 8  # P(X > 8) < 0.5 % for Binomial(60, 0.05)


def test_reviewers_who_guess_have_no_agreement() -> None:
    rng = np.random.default_rng(5)
    guesses = [
        Answer(f"r{r}", f"p{i}", int(rng.integers(-1, 2)), int(rng.integers(1, 6)), int(rng.integers(1, 6)))
        for r in range(3)
        for i in range(60)
    ]
    found = by_name(analyse(guesses, IDS, 60, 0))
    for name in ("preference_alpha", "coherence_alpha"):
        alpha = found[name]
        assert alpha.low is not None
        assert alpha.high is not None
        assert alpha.low < 0.0 < alpha.high
    honest = by_name(analyse(simulated(np.random.default_rng(2), -0.5), IDS, 40, 0))["coherence_alpha"]
    assert honest.value is not None
    assert honest.value > 0.3


def test_more_reviewers_are_not_more_prompts() -> None:
    answers = simulated(np.random.default_rng(3), -0.2, reviewers=1)
    copied = [replace(answer, reviewer=name) for answer in answers for name in ("x", "y", "z")]
    one, three = analyse(answers, IDS, 40, 0), analyse(copied, IDS, 40, 0)
    assert by_name(three)["coherence_difference_points"].low == pytest.approx(
        by_name(one)["coherence_difference_points"].low
    )
    assert three.sign_p == one.sign_p
    assert "one reviewer" in " ".join(one.notes)


def test_advice_never_decides(tmp_path: Path) -> None:
    worse = analyse(simulated(np.random.default_rng(4), -1.0), IDS, 42, 2)
    checks = advice(worse)
    assert [check.required for check in checks] == [False, False]
    assert [check.status for check in checks] == ["FAIL", "FAIL"]
    assert "margin 0.25 (3 reviewers, 40 prompts" in checks[0].reason
    (tmp_path / "review.json").write_text(to_json(worse))
    assert read_result(tmp_path) == worse
    equal = advice(analyse(simulated(np.random.default_rng(4), 0.3), IDS, 40, 0))
    assert equal[0].status == "PASS"


def test_what_cannot_be_analysed() -> None:
    answer = Answer("r", "p1", 1, 3, 4)
    with pytest.raises(RecordError, match="no answers"):
        analyse([], IDS, 2, 0)
    with pytest.raises(RecordError, match="twice"):
        analyse([answer, answer], IDS, 2, 0)
    alone = analyse([answer], IDS, 2, 0)
    assert by_name(alone)["coherence_difference_points"].low is None
    assert by_name(analyse([Answer("r", "p1", None, None, None)], IDS, 2, 0))["candidate_preferred"].value is None
