"""The notes of last verdicts: same search, same series; another one, a stricter level; damage is told."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from evalq.errors import RecordError
from evalq.search.kept import UNKNOWN, kept_documents, read_series

DOCUMENTS = ["a", "b", "c"]


def opened(folder: Path, order: list[str], *statuses: str, documents: list[str] = DOCUMENTS, policy: str = "p") -> Any:
    """Judge the candidates of an order with these answers; (number, level) of the series."""
    with kept_documents(folder, "kept") as kept:
        series = kept.open(order, documents, policy)
        for candidate, status in zip(order, statuses, strict=False):
            kept.note(series, candidate, UNKNOWN)
            kept.note(series, candidate, status)
        return kept.number(series), round(series.level, 6)


def test_levels_of_one_search_after_the_other(tmp_path: Path) -> None:
    assert opened(tmp_path, ["x", "y"], "PASS", "FAIL") == (1, 0.8)
    assert opened(tmp_path, ["x", "y"]) == (1, 0.8)  # the same search again
    assert opened(tmp_path, ["z"], "PASS") == (2, 0.1)
    assert opened(tmp_path, ["w"], "INCONCLUSIVE") == (3, 0.15)  # z passed and hands its tenth on
    assert opened(tmp_path, ["v"], "PASS", documents=["d", "e"]) == (1, 0.8)  # other documents
    assert opened(tmp_path, ["u"], "PASS", documents=["c", "d"]) == (
        5,
        0.0375,
    )  # shares c with the first, d with the last
    assert opened(tmp_path, ["x", "y"], policy="other rules")[0] == 5  # x and y, z, w, u before it


def test_what_could_not_be_judged_costs_nothing(tmp_path: Path) -> None:
    assert opened(tmp_path, ["x"], "FAILED") == (1, 0.8)
    assert opened(tmp_path, ["y"], "INVALID") == (1, 0.8)
    assert opened(tmp_path, ["z"], "PASS") == (1, 0.8)
    assert len(read_series(tmp_path / "kept.json")) == 1


def test_killed_while_judging_counts_as_a_look(tmp_path: Path) -> None:
    opened(tmp_path, ["x"], UNKNOWN)
    assert opened(tmp_path, ["y"], "PASS") == (2, 0.1)
    assert opened(tmp_path, ["x"], "PASS") == (1, 0.8)  # the same search goes on at its level


def test_a_whole_series_that_is_not_finished_hands_nothing_on(tmp_path: Path) -> None:
    opened(tmp_path, ["x", "y"], "PASS")
    assert opened(tmp_path, ["z"]) == (2, 0.1)


def test_a_candidate_that_passed_keeps_the_level_at_which_it_did(tmp_path: Path) -> None:
    opened(tmp_path, ["x", "y"], "PASS", "FAIL")
    with kept_documents(tmp_path, "kept") as kept:
        series = kept.open(["x", "z"], DOCUMENTS, "p")
        assert kept.level_of(series, "x") == pytest.approx(0.8)
        assert kept.level_of(series, "z") == pytest.approx(0.1)
        other = kept.open(["x"], DOCUMENTS, "other rules")
        assert kept.level_of(other, "x") == other.level < 0.8


def _judge_once(folder: Path, name: str, barrier: Any) -> None:
    barrier.wait()
    opened(folder, [name], "FAIL")


def test_two_searches_at_once_get_two_levels(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    processes = [context.Process(target=_judge_once, args=(tmp_path, name, barrier)) for name in "abcd"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [round(one.level, 4) for one in read_series(tmp_path / "kept.json")] == [0.8, 0.1, 0.05, 0.025]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"series": [{}]}',
        '{"series": 3}',
        json.dumps({"series": [{"order": [1], "documents": [], "policy": "p", "level": 0.8, "created_at": "now"}]}),
        json.dumps({"series": [{"order": [], "documents": [], "policy": "p", "level": 7.0, "created_at": "now"}]}),
    ],
)
def test_damaged_notes_are_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "kept.json").write_text(text)
    with pytest.raises(RecordError, match=r"cannot be read .* move it away and keep other documents"):
        opened(tmp_path, ["x"], "PASS")
    assert (tmp_path / "kept.json").read_text() == text
