"""Drift: hand-worked difference of two texts, and its three answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t as student

from evalq.judge.drift import drift
from evalq.judge.pairs import DocumentPairs


def pairs(d: list[float], words: float = 100.0) -> DocumentPairs:
    damage = np.array(d) * words
    base = np.full(len(d), 300.0)
    counts = {unit: np.full(len(d), words) for unit in ("tokens", "words", "bytes")}
    return DocumentPairs(base, base + damage, counts, np.arange(len(d)))


def test_hand_worked() -> None:
    """Means 0.01 and 0.02 per word; sample deviations 0.001 over 4 and 9 documents of one length."""
    first = [0.01 + s for s in (-0.001, 0.001, -0.001, 0.001)]
    second = [0.02 + s for s in (-0.001, 0.001, -0.001, 0.001, 0.0, 0.001, -0.001, 0.001, -0.001)]
    found = drift(pairs(first), pairs(second), "word_perplexity", 0.01, 0.95)
    variance = [np.var(x, ddof=1) / len(x) for x in (first, second)]
    df = sum(variance) ** 2 / (variance[0] ** 2 / 3 + variance[1] ** 2 / 8)
    half = student.ppf(0.975, df) * math.sqrt(sum(variance))
    assert found.extra.value == pytest.approx(math.expm1(0.01))
    assert found.extra.low == pytest.approx(math.expm1(0.01 - half), rel=1e-6)
    assert found.extra.high == pytest.approx(math.expm1(0.01 + half), rel=1e-6)
    assert found.reference.value == pytest.approx(math.expm1(0.01))
    assert found.status == "INCONCLUSIVE"  # 0.01 is about the margin itself


@pytest.mark.parametrize(
    ("extra", "noise", "status"), [(0.0, 0.001, "FITS"), (0.05, 0.001, "DRIFTED"), (0.01, 0.05, "INCONCLUSIVE")]
)
def test_answers(extra: float, noise: float, status: str) -> None:
    chance = np.random.default_rng(1)
    first = pairs(list(0.02 + noise * chance.standard_normal(30)))
    second = pairs(list(0.02 + extra + noise * chance.standard_normal(30)))
    found = drift(first, second, "word_perplexity", 0.01, 0.95)
    assert found.status == status
    assert ("recalibrate" in found.reason) == (status == "DRIFTED")


def test_the_same_values_fit_and_one_document_is_refused() -> None:
    same = pairs([0.01] * 5)
    assert drift(same, same, "byte_perplexity", 0.01, 0.95).status == "FITS"
    with pytest.raises(ValueError, match="1 documents have no interval"):
        drift(same, pairs([0.01]), "word_perplexity", 0.01, 0.95)
