"""Needle retrieval: a number hidden at some depth of a long text, asked for at its end, counted by exact match."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evalq.config import KvConfig
from evalq.kvrecord import NEEDLE_ANSWER_TOKENS, NeedleScore
from evalq.measure.engine import Engine
from evalq.measure.kv.documents import Document, encode, first_token, ids_hash

CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Quito", "Turin", "Perth", "Delhi", "Riga")
NEEDLE = " The secret number of {city} is {number}. Remember it: the secret number of {city} is {number}. "
QUESTION = "\n\nQuestion: What is the secret number of {city}?\nAnswer: The secret number of {city} is"


@dataclass(frozen=True)
class Needle:
    """One prompt of exactly `length` tokens; `depth` in percent of the text before the needle."""

    length: int
    depth: int
    ids: list[int]
    expected: str


def make_needles(tokenizer: Any, documents: Sequence[Document], kv: KvConfig) -> list[Needle]:
    """The grid: lengths x depths x repeats, drawn by the seed; the text repeats itself where the data is short."""
    haystack = [token for document in documents for token in encode(tokenizer, document.text)]
    needles = []
    for length in kv.needle_lengths:
        for depth in kv.needle_depths:
            for repeat in range(kv.needle_repeats):
                random = np.random.default_rng([kv.seed, length, depth, repeat])
                needles.append(_make(tokenizer, haystack, length, depth, random))
    return needles


def _make(tokenizer: Any, haystack: list[int], length: int, depth: int, random: np.random.Generator) -> Needle:
    city, number = str(random.choice(CITIES)), str(random.integers(10_000, 100_000))
    needle = encode(tokenizer, NEEDLE.format(city=city, number=number))
    question = encode(tokenizer, QUESTION.format(city=city))
    room = max(0, length - 1 - len(needle) - len(question))
    start = int(random.integers(0, len(haystack)))
    text = [haystack[(start + i) % len(haystack)] for i in range(room)]
    cut = round(room * depth / 100)
    ids = [first_token(tokenizer), *text[:cut], *needle, *text[cut:], *question]
    return Needle(length, depth, ids, number)


def is_named(answer: str, expected: str) -> bool:
    """Whether the first number of an answer is exactly the hidden one."""
    found = re.search(r"\d[\d,]*", answer)
    return found is not None and found[0].replace(",", "") == expected


def score_needles(
    engine: Engine, documents: Sequence[Document], kv: KvConfig
) -> tuple[NeedleScore, list[dict[str, Any]]]:
    """The score and its needles rows."""
    began = time.monotonic()
    tokenizer: Any = engine.tokenizer
    needles = make_needles(tokenizer, documents, kv)
    answers = [tokenizer.decode(ids) for ids in engine.greedy([needle.ids for needle in needles], NEEDLE_ANSWER_TOKENS)]
    rows = [
        {
            "item_id": i,
            "length": needle.length,
            "depth": needle.depth,
            "ids_hash": ids_hash([needle.ids]),
            "expected": needle.expected,
            "answer": answer,
            "value": float(is_named(answer, needle.expected)),
        }
        for i, (needle, answer) in enumerate(zip(needles, answers, strict=True))
    ]
    score = NeedleScore(
        items=len(rows),
        lengths=list(kv.needle_lengths),
        depths=list(kv.needle_depths),
        accuracy=float(np.mean([row["value"] for row in rows])) if rows else None,
        ids_hash=ids_hash([needle.ids for needle in needles]),
        seconds=round(time.monotonic() - began, 3),
    )
    return score, rows
