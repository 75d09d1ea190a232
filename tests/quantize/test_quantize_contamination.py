"""Contamination: a shared run of 50 tokens is found wherever it lies and named; clean text is never accused."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalq.errors import ConfigError
from evalq.quantize.contamination import (
    RUN_TOKENS,
    Document,
    check_contamination,
    first_shared,
    overlaps,
    run_hashes,
    runs_of,
    words,
)

WORDS = [f"word{n}" for n in range(400)]


def text(seed: int, length: int = 200) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=length))


@settings(deadline=None)
@given(st.integers(0, 150), st.integers(0, 150), st.integers(0, 2))
def test_a_planted_run_is_found_and_its_document_named(start: int, place: int, which: int) -> None:
    documents = [Document(f"document {n}", text(n)) for n in range(3)]
    run = documents[which].text.split()[start : start + RUN_TOKENS]
    mine = text(99).split()
    planted = " ".join([*mine[:place], *run, *mine[place:]])
    found = overlaps([text(7), planted], documents)
    assert [(o.text, o.document, o.reading) for o in found] == [(1, f"document {which}", "words")]


@given(st.integers(0, 151))
def test_one_word_less_is_clean(start: int) -> None:
    documents = [Document("d", text(1))]
    run = documents[0].text.split()[start : start + RUN_TOKENS - 1]
    assert overlaps([" ".join(["before", *run, "after"])], documents) == []


def test_case_spaces_and_punctuation_hide_nothing() -> None:
    plain = text(5)
    changed = " @-@ ".join(word.upper() for word in plain.split())
    assert overlaps([changed], [Document("page", plain)])[0].document == "page"


def test_a_hash_only_nominates(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every hash equal, the tokens still decide."""
    import evalq.quantize.contamination as module

    def same(tokens: np.ndarray, run: int = RUN_TOKENS) -> np.ndarray:
        return np.zeros(max(0, len(tokens) - run + 1), dtype=np.uint64)

    monkeypatch.setattr(module, "run_hashes", same)
    assert overlaps([text(1, 60)], [Document("d", text(2, 60))]) == []
    assert len(overlaps([text(1, 60)], [Document("d", text(1, 60))])) == 1


def test_runs_do_not_reach_across_documents() -> None:
    whole = text(3, 100).split()
    halves = [Document("a", " ".join(whole[:25])), Document("b", " ".join(whole[25:50]))]
    assert overlaps([" ".join(whole[:50])], halves) == []


def test_short_texts_have_no_runs() -> None:
    assert len(run_hashes(words("a b c"))) == 0
    assert first_shared(words("a b c"), runs_of([Document("d", "a b c")], words)) is None
    assert len(run_hashes(words(" ".join(WORDS[:RUN_TOKENS])))) == 1


def test_the_error_names_text_and_document() -> None:
    with pytest.raises(
        ConfigError,
        match=r"calibration text 0 of mine\.jsonl \(it begins '.+'\) shares 50 words in a row with document 4",
    ):
        check_contamination([text(1)], "mine.jsonl", [Document("document 4 of WikiText-2 test", text(1))])
    check_contamination([text(1)], "mine.jsonl", [Document("x", text(2))])
