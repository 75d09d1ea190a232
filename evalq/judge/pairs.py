"""Rows of two records, matched one to one: the documents behind a perplexity, the items behind an accuracy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalq.errors import RecordError
from evalq.records import Record, read_table

if TYPE_CHECKING:
    import pyarrow as pa

Floats = NDArray[np.float64]
Columns = dict[str, NDArray[Any]]
UNITS = ("tokens", "words", "bytes")
DOCUMENT_COLUMNS = ("task", "doc_id", "doc_hash", "nll_nats", *UNITS, "truncated")
ITEM_COLUMNS = ("task", "item_id", "item_hash", "cluster", "metric", "value")
PRIMITIVES = {"int64": "<i8", "int32": "<i4", "double": "<f8", "float": "<f4"}
ACCURACIES = ("hellaswag", "truthfulqa_mc1", "truthfulqa_mc2")  # tasks whose values are shares


@dataclass(frozen=True)
class DocumentPairs:
    """Documents of one perplexity task in order; each array (documents,). `counts` holds tokens, words, bytes.

    A text that the data holds twice is one document: counting it twice would make the interval narrower than it is.
    """

    baseline_nll: Floats
    candidate_nll: Floats
    counts: dict[str, Floats]
    doc_ids: NDArray[np.int64]
    row_of: dict[int, int] = field(default_factory=dict)  # every id of the data -> its row here

    @property
    def d(self) -> Floats:
        """NLL_candidate - NLL_baseline per document, nats."""
        return self.candidate_nll - self.baseline_nll


@dataclass(frozen=True)
class ItemPairs:
    """Items of one task and metric, in order; each array (items,). An empty cluster name means its own cluster."""

    baseline: Floats
    candidate: Floats
    clusters: NDArray[Any] | None


@dataclass(frozen=True)
class Tables:
    """What the judge reads of one record's tables, each checked against its sha256: column -> (rows,)."""

    record: Record
    documents: Columns | None
    items: Columns | None
    folder: Path = Path()

    @classmethod
    def read(cls, record: Record, folder: Path) -> Tables:
        """Errors: RecordError for a table that is missing, changed, or has empty values."""
        documents, items = read_table(folder, record, "documents"), read_table(folder, record, "items")
        return cls(
            record,
            None if documents is None else {name: column(documents, name, "documents") for name in DOCUMENT_COLUMNS},
            None if items is None else {name: column(items, name, "items") for name in ITEM_COLUMNS},
            folder,
        )


def column(table: pa.Table, name: str, where: str) -> NDArray[Any]:
    """A column of text or numbers as numpy. Errors: RecordError when it holds an empty value.

    Straight from the buffer: pyarrow's own conversion imports pandas where that is installed, which takes most of the
    second that the gate has.
    """
    import pyarrow as pa

    values = table.column(name)
    if values.null_count:
        raise RecordError(f"{where} of a record have {values.null_count} empty values in {name}; measure it anew")
    if pa.types.is_string(values.type):
        return np.array(values.to_pylist(), dtype=object)
    kind = np.dtype(PRIMITIVES[str(values.type)])
    parts = [
        np.frombuffer(part.buffers()[1], kind, len(part), part.offset * kind.itemsize)
        for part in values.chunks
        if len(part)
    ]
    return np.concatenate(parts) if parts else np.empty(0, kind)


def rows_of(table: Columns | None, task: str, metric: str | None = None) -> Columns | None:
    """Rows of one task (and metric), sorted by id; None when there are none."""
    if table is None:
        return None
    keep = table["task"] == task
    if metric is not None:
        keep = keep & (table["metric"] == metric)
    if not keep.any():
        return None
    key = "item_id" if metric is not None else "doc_id"
    order = np.flatnonzero(keep)[np.argsort(table[key][keep], kind="stable")]
    return {name: values[order] for name, values in table.items()}


def document_pairs(baseline: Tables, candidate: Tables, task: str) -> DocumentPairs:
    """Match the documents of `task`. Errors: RecordError naming what is missing, not finite or different."""
    first, second = (_documents(side, task) for side in (baseline, candidate))
    _expect_same_ids(first["doc_id"], second["doc_id"], task, "documents")
    for name in ("doc_hash", *UNITS, "truncated"):
        different = np.flatnonzero(first[name] != second[name])
        if len(different):
            i = different[0]
            raise RecordError(
                f"document {first['doc_id'][i]} of {task} has {name} {first[name][i]} in the baseline and "
                f"{second[name][i]} in the candidate; only the same tokens can be compared"
            )
    _, place, text = np.unique(first["doc_hash"].astype(str), return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(place))[text]  # texts in the order of their first document
    counts = {unit: _sums(rank, first[unit]) for unit in UNITS}
    nll = [_sums(rank, side["nll_nats"]) for side in (first, second)]
    row_of = dict(zip(first["doc_id"].tolist(), rank.tolist(), strict=True))
    return DocumentPairs(nll[0], nll[1], counts, first["doc_id"][np.sort(place)], row_of)


def _sums(rank: NDArray[Any], values: NDArray[Any]) -> Floats:
    return np.bincount(rank, weights=values).astype(np.float64)


def _documents(tables: Tables, task: str) -> dict[str, NDArray[Any]]:
    where = f"documents of {task} in record {tables.record.record_id}"
    rows = rows_of(tables.documents, task)
    if rows is None:
        raise RecordError(f"record {tables.record.record_id} has no documents of {task}; measure it anew")
    if not np.isfinite(rows["nll_nats"]).all():
        bad = rows["doc_id"][~np.isfinite(rows["nll_nats"])]
        raise RecordError(f"{where}: {len(bad)} are not finite, the first is document {bad[0]}")
    if (rows["nll_nats"] < 0).any() or not rows["nll_nats"].sum() > 0:
        raise RecordError(f"{where}: a negative log-likelihood below 0 (or all 0) is no measurement")
    for unit in UNITS:
        if (rows[unit] <= 0).any():
            raise RecordError(f"{where}: a document has {rows[unit].min()} {unit}; every document needs at least one")
    return rows


def item_pairs(baseline: Tables, candidate: Tables, task: str, metric: str) -> ItemPairs:
    """Match the items of `task` and `metric`. Errors: RecordError naming what is missing, not finite or different."""
    first, second = (_items(side, task, metric) for side in (baseline, candidate))
    _expect_same_ids(first["item_id"], second["item_id"], task, "items")
    different = np.flatnonzero((first["item_hash"] != second["item_hash"]) | (first["cluster"] != second["cluster"]))
    if len(different):
        raise RecordError(f"item {first['item_id'][different[0]]} of {task} is not the same item in the two records")
    names = first["cluster"]
    clusters = None if (names == "").all() else np.where(names == "", first["item_id"].astype(str), names)
    return ItemPairs(first["value"], second["value"], clusters)


def _items(tables: Tables, task: str, metric: str) -> dict[str, NDArray[Any]]:
    where = f"{metric} of {task} in record {tables.record.record_id}"
    rows = rows_of(tables.items, task, metric)
    if rows is None:
        raise RecordError(f"record {tables.record.record_id} has no items for {metric} of {task}; measure it anew")
    if not np.isfinite(rows["value"]).all():
        raise RecordError(f"{where}: {int((~np.isfinite(rows['value'])).sum())} items are not finite")
    if task in ACCURACIES and not ((rows["value"] >= 0) & (rows["value"] <= 1)).all():
        raise RecordError(f"{where}: a value outside 0 to 1 is no accuracy; measure it anew")
    return rows


def _expect_same_ids(first: NDArray[Any], second: NDArray[Any], task: str, what: str) -> None:
    for ids, side in ((first, "baseline"), (second, "candidate")):
        if len(np.unique(ids)) != len(ids):
            raise RecordError(f"the {side} has some {what} of {task} twice; measure it anew")
    if len(first) != len(second) or (first != second).any():
        missing = sorted(set(first.tolist()) ^ set(second.tolist()))
        raise RecordError(
            f"{task} has {len(first)} {what} in the baseline and {len(second)} in the candidate "
            f"(first on one side only: {missing[0]}); both must score the same ones"
        )
