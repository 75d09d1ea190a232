"""Blinding: nothing that reviewers get says whose output is whose, and the key undoes it exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalq.errors import RecordError
from evalq.judge.blind import (
    KEY_FILE,
    PAIRS_FILE,
    Key,
    blind,
    read_answers,
    read_key,
    read_pairs,
    unblinded,
    write_review,
)

PROMPTS = [f"prompt {i}" for i in range(12)]
FIRST, SECOND = [f"first {i}" for i in range(12)], [f"second {i}" for i in range(12)]
IDS = ("base-id", "cand-id")


@given(st.integers(0, 2**32))
def test_every_output_is_shown_once_and_the_key_says_whose(seed: int) -> None:
    pairs, key = blind("r", IDS, PROMPTS, FIRST, SECOND, seed)
    for pair in pairs.pairs:
        i = PROMPTS.index(pair.prompt)
        candidate, baseline = (pair.a, pair.b) if key.candidate_is[pair.item] == "a" else (pair.b, pair.a)
        assert (candidate, baseline) == (SECOND[i], FIRST[i])
    assert sorted(key.candidate_is.values()).count("a") == 6, "always answering A says nothing"


def test_what_reviewers_see_names_nobody(tmp_path: Path) -> None:
    pairs, key = blind("r", IDS, PROMPTS, FIRST, SECOND, 1)
    write_review(tmp_path, pairs, key)
    seen = (tmp_path / PAIRS_FILE).read_text()
    assert "base-id" not in seen
    assert "candidate" not in seen
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o077 == 0
    assert (read_pairs(tmp_path), read_key(tmp_path)) == (pairs, key)
    with pytest.raises(RecordError, match="holds a review already"):
        write_review(tmp_path, pairs, key)


def test_equal_outputs_are_not_shown() -> None:
    pairs, key = blind("r", IDS, PROMPTS, FIRST, [*FIRST[:11], "other"], 1)
    assert (len(pairs.pairs), key.identical, key.prompts) == (1, 11, 12)
    with pytest.raises(RecordError, match="nothing to review"):
        blind("r", IDS, PROMPTS, FIRST, [f" {text}\n" for text in FIRST], 1)
    with pytest.raises(RecordError, match="12 prompts, 12 outputs of the baseline and 11"):
        blind("r", IDS, PROMPTS, FIRST, SECOND[:11], 1)


KEY = Key(1, "r", *IDS, 2, 0, {"p001": "a", "p002": "b"})


def test_answers_are_turned_around_by_the_key() -> None:
    given_a = {
        "item": "p001",
        "preference": "a",
        "coherence_a": 5,
        "coherence_b": 2,
        "facts_a": "right",
        "facts_b": "unsure",
    }
    first = unblinded("me", given_a, KEY, "x")
    assert (first.preference, first.coherence_candidate, first.coherence_baseline) == (1, 5, 2)
    assert (first.facts_candidate, first.facts_baseline) == (1, None)
    second = unblinded("me", given_a | {"item": "p002"}, KEY, "x")
    assert (second.preference, second.coherence_candidate, second.coherence_baseline) == (-1, 2, 5)
    assert unblinded("me", {"item": "p001", "preference": "tie"}, KEY, "x").preference == 0
    assert unblinded("me", {"item": "p001", "coherence_a": "4"}, KEY, "x").coherence_candidate == 4, "MLflow keeps text"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"item": "p009"}, "is no item of review r"),
        ("p001", "is no item"),
        ({"item": "p001", "coherence_a": 6}, "allowed: 1 to 5"),
        ({"item": "p001", "coherence_a": True}, "allowed: 1 to 5"),
        ({"item": "p001", "preference": "A"}, "allowed: a, b, tie"),
    ],
)
def test_answers_outside_the_form_are_refused(given: object, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        unblinded("me", given, KEY, "x")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "no file of answers"),
        ({"review_id": "other", "reviewer": "me", "answers": []}, "answers review 'other'"),
        ({"review_id": "r", "reviewer": " ", "answers": []}, "does not say who answered"),
    ],
)
def test_files_that_are_no_answers(tmp_path: Path, data: object, words: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(RecordError, match=words):
        read_answers(tmp_path / "a.json", KEY)
