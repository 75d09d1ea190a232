"""The KV cache in a report: buckets on the paths that read it, needle grids of both cells, and what is missing."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import record_builder as build

from evalq.kvrecord import DecodeScore, KvReport, NeedleScore, Sensitivity, kv_token_schema
from evalq.records import Record, write_record
from evalq.report.page.blocks import Chart, Table, Word
from evalq.report.page.cache import cache_section
from evalq.report.page.draw import can_draw, svg_of
from evalq.report.page.view import Candidate, Causes, Group
from evalq.study.cache import cache_of

LENGTHS, DEPTHS = (1024, 4096), (0, 50, 100)
SEEN = Sensitivity(
    prefill="only across chunks",
    decode="yes",
    method="scales",
    kv_dtype="fp8_e4m3",
    attention_backend="FLASH_ATTN",
    engine_version="0.32",
    tokens=512,
    moved_nats={"decode, x 1000": 3.1},
    noise_nats=0.001,
    threshold_nats=0.01,
    tokens_per_step={"decode": 1},
    fingerprint="f",
    created_at="2026-01-01",
)


def kv_tokens(extra_nats: float) -> pa.Table:
    """12 documents of 200 tokens on the decode path; the candidate loses `extra_nats` on each."""
    rng = np.random.default_rng(2)
    n = 12 * 200
    logprob = -rng.exponential(1.0, n) - 0.1 - extra_nats
    rows = {
        "path": ["decode"] * n,
        "doc_id": np.repeat(np.arange(12), 200),
        "window_position": np.tile(np.arange(1, 201), 12),
        "token_id": np.arange(n) % 90,
        "logprob": logprob,
        "top1_id": np.arange(n) % 90,
        "top1_logprob": np.maximum(logprob, -0.5),
        "topk_ids": [[]] * n,
        "topk_logprobs": [[]] * n,
    }
    return pa.table(rows).cast(kv_token_schema())


def needles(found_below: int) -> pa.Table:
    """One needle for each length and depth; those at depths under `found_below` percent are found."""
    grid = [(length, depth) for length in LENGTHS for depth in DEPTHS]
    return pa.table(
        {
            "item_id": list(range(len(grid))),
            "length": [length for length, _ in grid],
            "depth": [depth for _, depth in grid],
            "ids_hash": [str(i) for i in range(len(grid))],
            "expected": ["42"] * len(grid),
            "answer": ["42"] * len(grid),
            "value": [float(depth < found_below) for _, depth in grid],
        }
    )


def cell(folder: Path, name: str, extra_nats: float, found_below: int) -> tuple[Record, Path]:
    report = KvReport(
        sensitivity=None if name == "baseline" else SEEN,
        decode=DecodeScore(12, 12, 2400, 0, 1, None, "h", 1.0),
        needle=NeedleScore(6, list(LENGTHS), list(DEPTHS), None, "h", 1.0),
        notes=["a note"] if name != "baseline" else [],
    )
    record = dataclasses.replace(build.record(name, build.baseline_rows(12, 4)), kv=report)
    return write_record(
        folder / name, record, {"kv_tokens": kv_tokens(extra_nats), "needles": needles(found_below)}
    ), folder / name


@pytest.fixture
def group(tmp_path: Path) -> Group:
    baseline, candidate = cell(tmp_path, "baseline", 0.0, 101), cell(tmp_path, "fp8-kv", 0.01, 50)
    one = Candidate(*candidate, None, Causes(), cache=cache_of(baseline, candidate))
    return Group("tiny", "h200", "default", baseline[0], [one])


def test_buckets_and_grids_by_hand(group: Group) -> None:
    view = group.candidates[0].cache
    assert view is not None
    buckets = view.buckets["decode"]
    assert [(b.low, b.high, b.tokens) for b in buckets] == [(1, 63, 12 * 63), (64, 200, 12 * 137)]
    for bucket in buckets:
        assert bucket.increase is not None
        assert bucket.increase.value == pytest.approx(math.expm1(0.01), rel=1e-4)
    assert sum(hit for hit, _ in view.baseline_needles.values()) == 6
    assert {place: hit for place, (hit, _) in view.needles.items()} == {
        (n, d): int(d < 50) for n in LENGTHS for d in DEPTHS
    }
    assert view.missing == ["a note"]


def test_the_section_says_whether_the_cache_was_read(group: Group) -> None:
    blocks = cache_section(group)
    table = next(block for block in blocks if isinstance(block, Table))
    assert Word("only across chunks", "warn") in table.rows[0]
    titles = [block.title for block in blocks if isinstance(block, Chart)]
    assert any("Needle" in title for title in titles)
    needle = next(block for block in blocks if isinstance(block, Chart) and "Needle" in block.title)
    assert "baseline 6 of 6, mixed-4-8 2 of 6" in needle.description
    if can_draw():
        drawn = [
            svg_of(block.spec(width), block.description)
            for block in blocks
            if isinstance(block, Chart)
            for width in (760, 260)
        ]
        assert all("<path" in picture for picture in drawn)


def test_without_the_table_it_is_said(group: Group, tmp_path: Path) -> None:
    (tmp_path / "fp8-kv" / "needles.parquet").unlink()
    baseline = (group.baseline, tmp_path / "baseline")
    one = group.candidates[0]
    assert baseline[0] is not None
    view = cache_of((baseline[0], baseline[1]), (one.record, one.folder))
    assert view is not None
    assert view.needles == {}
    assert any("needles" in reason for reason in view.missing)


def test_records_that_asked_nothing_have_no_section(tmp_path: Path) -> None:
    plain = build.record("c", build.baseline_rows(3, 4))
    assert cache_of((plain, tmp_path), (plain, tmp_path)) is None
    assert cache_section(Group("t", "g", "e", plain, [Candidate(plain, tmp_path, None, Causes())])) == []
