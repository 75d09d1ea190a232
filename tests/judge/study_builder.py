"""A whole study on disk, with texts, tokens and pieces: for tests of the report, `evalq inspect` and the pages."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import record_builder as build

from evalq.config import GateConfig
from evalq.judge.gate import judge
from evalq.records import Record, to_json, token_schema, write_record, write_text

DOCUMENTS, ITEMS, TOKENS = 24, 30, 40
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&`|[x](javascript:alert(3))\u202e\x01 ]]>"
SCHEMES = {"fp8-kv": (0.004, 1), "fp8-weights": (0.012, 2), "w4a16": (0.3, 6)}  # scheme -> increase, flips


def texts(mark: str = "") -> pa.Table:
    """A question with two answers for each item, a beginning for each document."""
    rows: list[dict[str, Any]] = [
        {"task": "wikitext", "id": i, "prompt": f"Document {i} {mark}", "choices": [], "response": None}
        for i in range(DOCUMENTS)
    ]
    for task in build.CHOICE_METRICS:
        rows += [
            {
                "task": task,
                "id": i,
                "prompt": f"Question {i} {mark}",
                "choices": [f"yes {mark}", f"no {mark}"],
                "response": None,
            }
            for i in range(ITEMS)
        ]
    return pa.Table.from_pylist(rows)


def tokens(noise: float, seed: int = 5) -> pa.Table:
    """TOKENS scored tokens of each document; `noise` moves their log-probabilities (nats)."""
    rng, same = np.random.default_rng(seed), np.random.default_rng(1)
    n = DOCUMENTS * TOKENS
    logprob = np.minimum(-same.exponential(2.0, n) - noise * rng.exponential(1.0, n), -0.01)
    position = np.tile(np.arange(TOKENS), DOCUMENTS)
    ids = (np.arange(n) % 50).astype(np.int32)
    first = np.where(rng.random(n) < noise, (ids + 1) % 50, ids).astype(np.int32)
    known = {
        "task": ["wikitext"] * n,
        "doc_id": np.repeat(np.arange(DOCUMENTS), TOKENS),
        "position": position,
        "window_position": position + 1,
        "token_id": ids,
        "logprob": logprob,
        "top1_id": first,
        "top1_logprob": np.maximum(logprob, -0.7),
    }
    return pa.table({field.name: known.get(field.name, pa.nulls(n, field.type)) for field in token_schema()})


def pieces(mark: str = "") -> pa.Table:
    return pa.table({"token_id": np.arange(50, dtype=np.int32), "piece": [f" word{i}{mark}" for i in range(50)]})


def write_cell(folder: Path, record: Record, rows: build.Rows, noise: float, mark: str = "") -> Record:
    tables = {**build.tables(rows), "texts": texts(mark), "tokens": tokens(noise), "pieces": pieces(mark)}
    return write_record(folder, record, tables)


def write_study(folder: Path, mark: str = "", verdicts: bool = True) -> Path:
    """A baseline and three schemes: PASS, PASS with a warning, FAIL. `mark` stands in every text that a record can hold."""
    base_rows = build.baseline_rows(DOCUMENTS, ITEMS)
    baseline = named(build.record("baseline", base_rows), "baseline", mark)
    baseline = write_cell(folder / "baseline", baseline, base_rows, 0.0, mark)
    for number, (scheme, (increase, flips)) in enumerate(SCHEMES.items()):
        rows = build.damaged(base_rows, increase, flips=flips, seed=number)
        record = named(build.record(scheme, rows), scheme, mark)
        record = write_cell(folder / scheme, record, rows, increase, mark)
        if verdicts:
            verdict = judge(baseline, folder / "baseline", record, folder / scheme, GateConfig())
            write_text(folder / scheme / "verdict.json", to_json(verdict) + "\n")
    return folder


def named(record: Record, scheme: str, mark: str) -> Record:
    """The record with `mark` in its names, notes, environment and kernels."""
    own = scheme if scheme == "baseline" else f"{scheme}{mark}"
    cell = dataclasses.replace(record.cell, quant=own, model=f"tiny{mark}")
    assert record.applied is not None
    applied = dataclasses.replace(record.applied, linear_methods={f"Kernel{mark}": 10})
    environment = {"vllm": f"0.32{mark}", "device": f"Device{mark}", f"key{mark}": "value"}
    ledger = record.ledger
    if scheme == "fp8-kv" and ledger is not None:  # half the cache
        ledger = dataclasses.replace(ledger, kv_bytes_per_token=48, kv_pool_bytes=48 * 4096)
    return dataclasses.replace(
        record,
        ledger=ledger,
        cell=cell,
        applied=applied,
        environment=environment,
        notes=[f"note {mark}"],
        stage_seconds={f"start{mark}": 3.0},
    )
