"""jobs/bench/plan_vs_measured.py: what is inside a limit, outside, and not to be compared."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from evalq.records import SCHEMA_VERSION, Cell, Ledger, Record, to_json

SCRIPT = Path(__file__).resolve().parents[2] / "jobs" / "bench" / "plan_vs_measured.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("plan_vs_measured", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(ledger: Ledger | None) -> Record:
    return Record(
        schema_version=SCHEMA_VERSION, record_id="r", run_id="x", status="complete", created_at="2026-01-01T00:00:00Z",
        cell=Cell("m", "q", "h200", "default", False), config_hash="c", reuse_key="k", fingerprint={},
        engine_settings={"tensor_parallel_size": 1}, applied=None, tasks={}, loads={}, ledger=ledger, stage_seconds={},
        environment={}, notes=[], failure=None, tables={},
    )  # fmt: skip


def ledger(weights: int, pool: int, predicted: dict[str, int | None]) -> Ledger:
    return Ledger(
        weight_bytes=weights, weight_bytes_by_dtype={}, checkpoint_bytes=None, kv_bytes_per_token=100,
        kv_pool_tokens=pool, kv_pool_bytes=None, kv_dtype=None, peak_bytes=None, peak_source="x", predicted=predicted,
    )  # fmt: skip


PREDICTED: dict[str, int | None] = {"weight_bytes": 1000, "kv_pool_tokens": 1000, "kv_bytes_per_token": 100}


def test_inside_and_outside(script: Any) -> None:
    assert script.compare(record(ledger(1005, 1020, PREDICTED)))[1:] == (0, 3)
    rows, bad, seen = script.compare(record(ledger(1020, 1040, PREDICTED)))
    assert (bad, seen) == (2, 3)
    assert "OUTSIDE" in rows[0]
    assert script.compare(record(None)) == ([], 0, 0)


def test_nothing_compared_is_no_success(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "record.json").write_text(to_json(record(None)))
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path)])
    assert script.main() == 1
    (tmp_path / "record.json").write_text(to_json(record(ledger(1000, 1000, PREDICTED))))
    assert script.main() == 0
