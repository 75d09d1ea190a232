"""Requests that share a prefix cache: nobody may find a block of its own scored part there."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from evalq.measure.scores import Call, Portion, ScoreRequest, common, portions, waves

PREAMBLE = list(range(100, 108))


def test_endings_that_begin_alike_up_to_the_end_of_a_block_are_apart() -> None:
    """Blocks of 4: the context ends at 10, so the first block with a scored token ends at 12."""
    endings = [[1, 2, 3], [1, 2, 4], [1, 5, 3], [1, 2, 3, 9]]
    requests = [ScoreRequest([*PREAMBLE, 7, 7, *ending], 10) for ending in endings]
    assert waves(requests, 4) == [[0, 2], [1], [3]]


def test_the_last_token_is_always_computed() -> None:
    """A sequence that ends with the block cannot be found whole."""
    requests = [ScoreRequest([*PREAMBLE, 7, 7, 1, 2], 10) for _ in range(2)]
    assert waves(requests, 4) == [[0, 1]]


def test_a_sequence_that_ends_with_the_block_fills_it_and_nobody_may_read_it_then() -> None:
    """Blocks of 3: [0, 0, 0] is filled by a sequence that is no longer, and the longer one would find its scored part there."""
    short, long = ScoreRequest([0, 0, 0], 1), ScoreRequest([0, 0, 0, 0], 1)
    assert waves([short, long], 3) == [[0], [1]]
    assert waves([long, short, short], 3) == [[0, 1, 2]]


def test_a_context_that_ends_with_a_block_is_not_found_whole() -> None:
    """Its last row predicts the first scored token; one token later in the block, and the context is shared."""
    requests = [ScoreRequest([*PREAMBLE, ending, 5, 5, 5, 5], 8) for ending in (1, 2, 3)]
    assert waves(requests, 4) == [[0], [1], [2]]
    requests = [ScoreRequest([*PREAMBLE, 6, ending, 5, 5, 5], 9) for ending in (1, 2, 3)]
    assert waves(requests, 4) == [[0, 1, 2]]


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=2, max_size=12), st.integers(1, 11)), max_size=20))
def test_nobody_finds_its_scored_part(rows: list[tuple[list[int], int]]) -> None:
    """Caches as the engine does: whole blocks of what is computed; read up to the last token but one."""
    block = 3
    requests = [ScoreRequest(ids, min(first, len(ids) - 1)) for ids, first in rows]
    found = waves(requests, block)
    assert sorted(i for wave in found for i in wave) == list(range(len(requests)))
    same_first = len({request.first for request in requests}) <= 1
    for wave in found:
        cached: set[tuple[int, ...]] = set()
        for i in wave:
            ids, first = requests[i].ids, requests[i].first
            read = max((n for n in range(0, len(ids), block) if n == 0 or tuple(ids[:n]) in cached), default=0)
            if same_first:  # what two contexts of one text leave is scored once more, without the cache
                assert read < first
            cached |= {tuple(ids[:n]) for n in range(block, len(ids) + 1, block)}


def test_a_part_of_a_call_keeps_its_keys() -> None:
    call = Call(2, ["a", "b", "c"], None, None)
    assert call.of([2, 0]).keys == ["c", "a"]
    assert Call(0, [], None, None).of([1]).keys == []


def test_portions_are_cut_by_tokens_and_a_longer_request_has_its_own() -> None:
    requests = [ScoreRequest([0] * length, 1) for length in (4, 4, 3, 20, 2, 10)]
    found = portions(requests, 10, None)
    assert found == [
        Portion([0, 1], None),
        Portion([2], None),
        Portion([3], None),
        Portion([4], None),
        Portion([5], None),
    ]


def test_a_beginning_in_common_counts_once_where_it_is_shared() -> None:
    """Blocks of 4; a preamble of 8 and endings of 3 tokens: 11 + 3 + 3 fit into 17."""
    requests = [ScoreRequest([*PREAMBLE, i, 1, 2], 9) for i in range(4)]
    assert portions(requests, 17, 4) == [Portion([0, 1, 2], [0, 0, 0]), Portion([3], [0])]
    assert [portion.numbers for portion in portions(requests, 17, None)] == [[0], [1], [2], [3]]
    assert (common([1, 2, 3], [1, 2, 4]), common([1], [1, 2]), common([], [1])) == (2, 1, 0)


def test_waves_share_a_portion_and_not_their_beginnings() -> None:
    """Blocks of 4. Endings that begin alike for a block are of two waves; the second wave pays for its preamble."""
    requests = [ScoreRequest([*PREAMBLE, 1, 2, 3, 4, last], 9) for last in (5, 6)]
    assert portions(requests, 26, 4) == [Portion([0, 1], [0, 1])]
    assert portions(requests, 25, 4) == [Portion([0], [0]), Portion([1], [1])]


def test_no_requests_no_portions() -> None:
    assert portions([], 10, None) == portions([], 10, 4) == []


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), max_size=30),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_every_request_is_in_one_portion_of_bounded_size(rows: list[list[int]], most: int, block: int | None) -> None:
    requests = [ScoreRequest(ids, 1) for ids in rows]
    found = portions(requests, most, block)
    assert sorted(i for portion in found for i in portion.numbers) == list(range(len(requests)))
    for portion in found:
        assert portion.numbers
        assert (portion.waves is None) == (block is None)
        lengths = [len(requests[i].ids) for i in portion.numbers]
        alike = []
        if portion.waves is not None:
            assert len(portion.waves) == len(portion.numbers)
            pairs = zip(pairwise(portion.numbers), pairwise(portion.waves), strict=True)
            alike = [common(requests[i].ids, requests[j].ids) for (i, j), (v, w) in pairs if v == w]
        assert len(lengths) == 1 or sum(lengths) - sum(alike) <= most
