"""What reviewers said of paired outputs: preference, coherence, facts, each with its test, and how far they agree.

The unit is the prompt: several reviewers of one prompt are averaged first, so that more reviewers do not look like more
prompts. Results speak about prompts like these and these reviewers. Advice in the gate, never a verdict by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from evalq.errors import RecordError
from evalq.judge.agreement import krippendorff
from evalq.judge.paired import Floats, ratio
from evalq.plan.quantiles import binomial_upper_tail, share_interval
from evalq.records import Check, Estimate, from_mapping, parse_json

RESULT_VERSION = 1
RESULT_FILE = "review.json"
SCALE = (1, 5)
ADVISED = ("coherence_difference_points", "candidate_preferred")  # estimates that the advice is made from
DEFAULT_MARGIN = 0.25  # points of coherence that the candidate may lose


@dataclass(frozen=True)
class Answer:
    """One reviewer on one prompt, unblinded. preference: 1 candidate, 0 tie, -1 baseline. facts: 1 right, 0 wrong."""

    reviewer: str
    item: str
    preference: int | None
    coherence_baseline: int | None
    coherence_candidate: int | None
    facts_baseline: int | None = None
    facts_candidate: int | None = None


@dataclass(frozen=True)
class ReviewResult:
    """A review that was read back; `review.json`."""

    schema_version: int
    review_id: str
    baseline_id: str
    candidate_id: str
    prompts: int  # of the prompt set
    identical: int  # prompts whose two outputs were equal; nobody was asked about them
    reviewers: list[str]
    answers: int
    margin: float  # points of coherence
    sign_p: float | None  # two-sided, exact
    wilcoxon_p: float | None  # two-sided, exact
    estimates: list[Estimate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_result(file: Path) -> ReviewResult:
    """Read review.json, or the folder it is in. Errors: RecordError in one sentence."""
    file = file / RESULT_FILE if file.is_dir() else file
    try:
        data = parse_json(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"review {file} cannot be read ({error}); run evalq review read first") from error
    if not isinstance(data, dict) or data.get("schema_version") != RESULT_VERSION:
        raise RecordError(f"review {file} is not of version {RESULT_VERSION}; run evalq review read again")
    result = from_mapping(ReviewResult, data, str(file))
    lacking = sorted(set(ADVISED) - {estimate.name for estimate in result.estimates})
    if lacking:
        raise RecordError(f"review {file} has no {', '.join(lacking)}; run evalq review read again")
    return result


def analyse(
    answers: Sequence[Answer],
    ids: tuple[str, str, str],
    prompts: int,
    identical: int,
    margin: float = DEFAULT_MARGIN,
    confidence: float = 0.95,
) -> ReviewResult:
    """All figures of a review. ids: review, baseline, candidate. Errors: RecordError without any answer or with one twice."""
    if not answers:
        raise RecordError("there are no answers; have at least one reviewer fill the form in and download the answers")
    seen = {(answer.reviewer, answer.item) for answer in answers}
    if len(seen) != len(answers):
        raise RecordError(
            "a reviewer answered one item twice; give each reviewer a name of their own, and each file once"
        )
    preference = _by_item((a.item, None if a.preference is None else float(a.preference)) for a in answers)
    coherence = _by_item((a.item, _gap(a.coherence_candidate, a.coherence_baseline)) for a in answers)
    facts = _by_item((a.item, _gap(a.facts_candidate, a.facts_baseline)) for a in answers)
    sign_p, preferred = _sign(preference, confidence)
    estimates = [preferred, _mean("coherence_difference_points", coherence, confidence)]
    estimates += [_mean("facts_right_difference", facts, confidence)] if len(facts) else []
    reviewers = sorted({answer.reviewer for answer in answers})
    if len(reviewers) > 1:
        estimates += _agreement(answers, reviewers, confidence)
    notes = [f"{identical} of {prompts} prompts had the same output from both and were not shown"] if identical else []
    if len(reviewers) == 1:
        notes.append("one reviewer: agreement between reviewers cannot be measured; ask a second one")
    wilcoxon_p = signed_rank_p(coherence) if len(coherence) else None
    return ReviewResult(
        RESULT_VERSION, *ids, prompts, identical, reviewers, len(answers), margin, sign_p, wilcoxon_p, estimates, notes
    )


def _gap(candidate: int | None, baseline: int | None) -> float | None:
    return None if candidate is None or baseline is None else float(candidate - baseline)


def _by_item(values: Iterable[tuple[str, float | None]]) -> Floats:
    """Mean over reviewers of each item that anyone answered; (items,)."""
    found: dict[str, list[float]] = {}
    for item, value in values:
        if value is not None:
            found.setdefault(item, []).append(value)
    return np.array([float(np.mean(found[item])) for item in sorted(found)])


def _sign(preference: Floats, confidence: float) -> tuple[float | None, Estimate]:
    """Exact sign test of the items that reviewers, on balance, decided, and the share that the candidate won."""
    won, lost = int((preference > 0).sum()), int((preference < 0).sum())
    n, ties = won + lost, int((preference == 0).sum())
    note = f"{won} prompts to the candidate, {lost} to the baseline, {ties} ties"
    name = "candidate_preferred"
    if n == 0:
        return None, Estimate(name, None, None, None, confidence, 0, "share of decided prompts", note=note)
    low, high = share_interval(won, n, confidence)
    p = min(1.0, 2.0 * binomial_upper_tail(max(won, lost), n))
    return p, Estimate(name, won / n, low, high, confidence, n, "share of decided prompts, exact sign test", note=note)


def _mean(name: str, values: Floats, confidence: float) -> Estimate:
    """Mean over items with a Student interval, corrected for skewness."""
    if len(values) < 2:
        value = float(values.mean()) if len(values) else None
        return Estimate(name, value, None, None, confidence, len(values), "mean over prompts", note="too few prompts")
    found = ratio(values, np.ones(len(values)))
    low, high = found.interval(confidence)
    return Estimate(name, found.value, low, high, confidence, len(values), "mean over prompts, Student")


def signed_rank_p(differences: Floats) -> float:
    """Two-sided p of Wilcoxon's signed-rank test from its exact distribution, midranks for ties; zeros are left out.

    Source: Wilcoxon 1945; the distribution given the ranks is a convolution over signs (Lehmann, Nonparametrics, 1975).
    """
    d = np.round(np.asarray(differences, float), 12)
    d = d[d != 0.0]
    if len(d) == 0:
        return 1.0
    _, index, counts = np.unique(np.abs(d), return_inverse=True, return_counts=True)
    doubled = (2 * np.cumsum(counts) - counts + 1)[index]  # twice the midrank, a whole number
    ways = np.array([1.0])
    for rank in doubled:  # probability of each sum of doubled ranks with a positive sign
        grown = np.zeros(len(ways) + int(rank))
        grown[: len(ways)] += 0.5 * ways
        grown[int(rank) :] += 0.5 * ways
        ways = grown
    w = int(doubled[d > 0].sum())
    tail = min(float(ways[: w + 1].sum()), float(ways[w:].sum()))
    return min(1.0, 2.0 * tail)


def _agreement(answers: Sequence[Answer], reviewers: Sequence[str], confidence: float) -> list[Estimate]:
    items = sorted({answer.item for answer in answers})
    preference = np.full((len(reviewers), len(items)), math.nan)
    coherence = np.full((len(reviewers), 2 * len(items)), math.nan)
    for answer in answers:
        row, column = reviewers.index(answer.reviewer), items.index(answer.item)
        preference[row, column] = math.nan if answer.preference is None else answer.preference
        for offset, value in enumerate((answer.coherence_baseline, answer.coherence_candidate)):
            coherence[row, 2 * column + offset] = math.nan if value is None else value
    return [
        krippendorff("preference_alpha", preference, False, confidence),
        krippendorff("coherence_alpha", coherence, True, confidence),
    ]


def advice(result: ReviewResult) -> list[Check]:
    """The review as checks of a verdict; none is required."""
    by_name = {estimate.name: estimate for estimate in result.estimates}
    coherence, preferred = (by_name[name] for name in ADVISED)
    who = f"{len(result.reviewers)} reviewers, {coherence.n} prompts"
    status = "INCONCLUSIVE"
    if coherence.low is not None and coherence.high is not None:
        status = "PASS" if coherence.low >= -result.margin else "FAIL" if coherence.high < -result.margin else status
    alpha = by_name.get("coherence_alpha")
    agree = "" if alpha is None or alpha.value is None else f", agreement alpha {alpha.value:.2f}"
    said = f"coherence {_signed(coherence)} of 5 points, margin {result.margin:g} ({who}{_p('Wilcoxon', result.wilcoxon_p)}{agree})"
    share = (
        "nobody decided"
        if preferred.value is None
        else f"candidate preferred in {preferred.value:.0%} of {preferred.n}"
    )
    won = f"{share} ({preferred.note}{_p('sign test', result.sign_p)})"
    worse = preferred.high is not None and preferred.high < 0.5
    return [
        Check("review coherence", False, status, coherence, None, None, f"human review: {said}"),
        Check(
            "review preference",
            False,
            "FAIL" if worse else "INCONCLUSIVE",
            preferred,
            None,
            None,
            f"human review: {won}",
        ),
    ]


def _signed(estimate: Estimate) -> str:
    if estimate.value is None:
        return "unknown"
    bounds = "" if estimate.low is None or estimate.high is None else f" [{estimate.low:+.2f}, {estimate.high:+.2f}]"
    return f"{estimate.value:+.2f}{bounds}"


def _p(test: str, p: float | None) -> str:
    return "" if p is None else f", {test} p={p:.3g}"
