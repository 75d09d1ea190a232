"""From red to cause, by hand: which documents, items and tokens changed most, and what is said of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import record_builder as build
import study_builder

from evalq.records import Record, read_record, text_schema, write_record
from evalq.study.causes import NO_TEXT, find_causes, without_preamble

Place = tuple[Record, Path]


def items(values: list[float], answers: list[int], logprobs: list[list[float]]) -> pa.Table:
    n = len(values)
    return pa.table(
        {
            "task": ["hellaswag"] * n,
            "item_id": list(range(n)),
            "item_hash": [str(i) for i in range(n)],
            "cluster": [""] * n,
            "metric": ["acc"] * n,
            "value": values,
            "answer": answers,
            "gold": [0] * n,
            "choice_logprobs": logprobs,
        }
    )


def place(folder: Path, name: str, **tables: pa.Table) -> Place:
    record = build.record(name, build.baseline_rows(3, 4))
    return write_record(folder / name, record, tables), folder / name


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return study_builder.write_study(tmp_path)


def pair(study: Path, scheme: str) -> tuple[Place, Place]:
    return (read_record(study / "baseline"), study / "baseline"), (read_record(study / scheme), study / scheme)


def test_flips_and_leads_by_hand(tmp_path: Path) -> None:
    """Item 0 stays right, 1 turns wrong, 2 turns right, 3 stays wrong."""
    before = items([1, 1, 0, 0], [0, 0, 1, 1], [[-1, -2], [-1.0, -1.5], [-3, -2], [-5, -1]])
    after = items([1, 0, 1, 0], [0, 1, 0, 1], [[-1, -2], [-2.0, -1.25], [-2, -2.5], [-5, -1]])
    rows = [
        {"task": "hellaswag", "id": i, "prompt": f"Q{i}", "choices": ["a", "b"], "response": None} for i in range(4)
    ]
    texts = pa.Table.from_pylist(rows)
    causes = find_causes(place(tmp_path, "baseline", items=before, texts=texts), place(tmp_path, "c", items=after))
    assert causes.flips == {"hellaswag acc": (1, 1)}
    lost, won = causes.items
    assert (lost.item_id, lost.prompt, lost.baseline_answer, lost.candidate_answer, lost.gold) == (
        1,
        "Q1",
        "a",
        "b",
        "a",
    )
    assert (lost.baseline_lead_nats, lost.candidate_lead_nats) == (0.5, 0.75)
    assert lost.lost
    assert (won.item_id, won.baseline_answer, won.candidate_answer) == (2, "b", "a")


def test_without_texts_answers_have_numbers(tmp_path: Path) -> None:
    before, after = items([1.0], [0], [[-1, -2]]), items([0.0], [1], [[-2, -1]])
    causes = find_causes(place(tmp_path, "baseline", items=before), place(tmp_path, "c", items=after))
    (change,) = causes.items
    assert (change.prompt, change.baseline_answer, change.candidate_answer) == (NO_TEXT, "answer 1", "answer 2")


def test_what_a_model_wrote_is_its_answer(tmp_path: Path) -> None:
    def texts(answer: str) -> pa.Table:
        row = {"task": "hellaswag", "id": 0, "prompt": "How many?", "choices": [], "response": answer}
        return pa.Table.from_pylist([row], schema=text_schema())

    before, after = items([1.0], [0], [[]]), items([0.0], [0], [[]])
    causes = find_causes(
        place(tmp_path, "baseline", items=before, texts=texts("42")),
        place(tmp_path, "c", items=after, texts=texts("41")),
    )
    assert (causes.items[0].baseline_answer, causes.items[0].candidate_answer) == ("42", "41")


def test_gains_are_shown_beside_losses(tmp_path: Path) -> None:
    """Of 6 places a third is for gains, where there are any."""
    logprobs: list[list[float]] = [[-1.0, -2.0]] * 20
    before = items([1.0] * 10 + [0.0] * 10, [0] * 20, logprobs)
    after = items([0.0] * 10 + [1.0] * 10, [1] * 20, logprobs)
    causes = find_causes(place(tmp_path, "baseline", items=before), place(tmp_path, "c", items=after), items=6)
    assert [change.lost for change in causes.items] == [True] * 4 + [False] * 2
    assert causes.flips == {"hellaswag acc": (10, 10)}


def test_worked_examples_before_every_question_are_left_out() -> None:
    """What all prompts of a task begin with, by whole lines; a beginning that is only alike stays."""
    shots = "Q: What is the square root of banana?\nA: I have no comment.\n\nQ: How does a telescope work?\nA: With lenses.\n\n"

    def row(prompt: str) -> dict[str, Any]:
        return {"prompt": prompt, "choices": ["a", "b"], "response": None}

    texts = {("mc", i): row(f"{shots}Q: Why number {i}?\nA:") for i in range(3)}
    texts |= {("plain", i): row(f"She puts the {i} down and") for i in range(3)}
    found = without_preamble(texts)
    assert found["mc", 1]["prompt"] == "Q: Why number 1?\nA:"
    assert found["plain", 2]["prompt"] == "She puts the 2 down and"


def test_documents_are_ordered_by_loss_per_token(study: Path) -> None:
    causes = find_causes(*pair(study, "w4a16"))
    differences = [change.difference_nats for change in causes.documents]
    assert len(differences) == study_builder.DOCUMENTS
    assert differences == sorted(differences, reverse=True)
    assert causes.documents[0].beginning.startswith("Document ")
    assert np.mean(differences) == pytest.approx(math.log(1.3) / 2, rel=0.05)  # the builder has two tokens per word


def test_worst_tokens_in_context(study: Path) -> None:
    causes = find_causes(*pair(study, "w4a16"), tokens=8)
    assert len(causes.tokens) == 8
    divergences = [change.kld_nats for change in causes.tokens]
    assert divergences == sorted(divergences, reverse=True)
    assert max(np.bincount([change.doc_id for change in causes.tokens])) <= 2
    for change in causes.tokens:
        assert change.before.count(" word") == min(change.position, 48)
        assert change.token.startswith(" word")
        assert 0 < change.candidate_probability <= 1


def test_one_task_only(study: Path) -> None:
    causes = find_causes(*pair(study, "w4a16"), task="hellaswag")
    assert {change.task for change in causes.items} == {"hellaswag"}
    assert causes.documents == causes.tokens == []


def test_tables_that_are_gone_are_said_and_nothing_stops(study: Path) -> None:
    places = pair(study, "w4a16")
    for name in ("tokens", "texts"):
        (study / "w4a16" / f"{name}.parquet").unlink()
        (study / "baseline" / f"{name}.parquet").unlink()
    causes = find_causes(*places)
    assert causes.documents
    assert causes.tokens == []
    assert any("tokens.parquet" in reason or "table tokens" in reason for reason in causes.missing)


def test_records_without_any_table(tmp_path: Path) -> None:
    causes = find_causes(place(tmp_path, "baseline"), place(tmp_path, "c"))
    assert causes.missing == ["per-token values were not kept (tasks.keep_tokens)"]


def test_rows_that_are_not_the_same_item_are_not_compared(tmp_path: Path) -> None:
    before, after = items([1.0], [0], [[-1, -2]]), items([0.0], [1], [[-2, -1]])
    other: dict[str, Any] = {**after.to_pydict(), "item_hash": ["another"]}
    causes = find_causes(place(tmp_path, "baseline", items=before), place(tmp_path, "c", items=pa.table(other)))
    assert causes.items == []
