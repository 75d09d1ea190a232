"""What the planned data can show."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import record_builder as rb
from hypothesis import given, settings
from hypothesis import strategies as st

from evalq.config import GateConfig, RunConfig
from evalq.judge.gate import judge
from evalq.plan.power import (
    describe_visible_effect,
    detectable_effect,
    documents_to_decide,
    needed,
    resolutions,
)
from evalq.plan.spread import expected_flips, spreads_from_baseline, spreads_from_verdicts


def test_detectable_effect_by_hand() -> None:
    # 61 df: t(0.975) = 1.99962, t(0.8) = 0.84767; sd 0.0055, n 62.
    assert detectable_effect(0.0055, 62) == pytest.approx((1.99962 + 0.84767) * 0.0055 / math.sqrt(62), rel=1e-4)


def test_truthfulqa_cannot_resolve_one_percent_and_wikitext_can() -> None:
    config = RunConfig()
    config.data.name = "local"
    lines = describe_visible_effect(config).splitlines()
    assert lines[0].startswith("wikitext: resolves 1 %")
    assert any(line.startswith("truthfulqa_mc1: cannot resolve 1 %") and "817 items" in line for line in lines)


def test_limits_reduce_the_counts() -> None:
    config = RunConfig()
    config.data.name = "hub"
    config.tasks.perplexity_limit = 5
    config.tasks.hellaswag = False
    text = describe_visible_effect(config)
    assert "5 documents" in text
    assert "hellaswag" not in text


def test_nothing_is_resolved_with_one_document() -> None:
    (found,) = resolutions({"wikitext": 1}, 0.01)
    assert not found.resolves


@settings(deadline=None, max_examples=50)
@given(st.floats(1e-4, 1.0), st.floats(1e-3, 0.5))
def test_needed_is_the_smallest_count_that_shows_the_effect(spread: float, effect: float) -> None:
    n = needed(spread, effect)
    assert n is not None
    assert detectable_effect(spread, n) <= effect
    assert n == 2 or detectable_effect(spread, n - 1) > effect


def test_an_effect_of_nothing_needs_no_finite_number() -> None:
    assert needed(0.01, 0.0) is None


def test_documents_to_decide_shrinks_the_interval_to_the_bound() -> None:
    more = documents_to_decide(0.012, 0.003, 20, 0.015, 0.95)
    assert more is not None
    total = 20 + more
    assert 1.96 * 0.003 * math.sqrt(20 / total) <= 0.003  # the normal half width at most the distance
    assert documents_to_decide(0.015, 0.003, 20, 0.015, 0.95) is None


def test_spreads_from_an_earlier_pair_return_its_standard_error(tmp_path: Path) -> None:
    rows = rb.baseline_rows()
    changed = rb.damaged(rows, 0.004, flips=5)
    first = rb.write(tmp_path / "a", rb.record("baseline", rows), rows)
    second = rb.write(tmp_path / "b", rb.record("cand", changed), changed)
    verdict = judge(first, tmp_path / "a", second, tmp_path / "b", GateConfig())
    spreads = spreads_from_verdicts([verdict])
    assert spreads["wikitext"][0] == pytest.approx(0.002 * 1.3, rel=0.6)  # noise 0.002 a word, uneven lengths
    assert set(spreads) == {"wikitext", "hellaswag", "truthfulqa_mc1", "truthfulqa_mc2"}


def test_spreads_from_a_baseline_alone(tmp_path: Path) -> None:
    rows = rb.baseline_rows()
    first = rb.write(tmp_path / "a", rb.record("baseline", rows), rows)
    spreads = spreads_from_baseline(first, tmp_path / "a")
    assert 0.001 < spreads["wikitext"][0] < 0.1
    assert spreads["hellaswag"][0] == pytest.approx(math.sqrt(expected_flips(np.array([1.0]))))


def test_near_ties_flip_half_the_time_and_clear_answers_never() -> None:
    assert expected_flips(np.array([0.0])) == pytest.approx(0.5)
    assert expected_flips(np.array([50.0])) == pytest.approx(0.0)
    assert expected_flips(np.array([])) == 0.0
