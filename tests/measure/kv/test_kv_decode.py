"""Planning the decode path, rows from large steps left out, needles, loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalq.config import KvConfig
from evalq.measure.kv.decode import plan_segments, score_decode, token_rows
from evalq.measure.kv.documents import Document, embedded_documents, ids_hash, long_windows, task_documents
from evalq.measure.kv.generation import loop_start
from evalq.measure.kv.needle import is_named, make_needles
from evalq.measure.scores import ScoreRequest, ScoreResult


class Letters:
    """One token per letter."""

    bos_token_id = None
    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) for letter in text]


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    segments=st.integers(1, 4),
    tokens=st.integers(1, 80),
    block=st.sampled_from([1, 16, 32]),
    seed=st.integers(0, 99),
)
def test_segments_fit_and_do_not_overlap(lengths: list[int], segments: int, tokens: int, block: int, seed: int) -> None:
    windows = {i: list(range(length)) for i, length in enumerate(lengths)}
    rounds = plan_segments(windows, segments, tokens, block, seed)
    ends = dict.fromkeys(windows, 0)
    for segment in (segment for part in rounds for segment in part):
        assert segment.start % block == 0
        assert segment.start >= max(1, ends[segment.doc_id])
        assert len(segment.ids) == segment.start + tokens + 1 <= len(windows[segment.doc_id])
        assert segment.ids == windows[segment.doc_id][: len(segment.ids)]
        ends[segment.doc_id] = segment.start + tokens


def test_segments_are_spread_and_seeded() -> None:
    windows = {5: list(range(2048))}
    rounds = plan_segments(windows, 4, 64, 16, 0)
    starts = [part[0].start for part in rounds]
    assert [start // 512 for start in starts] == [0, 1, 2, 3]
    assert starts == [part[0].start for part in plan_segments(windows, 4, 64, 16, 0)]
    assert starts != [part[0].start for part in plan_segments(windows, 4, 64, 16, 1)]
    assert plan_segments({0: list(range(40))}, 1, 64, 16, 0) == [[]]


class Engine:
    """Scores -1 each; `chunk` tokens per step whatever was asked for."""

    scorer, scorer_note = "hook", ""
    tokenizer = Letters()

    def __init__(self, chunk: int = 1, pool: int = 10_000) -> None:
        self.chunk, self.pool = chunk, pool
        self.steps: list[tuple[int, int, int]] = []
        self.computed: list[int] = []
        self.batches: list[int] = []

    def settings(self) -> dict[str, Any]:
        return {"block_size": 16, "num_blocks": self.pool // 16, "max_num_seqs": 64}

    def reset_prefix_cache(self) -> None: ...

    def ask_workers(self, method: str, *_: Any) -> list[Any]:
        taken, self.steps = self.steps, []
        return [taken if method == "evalq_take_steps" else ""]

    def compute(self, sequences: list[list[int]]) -> None:
        self.computed.extend(len(ids) for ids in sequences)
        self.batches.append(len(sequences))

    def score_paced(
        self, requests: list[ScoreRequest], step: int, topk: int, share_prefixes: bool
    ) -> list[ScoreResult | None]:
        results: list[ScoreResult | None] = []
        for owner, request in enumerate(requests):
            for first in range(request.first - 1, len(request.ids), self.chunk):
                self.steps.append((owner, first, min(self.chunk, len(request.ids) - first)))
            n = len(request.ids) - request.first
            ones = np.full(n, -1.0, np.float32)
            results.append(
                ScoreResult(ones, np.ones(n, np.int32), ones, np.ones((n, topk), np.int32), np.full((n, topk), -1.0))
            )
        return results


TEXTS = [Document(i, chr(97 + i) * 700) for i in range(6)]
SETTINGS = KvConfig(decode_documents=6, decode_segments=2, decode_tokens=20, topk=2)


def test_every_token_of_the_plan_is_a_row() -> None:
    engine: Any = Engine()
    score, rows = score_decode(engine, TEXTS, 512, SETTINGS)
    assert (score.documents, score.segments, score.tokens, score.left_out) == (6, 12, 240, 0)
    assert score.token_perplexity == pytest.approx(np.e)
    assert len({(row["doc_id"], row["window_position"]) for row in rows}) == 240
    for row in rows:
        assert row["token_id"] == 97 + row["doc_id"]


def test_rows_from_larger_steps_are_left_out() -> None:
    engine: Any = Engine(chunk=3)
    score, rows = score_decode(engine, TEXTS, 512, SETTINGS)
    assert rows == []
    assert (score.tokens, score.left_out, score.token_perplexity) == (0, 240, None)


def test_documents_wait_for_room_in_the_pool() -> None:
    engine: Any = Engine(pool=2048)
    score_decode(engine, TEXTS, 512, SETTINGS)
    assert max(engine.batches) == 2


def test_same_text_twice_is_one_document() -> None:
    engine: Any = Engine()
    score, _ = score_decode(engine, [*TEXTS, Document(9, TEXTS[0].text)], 512, SETTINGS)
    assert score.documents == 6


def test_token_rows_leave_out_by_the_token_that_was_computed() -> None:
    values = np.asarray([-1.0, -2.0, -3.0], np.float32)
    result = ScoreResult(values, np.asarray([1, 2, 3]), values, None, None)
    rows = token_rows("decode", 4, [10, 11, 12, 13, 14], 2, result, {2})
    assert [(row["window_position"], row["token_id"], row["logprob"]) for row in rows] == [(2, 12, -1.0), (4, 14, -3.0)]


def test_long_windows_are_whole_and_disjoint() -> None:
    windows = long_windows(Letters(), [Document(0, "abcdefg"), Document(1, "hijklmnopq")], 6, 9)
    assert windows == [[0, *map(ord, "abcde")], [0, *map(ord, "fghij")], [0, *map(ord, "klmno")]]
    assert len(long_windows(Letters(), TEXTS, 100, 3)) == 3


def test_documents_of_a_task_are_what_it_scores() -> None:
    class Task:
        eval_docs = ["a", "b", "c"]  # noqa: RUF012

        def doc_to_target(self, row: str) -> str:
            return row.upper()

    assert [d.text for d in task_documents({"wikitext": Task()}, 2)] == ["A", "B"]
    assert task_documents({}, None) == embedded_documents()


def test_needle_grid_is_whole_seeded_and_has_the_needle_where_it_says() -> None:
    kv = KvConfig(needle_lengths=[400, 800], needle_depths=[0, 50, 100], needle_repeats=2)
    made = make_needles(Letters(), TEXTS, kv)
    assert [(n.length, n.depth) for n in made] == [(x, d) for x in (400, 800) for d in (0, 50, 100) for _ in range(2)]
    for needle in made:
        assert len(needle.ids) == needle.length
        text = "".join(map(chr, needle.ids[1:]))
        assert text.count(needle.expected) == 2
        room = needle.length - 1 - len(text) + len(text.replace("The secret", ""))  # only its order of size matters
        assert abs(text.index("The secret") / max(1, room) - needle.depth / 100) < 0.45
    assert ids_hash([n.ids for n in made]) == ids_hash([n.ids for n in make_needles(Letters(), TEXTS, kv)])
    assert len({n.expected for n in made}) > 6


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (" 48213. Remember", True),
        (" 48,213", True),
        ("482131", False),
        (" 4821", False),
        ("no number", False),
        (" 1 48213", False),
    ],
)
def test_exact_match(answer: str, named: bool) -> None:
    assert is_named(answer, "48213") is named


@pytest.mark.parametrize(
    ("ids", "start"),
    [
        ([1, 2, 3, *[7, 8] * 10], 3),
        ([5] * 40, 0),
        (list(range(64)), -1),
        ([1, 2, *[3] * 10], -1),  # too short to be called a loop
        ([*range(20), *[1, 2, 3, 4, 5, 6, 7, 8] * 2], -1),  # twice is no loop
        ([*range(20), *[1, 2, 3, 4, 5, 6, 7, 8] * 3], 20),
        ([], -1),
    ],
)
def test_loops(ids: list[int], start: int) -> None:
    assert loop_start(ids) == start
