"""From red to cause: which documents, items and tokens changed most between two records, in words where they were kept."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evalq.errors import RecordError
from evalq.judge.fidelity import TokenPairs, token_pairs
from evalq.records import Record, read_table
from evalq.report.page.view import Causes, DocumentChange, ItemChange, TokenChange
from evalq.study.gather import brief

if TYPE_CHECKING:
    import pyarrow as pa

Place = tuple[Record, Path]
Texts = dict[tuple[str, int], dict[str, Any]]
CONTEXT_TOKENS = 48
PER_DOCUMENT = 2  # worst tokens of one document, so that one bad document does not fill the list
LEAST_CHANGE = 0.02  # of a share (mc2); less is what rounding does to any item
LEAST_PREAMBLE = 80  # characters
NO_TEXT = "(the text was not kept with this record)"


def find_causes(baseline: Place, candidate: Place, items: int = 6, tokens: int = 8, task: str | None = None) -> Causes:
    """What changed most: all documents, `items` items of each task and the `tokens` worst tokens. Never raises for a table."""
    found = Causes()
    texts = without_preamble(_texts(baseline, found.missing) or _texts(candidate, found.missing))
    responses = {side: _texts(place, []) for side, place in (("baseline", baseline), ("candidate", candidate))}
    _documents(found, baseline, candidate, texts, task)
    _items(found, baseline, candidate, texts, responses, items, task)
    _tokens(found, baseline, candidate, tokens, task)
    return found


def _table(place: Place, name: str, missing: list[str]) -> pa.Table | None:
    try:
        return read_table(place[1], place[0], name)
    except RecordError as error:
        missing.append(brief(error, place[1]))
        return None


def _both(baseline: Place, candidate: Place, name: str, missing: list[str]) -> tuple[pa.Table, pa.Table] | None:
    first, second = _table(baseline, name, missing), _table(candidate, name, missing)
    return None if first is None or second is None else (first, second)


def _texts(place: Place, missing: list[str]) -> Texts:
    table = _table(place, "texts", missing)
    return {} if table is None else {(row["task"], row["id"]): row for row in table.to_pylist()}


def without_preamble(texts: Texts) -> Texts:
    """Prompts without what all prompts of their task begin with (instructions, worked examples), cut at a line's end."""
    prompts: dict[str, list[str]] = {}
    for (task, _), row in texts.items():
        if row["choices"] or row["response"] is not None:
            prompts.setdefault(task, []).append(row["prompt"] or "")
    shared = {task: _shared_lines(several) for task, several in prompts.items() if len(several) > 1}
    return {
        key: {**row, "prompt": (row["prompt"] or "")[shared[key[0]] :].lstrip("\n")} if shared.get(key[0]) else row
        for key, row in texts.items()
    }


def _shared_lines(prompts: list[str]) -> int:
    """Characters of the whole lines that every prompt begins with; 0 for a short beginning, which is part of the question."""
    first, last = min(prompts), max(prompts)  # what these two share, all between them share
    end = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:end].rfind("\n") + 1 if end >= LEAST_PREAMBLE else 0


def _documents(found: Causes, baseline: Place, candidate: Place, texts: Texts, task: str | None) -> None:
    tables = _both(baseline, candidate, "documents", found.missing)
    if tables is None:
        return
    before = {(row["task"], row["doc_id"]): row for row in tables[0].to_pylist()}
    for row in tables[1].to_pylist():
        base = before.get((row["task"], row["doc_id"]))
        if base is None or not row["tokens"] or base["doc_hash"] != row["doc_hash"] or task not in (None, row["task"]):
            continue
        difference = (row["nll_nats"] - base["nll_nats"]) / row["tokens"]
        if math.isfinite(difference):
            beginning = texts.get((row["task"], row["doc_id"]), {}).get("prompt") or NO_TEXT
            found.documents.append(DocumentChange(row["doc_id"], row["tokens"], difference, beginning))
    found.documents.sort(key=lambda change: -change.difference_nats)


def _items(
    found: Causes,
    baseline: Place,
    candidate: Place,
    texts: Texts,
    responses: dict[str, Texts],
    limit: int,
    task: str | None,
) -> None:
    tables = _both(baseline, candidate, "items", found.missing)
    if tables is None:
        return
    before = {(row["task"], row["metric"], row["item_id"]): row for row in tables[0].to_pylist()}
    changes: dict[str, list[ItemChange]] = {}
    for row in tables[1].to_pylist():
        base = before.get((row["task"], row["metric"], row["item_id"]))
        if base is None or base["item_hash"] != row["item_hash"] or task not in (None, row["task"]):
            continue
        if base["value"] is None or row["value"] is None or abs(base["value"] - row["value"]) < LEAST_CHANGE:
            continue
        _count_flip(found, row, base)
        changes.setdefault(row["task"], []).append(_item_change(row, base, texts, responses))
    for several in changes.values():
        found.items.extend(_worst(several, limit))


def _count_flip(found: Causes, row: dict[str, Any], base: dict[str, Any]) -> None:
    if {base["value"], row["value"]} == {0.0, 1.0}:
        name = f"{row['task']} {row['metric']}"
        lost, won = found.flips.get(name, (0, 0))
        found.flips[name] = (lost + (row["value"] < base["value"]), won + (row["value"] > base["value"]))


def _worst(changes: list[ItemChange], limit: int) -> list[ItemChange]:
    """Losses first, the widest change first; an item once, whatever its metrics."""
    ordered = sorted(changes, key=lambda c: (not c.lost, -abs(c.candidate_value - c.baseline_value), -_swing(c)))
    kept: dict[int, ItemChange] = {}
    for change in ordered:
        kept.setdefault(change.item_id, change)
    losses = [change for change in kept.values() if change.lost]
    gains = [change for change in kept.values() if not change.lost]
    room = max(limit - min(len(gains), limit // 3), 0)  # what was won is shown too, or the list would mislead
    return [*losses[:room], *gains[: limit - len(losses[:room])]]


def _swing(change: ItemChange) -> float:
    return (change.baseline_lead_nats or 0.0) + (change.candidate_lead_nats or 0.0)


def _item_change(row: dict[str, Any], base: dict[str, Any], texts: Texts, responses: dict[str, Texts]) -> ItemChange:
    key = (row["task"], row["item_id"])
    text = texts.get(key, {})
    first, second = _chosen(base), _chosen(row)
    answers = [
        _answer(text, chosen, responses[side].get(key, {}))
        for side, chosen in (("baseline", first), ("candidate", second))
    ]
    return ItemChange(
        task=row["task"],
        metric=row["metric"],
        item_id=row["item_id"],
        prompt=text.get("prompt") or NO_TEXT,
        gold=_answer(text, row["gold"], {}) if row["gold"] is not None else "",
        baseline_answer=answers[0],
        candidate_answer=answers[1],
        baseline_value=base["value"],
        candidate_value=row["value"],
        baseline_lead_nats=_lead(base, first, second),
        candidate_lead_nats=_lead(row, second, first),
    )


def _chosen(row: dict[str, Any]) -> int | None:
    """Index of the answer chosen; the likeliest one where the metric chooses none (mc2)."""
    if row["answer"] is not None:
        return int(row["answer"])
    values = row["choice_logprobs"] or []
    return int(np.argmax(values)) if values else None


def _answer(text: dict[str, Any], chosen: int | None, own: dict[str, Any]) -> str:
    if own.get("response") is not None:
        return str(own["response"])
    choices = text.get("choices") or []
    if chosen is not None and 0 <= chosen < len(choices):
        return str(choices[chosen])
    return "(not known)" if chosen is None else f"answer {chosen + 1}"


def _lead(row: dict[str, Any], chosen: int | None, other: int | None) -> float | None:
    """How much likelier this model finds its answer than the other model's, nats; None when they chose the same."""
    values = row["choice_logprobs"] or []
    if row["metric"] == "acc_norm":
        return None  # chosen by characters, so sums of log-probabilities do not lead
    if chosen is None or other is None or chosen == other or max(chosen, other) >= len(values):
        return None
    lead = values[chosen] - values[other]
    return float(lead) if math.isfinite(lead) else None


def _tokens(found: Causes, baseline: Place, candidate: Place, limit: int, task: str | None) -> None:
    tables = _both(baseline, candidate, "tokens", found.missing)
    if tables is None:
        if "tokens" not in baseline[0].tables or "tokens" not in candidate[0].tables:
            found.missing.append("per-token values were not kept (tasks.keep_tokens)")
        return
    same_baseline = candidate[0].divergence_from == baseline[0].reuse_key
    whole = tables[1].column("exact_kld_nats").null_count == 0  # a sample would hide the other tokens
    try:
        pairs = token_pairs(*tables, exact=same_baseline and whole)
    except RecordError as error:
        found.missing.append(brief(error, baseline[1], candidate[1]))
        return
    keys = [(name, "ascending") for name in ("task", "doc_id", "position")]
    sorted_tables = tables[0].sort_by(keys), tables[1].sort_by(keys)
    pieces = _pieces(baseline) or _pieces(candidate)
    names = np.array(sorted_tables[0].column("task").to_pylist())
    for i in _worst_tokens(pairs, names, limit, task):
        found.tokens.append(_token_change(sorted_tables, pairs, int(i), pieces))


def _pieces(place: Place) -> dict[int, str]:
    table = _table(place, "pieces", [])
    return {} if table is None else dict(zip(table["token_id"].to_pylist(), table["piece"].to_pylist(), strict=True))


def _worst_tokens(pairs: TokenPairs, names: Any, limit: int, task: str | None) -> list[int]:
    chosen: list[int] = []
    seen: Counter[tuple[str, int]] = Counter()
    for i in np.argsort(-pairs.kld, kind="stable"):
        place = (str(names[i]), int(pairs.documents[i]))
        if task not in (None, place[0]) or seen[place] >= PER_DOCUMENT:
            continue
        seen[place] += 1
        chosen.append(int(i))
        if len(chosen) >= limit:
            break
    return chosen


def _token_change(tables: tuple[pa.Table, pa.Table], pairs: TokenPairs, i: int, pieces: dict[int, str]) -> TokenChange:
    first, second = tables
    row, other = first.slice(i, 1).to_pylist()[0], second.slice(i, 1).to_pylist()[0]
    start = max(0, i - CONTEXT_TOKENS)
    context = first.slice(start, i - start).to_pylist()
    before = [one["token_id"] for one in context if (one["task"], one["doc_id"]) == (row["task"], row["doc_id"])]
    return TokenChange(
        task=row["task"],
        doc_id=row["doc_id"],
        position=row["position"],
        before="".join(_piece(token, pieces) for token in before),
        token=_piece(row["token_id"], pieces),
        baseline_probability=math.exp(row["logprob"]),
        candidate_probability=math.exp(other["logprob"]),
        baseline_first=_piece(row["top1_id"], pieces),
        candidate_first=_piece(other["top1_id"], pieces),
        kld_nats=float(pairs.kld[i]),
    )


def _piece(token: int, pieces: dict[int, str]) -> str:
    return pieces.get(token, f"⟨{token}⟩")
