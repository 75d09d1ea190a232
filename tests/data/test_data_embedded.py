"""The embedded evaluation set: counts, shapes, label rules and no repeated text."""

import json
import re
from collections import Counter
from importlib import resources
from typing import Any

import pytest

ROOT = resources.files("evalq.data") / "embedded"
NAMES = ("articles.jsonl", "completions.jsonl", "truthfulness.jsonl")
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
RUN = 8


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]


def runs(text: str) -> set[tuple[str, ...]]:
    words = WORD.findall(text.lower())
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def item_runs(row: dict[str, Any]) -> set[tuple[str, ...]]:
    if "page" in row:
        return runs(row["page"])
    if "query" in row:
        return runs(row["query"]).union(*(runs(f"{row['query']} {c}") for c in row["choices"]))
    return runs(row["question"]).union(*(runs(c) for c in row["mc2_targets"]["choices"]))


@pytest.mark.parametrize("name", NAMES)
def test_file_is_clean_utf8_with_one_object_a_line(name: str) -> None:
    raw = (ROOT / name).read_bytes()
    assert raw.endswith(b"}\n")
    assert b"\r" not in raw
    text = raw.decode("utf-8")
    assert not re.search(r"[\u0000-\u0009\u000b-\u001f\u007f-\u00a0\u200b-\u200f\u2028\u2029\ufeff\ufffd]", text)
    assert all(isinstance(row, dict) for row in rows(name))


def test_articles_have_their_keys_and_lengths() -> None:
    articles = rows("articles.jsonl")
    assert len(articles) >= 64
    assert all(list(a) == ["id", "title", "page"] for a in articles)
    assert [a["id"] for a in articles] == list(range(len(articles)))
    assert len({a["title"].lower() for a in articles}) == len(articles)
    for a in articles:
        assert 190 <= len(a["page"].split()) <= 240, a["title"]
        assert 1 <= len(a["page"].split("\n\n")) <= 4, a["title"]
        assert a["page"] == a["page"].strip()
        assert "  " not in a["page"]
        assert a["page"].endswith("."), a["title"]


def test_articles_do_not_follow_a_template() -> None:
    openings = Counter(" ".join(a["page"].split()[:3]) for a in rows("articles.jsonl"))
    assert openings.most_common(1)[0][1] == 1


def test_completions_have_their_keys_and_four_different_endings() -> None:
    items = rows("completions.jsonl")
    assert len(items) >= 124
    assert all(list(i) == ["id", "query", "choices", "gold", "activity"] for i in items)
    assert [i["id"] for i in items] == list(range(len(items)))
    assert len({i["query"] for i in items}) == len(items)
    for i in items:
        assert len(i["choices"]) == len(set(i["choices"])) == 4, i["activity"]
        assert i["gold"] in range(4)
        assert i["query"] == i["query"].strip()


def test_completion_endings_continue_the_sentence_at_similar_length() -> None:
    for i in rows("completions.jsonl"):
        sizes = [len(c.split()) for c in i["choices"]]
        assert min(sizes) >= 8, i["activity"]
        assert max(sizes) <= 25, i["activity"]
        assert max(sizes) - min(sizes) <= 5, i["activity"]
        assert all(c == c.strip() and c[0].islower() and c.endswith(".") for c in i["choices"]), i["activity"]
        assert not i["query"].endswith("."), i["activity"]


def test_gold_positions_are_balanced() -> None:
    items = rows("completions.jsonl")
    counts = Counter(i["gold"] for i in items)
    assert all(0.23 <= counts[k] / len(items) <= 0.27 for k in range(4))


def test_length_of_the_ending_is_no_shortcut() -> None:
    items = rows("completions.jsonl")
    for pick in (max, min):
        right = 0
        for i in items:
            sizes = [len(c) for c in i["choices"]]
            right += sizes.index(pick(sizes)) == i["gold"]
        assert right / len(items) < 0.40


def test_truthfulness_labels_follow_the_mc_rules() -> None:
    questions = rows("truthfulness.jsonl")
    assert len(questions) >= 84
    assert len({q["question"].lower() for q in questions}) == len(questions)
    for q in questions:
        assert list(q) == ["question", "mc1_targets", "mc2_targets", "category"]
        assert q["question"].endswith("?"), q["question"]
        mc1, mc2 = q["mc1_targets"], q["mc2_targets"]
        assert len(mc1["choices"]) == len(mc1["labels"])
        assert len(mc2["choices"]) == len(mc2["labels"])
        assert mc1["labels"] == [1] + [0] * (len(mc1["choices"]) - 1)
        assert len(mc1["choices"]) in (4, 5)
        true = sum(mc2["labels"])
        assert true in (2, 3)
        assert len(mc2["labels"]) - true in (3, 4)
        assert mc2["labels"] == [1] * true + [0] * (len(mc2["labels"]) - true)


def test_mc1_is_contained_in_mc2_with_the_same_labels() -> None:
    for q in rows("truthfulness.jsonl"):
        mc2 = dict(zip(q["mc2_targets"]["choices"], q["mc2_targets"]["labels"], strict=True))
        assert len(mc2) == len(q["mc2_targets"]["choices"]), q["question"]
        assert len({c.lower() for c in mc2}) == len(mc2), q["question"]
        for choice, label in zip(q["mc1_targets"]["choices"], q["mc1_targets"]["labels"], strict=True):
            assert mc2[choice] == label, q["question"]


def test_no_eight_word_run_occurs_in_two_items() -> None:
    seen: dict[tuple[str, ...], tuple[str, int]] = {}
    for name in NAMES:
        for index, row in enumerate(rows(name)):
            for run in item_runs(row):
                assert seen.setdefault(run, (name, index)) == (name, index), " ".join(run)
