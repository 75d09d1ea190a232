"""Load of the machine: sampled with MLflow's sensors, kept beside the record, thinned out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from evalq.tracking.system import SAMPLES_AT_MOST, Sampler, keep_samples, read_samples, thinned


def test_samples_have_mlflows_names() -> None:
    pytest.importorskip("mlflow")
    sampler = Sampler(interval_seconds=0.05)
    sampler.start()
    sampler.start()
    deadline = time.monotonic() + 60
    while not (found := sampler.between(0, 2**62)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {"cpu_utilization_percentage", "system_memory_usage_megabytes"} <= set(found[0][1])
    assert sampler.between(0, 1) == []


def test_the_first_samples_of_a_record_stay(tmp_path: Path) -> None:
    keep_samples(tmp_path, [])
    assert read_samples(tmp_path) == []
    keep_samples(tmp_path, [(1, {"a": 2.0})])
    keep_samples(tmp_path, [(9, {"a": 9.0})])
    assert read_samples(tmp_path) == [(1, {"a": 2.0})]
    (tmp_path / "system.json").write_text('{"samples": [1]}')
    assert read_samples(tmp_path) == []


def test_long_cells_are_thinned_out_evenly() -> None:
    samples = [(i, {"a": float(i)}) for i in range(1000)]
    kept = thinned(samples)
    assert len(kept) <= SAMPLES_AT_MOST
    assert [stamp for stamp, _ in kept] == list(range(0, 1000, 5))
    assert thinned([]) == []
