"""Small records with plausible figures, for the tests of tracking and of the MLflow page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from evalq.records import (
    SCHEMA_VERSION,
    VERDICT_FILE,
    Applied,
    Cell,
    Check,
    Estimate,
    Failure,
    Ledger,
    Load,
    Record,
    TaskScores,
    Verdict,
    document_schema,
    item_schema,
    to_json,
    write_record,
    write_text,
)

CREATED = "2026-11-29T10:00:00+00:00"


def scores(task: str, metrics: dict[str, float | None], reasons: dict[str, str] | None = None) -> TaskScores:
    kind = "perplexity" if task == "wikitext" else "choice"
    return TaskScores(
        task, kind, "embedded", "ab" * 32, 8, 0, 0, 2048, metrics, reasons or {}, "lm-eval 0.4.13", "2", 10.0, 1000
    )


def ledger(weight_bytes: int = 269_000_000, kv: int = 23_040) -> Ledger:
    return Ledger(
        weight_bytes, {"bfloat16": weight_bytes}, weight_bytes, kv, 90_000, 90_000 * kv, "bfloat16", None, "x"
    )


def load() -> Load:
    return Load("smoke", 16, 64, 32, 16, 3, 410.0, 400.0, 420.0, 1200.0, 1.5, 2.5, True, [])


def record(
    quant: str = "baseline",
    record_id: str | None = None,
    perplexity: float | None = 32.2,
    weight_bytes: int = 269_000_000,
    kv: int = 23_040,
    **changes: Any,
) -> Record:
    applied = Applied(True, [], "bfloat16", "bfloat16", "none", {}, {}, "CPU_ATTN")
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "record_id": record_id or f"{quant}-0001",
        "run_id": "run-1",
        "status": "complete",
        "created_at": CREATED,
        "cell": Cell("smollm2-135m", quant, "cpu", "default", quant == "baseline"),
        "config_hash": "c" * 64,
        "reuse_key": "r" * 64,
        "fingerprint": {"tokenizer_sha256": "t" * 64, "window": 2048},
        "engine_settings": {"max_num_seqs": 64},
        "applied": applied,
        "tasks": {
            "wikitext": scores(
                "wikitext", {"word_perplexity": perplexity}, {"word_perplexity": "no words were scored"}
            ),
            "hellaswag": scores("hellaswag", {"acc": 0.50, "acc_norm": 0.46}),
        },
        "loads": {"smoke": load()},
        "ledger": ledger(weight_bytes, kv),
        "stage_seconds": {"start": 20.0, "score": 60.0},
        "environment": {"evalq": "0.1.0"},
        "notes": [],
        "failure": None,
        "tables": {},
    }
    return Record(**(fields | changes))


def failed(quant: str, kind: str = "oom") -> Record:
    failure = Failure(kind, "no memory left", "score")
    return record(quant, status="failed", failure=failure, tasks={}, loads={}, ledger=None, applied=None)


def verdict(candidate: Record, status: str = "PASS", increase: float = 0.008, half_width: float = 0.003) -> Verdict:
    low, high = increase - half_width, increase + half_width
    estimate = Estimate("word_perplexity_increase", increase, low, high, 0.95, 8, "paired by document")
    check = Check("word_perplexity", True, status, estimate, 0.01, 0.015, "word perplexity rises by 0.8 %")
    codes = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3, "SUSPECT": 3, "INVALID": 5}
    return Verdict(
        SCHEMA_VERSION,
        status,
        codes[status],
        False,
        "Word perplexity rises by 0.8 %, within the target of 1.0 %.",
        [],
        [check],
        "baseline-0001",
        candidate.record_id,
        {"target": 0.01},
        [],
        "0.1.0",
        CREATED,
    )


def documents(shift: float = 0.0) -> pa.Table:
    rows = [
        {"task": "wikitext", "doc_id": i, "doc_hash": str(i), "nll_nats": 300.0 + i * (1 + shift), "tokens": 100}
        | {"words": 80, "bytes": 500, "truncated": 0}
        for i in range(8)
    ]
    return pa.Table.from_pylist(rows, schema=document_schema())


def items(right: int = 4) -> pa.Table:
    rows = [
        {
            "task": "hellaswag",
            "item_id": i,
            "item_hash": str(i),
            "cluster": "",
            "metric": "acc",
            "value": float(i < right),
        }
        | {"answer": 0, "gold": 0, "choice_logprobs": [-1.0, -2.0]}
        for i in range(8)
    ]
    return pa.Table.from_pylist(rows, schema=item_schema())


def write(folder: Path, made: Record, judged: Verdict | None = None, config: str = "quant: {name: x}\n") -> Path:
    """Write a record folder as the pipeline does; returns the folder."""
    tables = {} if made.status == "failed" else {"documents": documents(), "items": items()}
    write_record(folder, made, tables)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    (folder / "engine.log").write_text("engine started\n", encoding="utf-8")
    if judged is not None:
        write_text(folder / VERDICT_FILE, to_json(judged) + "\n")
    return folder


SCHEMES = {  # word perplexity, weight bytes, KV bytes per token, verdict, increase, half width of its interval
    "fp8-kv": (32.917, 269_000_000, 11_520, "FAIL", 0.0217, 0.003),
    "int8-w8a8": (32.41, 163_000_000, 23_040, "PASS", 0.0065, 0.002),
    "mixed-4-8": (34.10, 128_000_000, 23_040, "FAIL", 0.059, 0.01),
}


def write_study(records: Path) -> list[Path]:
    """A baseline and three candidates; returns their folders, baseline first."""
    folders = [write(records / "baseline", record())]
    for name, (perplexity, weights, kv, status, increase, half) in SCHEMES.items():
        made = record(name, perplexity=perplexity, weight_bytes=weights, kv=kv)
        folders.append(write(records / name, made, verdict(made, status, increase, half)))
    return folders
