"""Records on disk with chosen rows, for tests of everything that reads records."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from evalq.records import Applied, Cell, Failure, Ledger, Load, Record, TaskScores, write_record

FINGERPRINT: dict[str, Any] = {
    "model_id": "tiny/model",
    "weights_hash": "w" * 64,
    "tokenizer_hash": "t" * 64,
    "bos": "always",
    "dtype": "bfloat16",
    "window_tokens.wikitext": 2048,
    "dataset.wikitext": "embedded",
    "dataset_hash.wikitext": "d" * 64,
    "first_ids_hash.wikitext": "f" * 64,
    "truncated.wikitext": 0,
    "engine": "vllm",
    "engine_version": "0.32.0",
    "harness_version": "0.4.13",
    "scorer": "hook",
    "scorer_version": "1",
    "gpu": "NVIDIA H200",
    "gpu_count": 1,
    "tensor_parallel_size": 1,
    "attention_backend": "FLASH_ATTN",
    "enforce_eager": False,
    "max_num_seqs": 64,
    "load_format": "auto",
    "seed": 0,
    "platform": "linux",
}
APPLIED = Applied(True, [], "bfloat16", "bfloat16", "none", {"Unquantized": 10}, {"bfloat16": 20}, "FLASH_ATTN")
LEDGER = Ledger(1000, {"bfloat16": 1000}, 1100, 96, 4096, 96 * 4096, "bfloat16", 2000, "resident set")
CHOICE_METRICS = {"hellaswag": ("acc", "acc_norm"), "truthfulqa_mc1": ("acc",), "truthfulqa_mc2": ("acc",)}


@dataclasses.dataclass
class Rows:
    """What a fake cell measured: documents of wikitext and items by task and metric."""

    nll: np.ndarray
    words: np.ndarray
    items: dict[tuple[str, str], np.ndarray]
    clusters: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    @property
    def tokens(self) -> np.ndarray:
        return self.words * 2

    @property
    def bytes(self) -> np.ndarray:
        return self.words * 6


def baseline_rows(documents: int = 62, items: int = 200, seed: int = 7) -> Rows:
    """Documents of uneven length near 3.4 nats a word, and right/wrong items."""
    rng = np.random.default_rng(seed)
    words = rng.integers(200, 4000, documents)
    nll = words * rng.normal(3.4, 0.2, documents).clip(2.0)
    answers = {}
    for task, metrics in CHOICE_METRICS.items():
        for metric in metrics:
            continuous = task == "truthfulqa_mc2"
            answers[task, metric] = rng.random(items) if continuous else (rng.random(items) < 0.5).astype(float)
    return Rows(nll, words, answers)


def damaged(rows: Rows, increase: float, noise: float = 0.002, flips: int = 0, seed: int = 3) -> Rows:
    """The same rows with word perplexity raised by `increase` exactly, document noise of `noise` nats a word."""
    rng = np.random.default_rng(seed)
    wobble = rng.normal(0.0, noise, len(rows.words)) * rows.words
    wobble -= rows.words * wobble.sum() / rows.words.sum()
    nll = rows.nll + rows.words * math.log1p(increase) + wobble
    items = {key: value.copy() for key, value in rows.items.items()}
    for (task, _), values in items.items():
        right = np.flatnonzero(values == 1)[:flips]
        values[right] = 0.0
        if task == "truthfulqa_mc2":
            values += 0.001 * rng.standard_normal(len(values))
            np.clip(values, 0.0, 1.0, out=values)
    return Rows(nll, rows.words, items, rows.clusters)


def scores(rows: Rows) -> dict[str, TaskScores]:
    """Aggregates as the measuring side writes them."""
    total = float(rows.nll.sum())
    perplexity = {
        "word_perplexity": math.exp(total / rows.words.sum()),
        "byte_perplexity": math.exp(total / rows.bytes.sum()),
        "token_perplexity": math.exp(total / rows.tokens.sum()),
    }
    found = {"wikitext": _task("wikitext", "perplexity", len(rows.nll), dict(perplexity))}
    for (task, metric), values in rows.items.items():
        known = found.setdefault(task, _task(task, "choice", len(values), {}))
        known.metrics[metric] = float(values.mean())
    return found


def _task(task: str, kind: str, n: int, metrics: dict[str, float | None]) -> TaskScores:
    return TaskScores(task, kind, "embedded", "d" * 64, n, 0, 0, 2048, metrics, {}, "lm-eval 0.4.13", "1", 1.0, 1000)


def record(name: str, rows: Rows, **changes: Any) -> Record:
    """A complete record called `name`; `changes` replace fields, and `fingerprint` entries are merged in."""
    quant = changes.pop("quant", "baseline" if name == "baseline" else "mixed-4-8")
    applied = APPLIED if quant == "baseline" else dataclasses.replace(APPLIED, linear_methods={"MarlinLinear": 10})
    fingerprint = {**FINGERPRINT, **changes.pop("fingerprint", {})}
    made = Record(
        schema_version=1,
        record_id=f"{name}-id",
        run_id="run",
        status="complete",
        created_at="2026-01-01T00:00:00+00:00",
        cell=Cell("tiny", quant, "h200", "default", quant == "baseline"),
        config_hash=f"{name:x<64}",
        reuse_key=name,
        fingerprint={key: value for key, value in fingerprint.items() if value != "DROP"},
        engine_settings={"load_format": "auto"},
        applied=applied,
        tasks=scores(rows),
        loads={"offline": load("offline", 100.0)},
        ledger=LEDGER if quant == "baseline" else dataclasses.replace(LEDGER, weight_bytes=600),
        stage_seconds={},
        environment={},
        notes=[],
        failure=None,
        tables={},
    )
    return dataclasses.replace(made, **changes)


def load(name: str, rate: float, spread: float = 0.01, concurrency: int = 100) -> Load:
    """A load test with three repeats that span `rate` plus and minus `spread`."""
    low, high = rate * (1 - spread), rate * (1 + spread)
    return Load(name, 100, 64, 32, concurrency, 3, rate, low, high, rate, 1.0, 2.0, True, [])


def failed(name: str, rows: Rows, kind: str = "oom") -> Record:
    """A record of a cell that died."""
    failure = Failure(kind, "the engine died", "score")
    return record(name, rows, status="failed", failure=failure, tasks={}, applied=None, ledger=None)


def tables(rows: Rows) -> dict[str, pa.Table]:
    """documents.parquet and items.parquet of the rows."""
    n = len(rows.nll)
    documents = pa.table(
        {
            "task": ["wikitext"] * n,
            "doc_id": list(range(n)),
            "doc_hash": [f"doc{i}" for i in range(n)],
            "nll_nats": rows.nll,
            "tokens": rows.tokens,
            "words": rows.words,
            "bytes": rows.bytes,
            "truncated": [0] * n,
        }
    )
    return {"documents": documents, "items": _items(rows)}


def _items(rows: Rows) -> pa.Table:
    columns: dict[str, list[Any]] = {key: [] for key in ("task", "item_id", "item_hash", "cluster", "metric", "value")}
    for (task, metric), values in rows.items.items():
        n = len(values)
        columns["task"] += [task] * n
        columns["item_id"] += list(range(n))
        columns["item_hash"] += [f"{task}{i}" for i in range(n)]
        columns["cluster"] += rows.clusters.get(task, [""] * n)
        columns["metric"] += [metric] * n
        columns["value"] += values.tolist()
    size = len(columns["task"])
    extra = {"answer": [0] * size, "gold": [0] * size, "choice_logprobs": [[-1.0, -2.0]] * size}
    return pa.table({**columns, **extra})


def write(folder: Path, made: Record, rows: Rows) -> Record:
    """Write the record with its tables; returns it as it stands on disk."""
    return write_record(folder, made, tables(rows))
