"""Tables of what changed from baseline to candidate, by document and by item, for MLflow's table view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalq.errors import RecordError
from evalq.records import Record, read_record, read_table

Columns = dict[str, list[Any]]
Texts = dict[tuple[str, int], dict[str, Any]]
TEXT_LIMIT = 300  # characters shown in a cell of the table
DOCUMENTS = "tables/document_differences.json"
ITEMS = "tables/item_differences.json"


def difference_tables(baseline_folder: Path, candidate_folder: Path, candidate: Record) -> dict[str, Columns]:
    """Artifact name -> columns. A table that either record lacks, or cannot be read, is left out."""
    try:
        baseline = read_record(baseline_folder)
    except RecordError:
        return {}
    tables = {}
    texts = _texts(candidate_folder, candidate)
    for file, name, build in ((DOCUMENTS, "documents", _documents), (ITEMS, "items", _items)):
        try:
            first = read_table(baseline_folder, baseline, name)
            second = read_table(candidate_folder, candidate, name)
        except RecordError:
            continue
        if first is not None and second is not None:
            tables[file] = build(first.to_pylist(), second.to_pylist(), texts)
    return tables


def _texts(folder: Path, record: Record) -> Texts:
    """What each item asked and each document begins with, by task and id; nothing where it was not kept."""
    try:
        table = read_table(folder, record, "texts")
    except RecordError:
        return {}
    return {} if table is None else {(row["task"], row["id"]): row for row in table.to_pylist()}


def _text(texts: Texts, task: str, number: int) -> str:
    return str(texts.get((task, number), {}).get("prompt") or "")[:TEXT_LIMIT]


def _choice(texts: Texts, task: str, number: int, answer: int | None) -> str:
    choices = texts.get((task, number), {}).get("choices") or []
    return str(choices[answer])[:TEXT_LIMIT] if answer is not None and 0 <= answer < len(choices) else ""


def _documents(baseline: list[dict[str, Any]], candidate: list[dict[str, Any]], texts: Texts) -> Columns:
    before = {(row["task"], row["doc_id"]): row for row in baseline}
    rows = []
    for row in candidate:
        base = before.get((row["task"], row["doc_id"]))
        if base is not None and row["tokens"]:
            difference = row["nll_nats"] - base["nll_nats"]
            rows.append((difference / row["tokens"], row, base["nll_nats"]))
    rows.sort(key=lambda entry: -entry[0])
    return {
        "task": [row["task"] for _, row, _ in rows],
        "doc_id": [row["doc_id"] for _, row, _ in rows],
        "tokens": [row["tokens"] for _, row, _ in rows],
        "baseline_nll_nats": [nll for _, _, nll in rows],
        "candidate_nll_nats": [row["nll_nats"] for _, row, _ in rows],
        "difference_nats_per_token": [difference for difference, _, _ in rows],
        "begins": [_text(texts, row["task"], row["doc_id"]) for _, row, _ in rows],
    }


def _items(baseline: list[dict[str, Any]], candidate: list[dict[str, Any]], texts: Texts) -> Columns:
    before = {(row["task"], row["metric"], row["item_id"]): row for row in baseline}
    rows = []
    for row in candidate:
        base = before.get((row["task"], row["metric"], row["item_id"]))
        if base is not None:
            rows.append((row, base))
    rows.sort(key=lambda pair: pair[0]["value"] - pair[1]["value"])
    return {
        "task": [row["task"] for row, _ in rows],
        "metric": [row["metric"] for row, _ in rows],
        "item_id": [row["item_id"] for row, _ in rows],
        "baseline_value": [base["value"] for _, base in rows],
        "candidate_value": [row["value"] for row, _ in rows],
        "difference": [row["value"] - base["value"] for row, base in rows],
        "baseline_answer": [base["answer"] for _, base in rows],
        "candidate_answer": [row["answer"] for row, _ in rows],
        "gold": [row["gold"] for row, _ in rows],
        "question": [_text(texts, row["task"], row["item_id"]) for row, _ in rows],
        "baseline_text": [_choice(texts, row["task"], row["item_id"], base["answer"]) for row, base in rows],
        "candidate_text": [_choice(texts, row["task"], row["item_id"], row["answer"]) for row, _ in rows],
    }
