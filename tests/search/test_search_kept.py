"""The notes of last verdicts: same search, same series; another one, a stricter level; damage is told."""

from __future__ import annotations

import json
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from evalq.errors import ConfigError, MeasurementError, RecordError
from evalq.report.progress import PlainWatcher
from evalq.search import kept as kept_module
from evalq.search.kept import BEGUN, kept_documents, read_series, require_writable, text_hash

DOCUMENTS = ["a", "b", "c"]
NOTHING = "nothing was shown"
WHOLE = {
    "order": ["x"], "documents": ["a"], "policy": "p", "level": 0.8, "created_at": "now", "verdicts": {"x": "FAIL"},
}  # fmt: skip


def opened(folder: Path, order: list[str], *statuses: str, documents: list[str] = DOCUMENTS, policy: str = "p") -> Any:
    """Judge the candidates of an order with these answers; (number, level) of the series."""
    with kept_documents(folder / "kept.json") as kept:
        series = kept.open(order, documents, policy)
        for candidate, status in zip(order, statuses, strict=False):
            kept.begin(series, candidate)
            if status == NOTHING:
                kept.withdraw(series, candidate)
            elif status != BEGUN:
                kept.settle(series, candidate, status)
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
    assert opened(tmp_path, ["x", "y"], policy="other rules")[0] == 6  # u joined the two sets: all five are before it


def test_what_showed_nothing_costs_nothing(tmp_path: Path) -> None:
    assert opened(tmp_path, ["x"], NOTHING) == (1, 0.8)
    assert opened(tmp_path, ["z"], "PASS") == (1, 0.8)
    assert len(read_series(tmp_path / "kept.json")) == 1


@pytest.mark.parametrize("first", ["FAIL", "INCONCLUSIVE", "INVALID", "PASS", BEGUN])
def test_a_look_is_never_undone(tmp_path: Path, first: str) -> None:
    opened(tmp_path, ["x"], first)
    opened(tmp_path, ["x"], "PASS")
    noted = read_series(tmp_path / "kept.json")[0].verdicts["x"]
    assert noted == ("PASS" if first in (BEGUN, "PASS") else first)


def test_killed_while_judging_counts_as_a_look(tmp_path: Path) -> None:
    opened(tmp_path, ["x"], BEGUN)
    assert opened(tmp_path, ["y"], "PASS") == (2, 0.1)
    assert opened(tmp_path, ["x"], "PASS") == (1, 0.8)  # the same search goes on at its level


def test_a_whole_series_that_is_not_finished_hands_nothing_on(tmp_path: Path) -> None:
    opened(tmp_path, ["x", "y"], "PASS")
    assert opened(tmp_path, ["z"]) == (2, 0.1)


def test_a_candidate_that_passed_keeps_the_level_at_which_it_did(tmp_path: Path) -> None:
    opened(tmp_path, ["x", "y"], "PASS", "FAIL")
    with kept_documents(tmp_path / "kept.json") as kept:
        series = kept.open(["x", "z"], DOCUMENTS, "p")
        assert kept.level_of(series, "x") == pytest.approx(0.8)
        assert kept.level_of(series, "z") == pytest.approx(0.1)
        other = kept.open(["x"], DOCUMENTS, "other rules")
        assert kept.level_of(other, "x") == other.level < 0.8


def test_private_documents_beside_a_shared_one_buy_nothing(tmp_path: Path) -> None:
    """Before each failing series on `d`, a good candidate passes on documents of its own: levels still add up to 1 at most."""
    spent = 0.0
    for n in range(6):
        opened(tmp_path, [f"good-{n}"], "PASS", documents=[f"e{n}"])
        spent += opened(tmp_path, [f"bad-{n}"], "FAIL", documents=["d", f"e{n}"])[1]
    assert spent <= 1.0


def test_documents_are_used_up_in_one_sentence(tmp_path: Path) -> None:
    levels = [opened(tmp_path, [str(n)], "FAIL")[1] for n in range(11)]
    with pytest.raises(ConfigError, match="have given 11 series of last verdicts, and what is left"):
        opened(tmp_path, ["another"])
    assert sum(levels) < 1.0
    assert opened(tmp_path, ["0"]) == (1, 0.8)  # the same search again is still answered


def test_a_text_is_known_by_its_letters_whatever_a_detokenizer_does() -> None:
    assert text_hash("The ship , built in 1 @,@ 890 .\n") == text_hash("the ship, built in 1,890.")
    assert text_hash("one ship") != text_hash("two ships")
    assert text_hash("cafe\u0301") == text_hash("caf\u00e9")
    assert text_hash("\u0915\u093f") != text_hash("\u0915\u0940")  # two syllables that differ in their vowel mark
    assert text_hash("...") != text_hash("!!!")


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


def test_whoever_waits_for_another_search_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = threading.Event()

    def wait() -> None:
        def progress(done: int, total: int, unit: str) -> None:
            PlainWatcher().progress(done, total, unit)
            waiting.set()

        with kept_documents(tmp_path / "kept.json", progress):
            pass

    with kept_documents(tmp_path / "kept.json"):
        other = threading.Thread(target=wait)
        other.start()
        assert waiting.wait(30)
    other.join()
    assert "waiting for another search that judges on the same kept documents" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "search").write_text("a file")
    with pytest.raises(MeasurementError, match=r"last verdicts cannot be noted in .* paths.root") as caught:
        require_writable(tmp_path / "search" / "kept" / "x.json")
    assert caught.value.kind == "disk"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"series": [{}]}',
        '{"series": 3}',
        '{"series": {}}',
        '{"series": "", "more": 1}',
        "[" * 100_000,
        json.dumps({"series": [{"order": [1], "documents": [], "policy": "p", "level": 0.8, "created_at": "now"}]}),
        json.dumps({"series": [{**WHOLE, "verdicts": []}]}),
        json.dumps({"series": [{**WHOLE, "verdicts": {}}]}),
        json.dumps({"series": [{**WHOLE, "documents": "abc"}]}),
        json.dumps({"series": [{**WHOLE, "level": True}]}),
        json.dumps({"series": [{**WHOLE, "verdicts": {"x": "perhaps"}}]}),
        json.dumps({"series": [{"order": [], "documents": [], "policy": "p", "level": 7.0, "created_at": "now"}]}),
    ],
)
def test_damaged_notes_are_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "kept.json").write_text(text)
    with pytest.raises(RecordError, match=r"cannot be read .* move it away and keep other documents"):
        opened(tmp_path, ["x"], "PASS")
    assert (tmp_path / "kept.json").read_text() == text


def test_places_are_tried_by_many_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: require_writable(tmp_path / "kept" / "x.json"), range(400)))
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_module, "write_text", full)
    with pytest.raises(MeasurementError, match=r"No space left on device.*paths\.root"):
        opened(tmp_path, ["x"], "PASS")
    (tmp_path / ".blocked.json.lock").mkdir()
    with (
        pytest.raises(MeasurementError, match="last verdicts cannot be noted"),
        kept_documents(tmp_path / "blocked.json"),
    ):
        pass
