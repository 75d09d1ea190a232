"""`evalq review make` and `read` from outputs in files, and their advice in the gate."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import record_builder as rb

from evalq.cli import main
from evalq.cli.outputs import read_prompts
from evalq.errors import ConfigError
from evalq.records import read_verdict

SCRIPT = "<script>alert(1)</script> & __ITEMS__"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two records, and outputs of both to six prompts; the candidate's hold markup."""
    rows = rb.baseline_rows(documents=24, items=20)
    good = rb.damaged(rows, 0.003)
    rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    rb.write(tmp_path / "c", rb.record("good", good), good)
    for name, text in (("first", "plain text"), ("second", SCRIPT)):
        lines = [json.dumps({"prompt": f"prompt {i}", "output": f"{text} {i}"}) for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def make(place: Path, *more: str) -> int:
    records = ["--baseline", str(place / "b"), "--candidate", str(place / "c"), "--root", str(place)]
    files = ["--baseline-outputs", str(place / "first.jsonl"), "--candidate-outputs", str(place / "second.jsonl")]
    return main(["review", "make", *records, *files, "--out", str(place / "review"), *more])


def answer(place: Path, reviewer: str, prefer: str) -> Path:
    """Answers of a reviewer who always prefers the baseline or the candidate."""
    key = json.loads((place / "review" / "key.json").read_text())
    answers = []
    for item, letter in key["candidate_is"].items():
        chosen = letter if prefer == "candidate" else "ab".replace(letter, "")
        other = "ab".replace(chosen, "")
        answers.append({"item": item, "preference": chosen, f"coherence_{chosen}": 5, f"coherence_{other}": 3})
    file = place / f"{reviewer}.json"
    file.write_text(
        json.dumps({"schema_version": 1, "review_id": key["review_id"], "reviewer": reviewer, "answers": answers})
    )
    return file


def test_from_outputs_to_advice_in_the_gate(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(place) == 0
    files = [str(answer(place, name, "baseline")) for name in ("ann", "bob")]
    assert main(["review", "read", str(place / "review"), *files]) == 0
    text = capsys.readouterr().out
    assert "coherence_difference_points: -2.000" in text
    assert "exact sign test, two-sided: p=0.03125" in text, "2 / 2^6"
    gate = ["gate", "--baseline", str(place / "b"), "--candidate", str(place / "c"), "--out", str(place / "out")]
    assert main([*gate, "--review", str(place / "review")]) == 0, "advice: the verdict stays what the figures say"
    verdict = read_verdict(place / "out")
    assert [check.status for check in verdict.checks if check.metric.startswith("review")] == ["FAIL", "FAIL"]
    assert "advice: human review: coherence -2.00" in " ".join(verdict.reasons)
    assert (
        main(
            [*gate, "--review", str(place / "review"), "--baseline", str(place / "c"), "--candidate", str(place / "b")]
        )
        == 5
    )


def test_the_form_is_one_file_that_asks_nobody(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(place) == 0
    page = (place / "review" / "form.html").read_text()
    assert "<script>alert(1)</script>" not in page, "outputs are text, never markup"
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; __ITEMS__" in page
    assert not re.search(r"https?://|src=|@import|url\(", page.replace("img-src data:", ""))
    for word in ("baseline", "candidate", "good-id", "mixed-4-8"):
        assert word not in page, "the form is blind"
    assert page.count("<fieldset>") == 6 * 5
    assert main(["review", "read", str(place / "review")]) == 2
    assert "no answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("second", "do not hold the same prompts"),
        ("cut", "line 2"),
        ("one", "belong together"),
        ("out", "holds a review already"),
    ],
)
def test_refusals(place: Path, change: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    more: list[str] = []
    if change == "second":
        (place / "second.jsonl").write_text(json.dumps({"prompt": "x", "output": "y"}))
    elif change == "cut":
        (place / "second.jsonl").write_text('{"prompt": "prompt 0", "output": "y"}\n{"prompt": "prom')
    elif change == "out":
        assert make(place) == 0
    if change == "one":
        records = ["--baseline", str(place / "b"), "--candidate", str(place / "c"), "--out", str(place / "review")]
        assert main(["review", "make", *records, "--baseline-outputs", str(place / "first.jsonl")]) == 2
    else:
        assert make(place, *more) == 2
    assert words in capsys.readouterr().err


def test_prompts(tmp_path: Path) -> None:
    own = read_prompts(None, None)
    assert len(own) == 40
    assert len(set(own)) == 40
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "p.txt", None) == ["one", "two"]
    (tmp_path / "p.txt").write_text("one\none\n")
    with pytest.raises(ConfigError, match="twice"):
        read_prompts(tmp_path / "p.txt", None)
