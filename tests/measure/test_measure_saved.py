"""Scores kept on the way: what a killed run finished is found again, what it did not is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evalq.measure.saved import SavedScores


def rows(count: int, start: float = 0.0) -> dict[str, np.ndarray]:
    return {"logprob": np.arange(count, dtype=np.float32) + start, "topk_id": np.zeros((count, 2), np.int32)}


def test_finished_sequences_survive(tmp_path: Path) -> None:
    first = SavedScores(tmp_path / "p", "key")
    first.keep({"a": rows(3), "b": rows(1, 9.0)})
    first.keep({"c": rows(0)})
    second = SavedScores(tmp_path / "p", "key")
    assert len(second) == 3
    assert second.get("d") is None
    np.testing.assert_array_equal(second.get("a")["logprob"], [0, 1, 2])
    np.testing.assert_array_equal(second.get("b")["logprob"], [9])
    assert second.get("a")["topk_id"].shape == (3, 2)
    second.keep({"d": rows(2)})
    assert len(SavedScores(tmp_path / "p", "key")) == 4


def test_another_measurement_does_not_read_them(tmp_path: Path) -> None:
    SavedScores(tmp_path / "p", "key").keep({"a": rows(3)})
    assert len(SavedScores(tmp_path / "p", "another")) == 0
    assert not (tmp_path / "p").exists()


@given(st.integers(0, 400))
@settings(max_examples=30, deadline=None)
def test_cut_file_costs_its_sequences_only(tmp_path_factory: object, cut: int) -> None:
    folder = tmp_path_factory.mktemp("saved")  # type: ignore[attr-defined]
    saved = SavedScores(folder, "key")
    saved.keep({"a": rows(3)})
    saved.keep({"b": rows(2)})
    file = sorted(folder.glob("*.npz"))[1]
    file.write_bytes(file.read_bytes()[:cut])
    again = SavedScores(folder, "key")
    assert again.get("a") is not None
    again.keep({"b": rows(2)})
    assert len(SavedScores(folder, "key")) == 2


def test_cleared_when_the_group_is_done(tmp_path: Path) -> None:
    saved = SavedScores(tmp_path / "p", "key")
    saved.keep({"a": rows(1)})
    saved.clear()
    assert not (tmp_path / "p").exists()


@given(st.integers(0, 600), st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_never_stops_a_resume(tmp_path_factory: object, at: int, byte: int) -> None:
    folder = tmp_path_factory.mktemp("saved")  # type: ignore[attr-defined]
    SavedScores(folder, "key").keep({"a": rows(3)})
    file = next(folder.glob("*.npz"))
    content = bytearray(file.read_bytes())
    content[at % len(content)] = byte
    file.write_bytes(bytes(content))
    again = SavedScores(folder, "key")
    again.keep({"b": rows(2)})
    assert SavedScores(folder, "key").get("b") is not None


def test_restarted_scores_are_gone_and_known_by_their_mark(tmp_path: Path) -> None:
    saved = SavedScores(tmp_path / "p", "key")
    assert saved.mark == ""
    saved.keep({"a": rows(3)})
    saved.restart("m")
    assert (len(saved), saved.mark) == (0, "m")
    saved.keep({"b": rows(1)})
    again = SavedScores(tmp_path / "p", "key")
    assert (len(again), again.mark, again.get("a")) == (1, "m", None)
