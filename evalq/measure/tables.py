"""Rows for a record's Parquet tables, from lm-eval's samples and the scored windows."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pyarrow as pa

from evalq.measure.tasks import ScoredWindow, sample_rows
from evalq.records import document_schema, item_schema, token_schema

Windows = dict[tuple[str, int], list[ScoredWindow]]


def document_rows(task: str, samples: list[dict[str, Any]], windows: Windows) -> list[dict[str, Any]]:
    """documents.parquet rows of a rolling task; words and bytes are lm-eval's own counts where it gives them."""
    rows = []
    for sample in samples:
        doc_id = int(sample["doc_id"])
        scored = windows.get((task, doc_id), [])
        rows.append(
            {
                "task": task,
                "doc_id": doc_id,
                "doc_hash": str(sample["doc_hash"]),
                "nll_nats": -float(sum(w.result.logprobs.sum(dtype=np.float64) for w in scored)),
                "tokens": sum(len(w.ids) for w in scored),
                "words": _count(sample, "word_perplexity", lambda text: len(re.split(r"\s+", text))),
                "bytes": _count(sample, "byte_perplexity", lambda text: len(text.encode("utf-8"))),
                "truncated": 0,
            }
        )
    return rows


def _count(sample: dict[str, Any], metric: str, fallback: Any) -> int:
    value = sample.get(metric)
    if isinstance(value, list | tuple) and len(value) == 2:
        return int(value[1])
    return int(fallback(str(sample.get("target", ""))))


def merge_metrics(
    metrics: dict[str, float | None], documents: list[dict[str, Any]]
) -> tuple[dict[str, float | None], dict[str, str]]:
    """lm-eval's aggregates, and for a rolling task the token perplexity beside them; every None has its reason."""
    merged = dict(metrics)
    if documents:
        nll = math.fsum(row["nll_nats"] for row in documents)
        tokens = sum(row["tokens"] for row in documents)
        merged["token_perplexity"] = _perplexity(nll, tokens)
    reasons = {name: "not a finite number" for name, value in merged.items() if value is None}
    return merged, reasons


def _perplexity(nll: float, count: int) -> float | None:
    exponent = nll / count if count else math.nan
    return math.exp(exponent) if math.isfinite(exponent) and exponent < 700 else None


def item_tables(
    documents: list[dict[str, Any]], samples_by_task: dict[str, list[dict[str, Any]]]
) -> dict[str, pa.Table]:
    """The documents and items tables of one group; a table without rows is left out."""
    tables = {}
    if documents:
        tables["documents"] = pa.Table.from_pylist(documents, schema=document_schema())
    items = [row for task, samples in samples_by_task.items() for row in sample_rows(task, samples)]
    if items:
        tables["items"] = pa.Table.from_pylist(items, schema=item_schema())
    return tables


def token_table(windows: Windows) -> pa.Table:
    """tokens.parquet: one row per scored token, by document and position."""
    columns: dict[str, list[Any]] = {name: [] for name in token_schema().names}
    for (task, doc_id), parts in sorted(windows.items()):
        for window in sorted(parts, key=lambda w: w.start):
            _append_window(columns, task, doc_id, window)
    return pa.table(columns, schema=token_schema())


def _append_window(columns: dict[str, list[Any]], task: str, doc_id: int, window: ScoredWindow) -> None:
    count = len(window.ids)
    result = window.result
    nothing = [None] * count
    first_position = window.context_tokens
    columns["task"].extend([task] * count)
    columns["doc_id"].extend([doc_id] * count)
    columns["position"].extend(range(window.start, window.start + count))
    columns["window_position"].extend(range(first_position, first_position + count))
    columns["token_id"].extend(window.ids)
    columns["logprob"].extend(result.logprobs.tolist())
    columns["top1_id"].extend(result.top1_ids.tolist())
    columns["top1_logprob"].extend(result.top1_logprobs.tolist())
    columns["topk_ids"].extend(nothing if result.topk_ids is None else result.topk_ids.tolist())
    columns["topk_logprobs"].extend(nothing if result.topk_logprobs is None else result.topk_logprobs.tolist())
    exact = result.divergence
    for name, values in (
        ("exact_kld_nats", exact.kld if exact else None),
        ("exact_reverse_kld_nats", exact.reverse_kld if exact else None),
        ("entropy_nats", exact.entropy if exact else None),
        ("base_entropy_nats", exact.base_entropy if exact else None),
    ):
        columns[name].extend(nothing if values is None else [None if math.isnan(v) else v for v in values.tolist()])
