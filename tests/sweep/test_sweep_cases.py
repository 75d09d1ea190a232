"""Failures that sweeps really have: two models (a1), a small run before a full one (a15), devices (b3, c5), caches (b10)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_cell import cell_command
from stub_worker import in_process, plan_command, starts
from tiny_safetensors import tiny_safetensors

from evalq import checkpoints, pipeline, preparation, sweep
from evalq.measure import device
from evalq.records import read_record
from evalq.report.progress import QuietWatcher
from evalq.sweep import local_workers


@pytest.fixture
def run(tmp_path: Path, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., sweep.SweepResult]:
    def go(configs: list[Any], **acts: dict[str, Any]) -> sweep.SweepResult:
        command = plan_command(tmp_path / "stub", **acts)
        monkeypatch.setattr(pipeline, "run_worker", in_process(command))
        return sweep.run(configs, QuietWatcher(), command)

    return go


def other_model(config: Any) -> Any:
    """The same cell of another checkpoint."""
    config.model.name, config.model.hub_id = "other-model", "someone/other-model"
    return config


def test_a1_second_model_of_a_sweep_is_really_called(
    tmp_path: Path, cell_config: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoints.source_folder
    second = tiny_safetensors(tmp_path / "second", **{"config.json": '{"other": 1}'})
    monkeypatch.setattr(
        checkpoints,
        "source_folder",
        lambda cell, w: second if cell.config.model.name == "other-model" else first(cell, w),
    )
    configs = [cell_config("fp8-kv"), other_model(cell_config("fp8-kv"))]
    result = run(configs)
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv"] * 2
    baselines = [cell.baseline.record for cell in result.cells]
    assert baselines[0].reuse_key != baselines[1].reuse_key
    assert baselines[0].fingerprint["weights_hash"] != baselines[1].fingerprint["weights_hash"]
    assert [cell.measured.record.cell.model for cell in result.cells] == ["smollm2-135m", "other-model"]


def test_a1_candidate_with_the_baselines_very_values_is_flagged(cell_config: Any, run: Any) -> None:
    result = run([cell_config("fp8-kv"), cell_config("w4a16")], w4a16={"act": "record", "noise": 0.0})
    assert result.cells[0].verdict.status == "PASS"
    assert result.cells[1].verdict.status in ("INVALID", "SUSPECT")
    assert result.exit_code != 0


def test_a15_nothing_of_a_small_sweep_leaks_into_the_full_one(tmp_path: Path, cell_config: Any, run: Any) -> None:
    small = ("tasks.perplexity_limit=10", "tasks.hellaswag_limit=10")
    first = run([cell_config("fp8-kv", *small), cell_config("w4a16", *small)])
    full = run([cell_config("fp8-kv"), cell_config("w4a16")])
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv", "w4a16"] * 2
    assert first.folder != full.folder
    ids = [{cell.measured.record.record_id, cell.baseline.record.record_id} for r in (first, full) for cell in r.cells]
    assert not (ids[0] | ids[1]) & (ids[2] | ids[3])
    assert run([cell_config("w4a16", *small), cell_config("fp8-kv", *small)]).folder == first.folder
    assert len(starts(tmp_path / "stub")) == 6


def on_gpus(configs: list[Any], monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """These cells are of h100s, of which this machine has `count`."""
    monkeypatch.setattr(preparation, "detect", lambda: "h100")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for config in configs:
        config.gpu.name = "h100"


def test_b3_second_cell_waits_for_the_memory_of_the_first_or_names_who_holds_it(
    cell_config: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [cell_config("fp8-kv", "load=off"), cell_config("fp8-weights", "load=off")]
    on_gpus(configs, monkeypatch, 1)
    used = iter(["100, 80000", "100, 80000", "70000, 80000"])  # baseline, fp8-kv, and then it does not become free
    last = ["70000, 80000"]

    def smi(query: str) -> str:
        if "memory.used" in query:
            return next(used, last[0])
        return "0\n" if "index" in query else "4711, /usr/bin/python\n" if "compute" in query else "NVIDIA H100\n"

    monkeypatch.setattr(device, "_nvidia_smi", smi)
    monkeypatch.setattr(device.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(pipeline, "check_device_clean", lambda share, ids: device.check_device_clean(share, -1.0, ids))
    result = run(configs)
    assert [cell.exit_code for cell in result.cells] == [0, 5]
    assert result.cells[1].error.kind == "dirty_device"
    assert "held by pid 4711 (/usr/bin/python)" in str(result.cells[1].error)


FAKE_SMI = """#!/bin/bash
case "$*" in
  *index*) printf '0\\n1\\n' ;;
  *memory.used*) echo '100, 80000' ;;
  *name*) echo 'NVIDIA H100 80GB HBM3' ;;
esac
"""


def test_c5_two_cells_at_once_have_two_gpus_and_each_its_own(
    tmp_path: Path, cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stub engines that note which GPU they see and when; on none of them do two overlap, load test and all."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(FAKE_SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}{os.pathsep}{os.environ['PATH']}")
    configs = [cell_config(name) for name in ("fp8-kv", "fp8-weights", "fp8-weights-kv")]
    on_gpus(configs, monkeypatch, 2)
    log = tmp_path / "seen"
    act = {"act": "record", "seen": str(log)}
    stub = tmp_path / "stub"
    command = plan_command(stub, {**act, "meet": str(stub / "starts")}, baseline=act)
    assert local_workers([preparation.prepare(config) for config in configs]) == (2, 2)
    result = sweep.run(configs, QuietWatcher(), command, cell_command(no_checkpoint, "h100"))
    assert result.done == 3, [str(cell.error) for cell in result.cells]
    spans = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(spans) == 4
    assert {span["gpus"] for span in spans} == {"0", "1"}
    for a in spans:
        for b in spans:
            if a is not b and a["gpus"] == b["gpus"]:
                assert a["end"] <= b["begin"] or b["end"] <= a["begin"]
    candidates = [span for span in spans if span["quant"] != "baseline"]
    assert any(a["begin"] < b["begin"] < a["end"] for a in candidates for b in candidates), "two did run at once"


def test_workers_follow_the_gpus_that_a_cell_takes(cell_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "gpu_ids", lambda: list("01234567"))
    configs = [cell_config("fp8-kv", "engine.tensor_parallel_size=3", "gpu.count=3") for _ in range(9)]
    on_gpus(configs, monkeypatch, 8)
    cells = [preparation.prepare(config) for config in configs]
    assert local_workers(cells) == (8, 2)
    assert local_workers(cells[:1]) == (8, 1), "no more than there are cells"
    configs[0].executor.workers = 1
    assert local_workers([preparation.prepare(config) for config in configs]) == (8, 1)


def test_b10_a_cell_is_the_same_measurement_alone_and_after_another(tmp_path: Path, cell_config: Any, run: Any) -> None:
    """evalq keeps nothing between cells: own work folder, own key, own process. The engine's own compile cache: next test."""
    alone = run([cell_config("fp8-kv")]).cells[0].measured.record
    after = run([cell_config("w4a16"), cell_config("fp8-kv")]).cells[1].measured.record
    assert alone.record_id != after.record_id
    assert (alone.reuse_key, alone.config_hash, alone.tables) == (after.reuse_key, after.config_hash, after.tables)
    assert alone.tasks == after.tasks
    assert {read_record(f).status for f in (tmp_path / "root" / "records").glob("[!.]*/record.json")} == {"complete"}


COMPILE_KEYS = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
folder = sys.argv[1]
keys = {}
for name, extra in {"baseline": {}, "fp8-kv": {"kv_cache_dtype": "fp8_e4m3"}, "again": {}}.items():
    keys[name] = EngineArgs(model=folder, max_model_len=256, **extra).create_engine_config().compute_hash()
print("KEYS " + json.dumps(keys))
"""


@pytest.mark.engine
def test_b10_engine_keeps_compiled_code_apart_by_scheme(tmp_path: Path, cell_config: Any) -> None:
    """The key of vLLM's compile cache differs between two schemes, and is the same for one. No engine is started."""
    import subprocess

    from evalq.quantize.shapes import shape_checkpoint

    config = cell_config("baseline")
    folder = shape_checkpoint(config.model, preparation.baseline_scheme(config), tmp_path / "models")
    done = subprocess.run([sys.executable, "-c", COMPILE_KEYS, str(folder)], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("KEYS ")]
    assert lines, done.stderr[-2000:]
    keys = json.loads(lines[-1].removeprefix("KEYS "))
    assert keys["baseline"] == keys["again"] != keys["fp8-kv"]
