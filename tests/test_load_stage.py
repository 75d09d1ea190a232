"""The load on a server, by stub workers: the quality figures stay whatever becomes of it, and rounds run A B B A."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from stub_worker import in_process, plan_command, starts

from evalq import load_stage, pipeline, sweep
from evalq.config import RunConfig
from evalq.load_stage import with_result
from evalq.loads.compare import compare_loads
from evalq.records import Record, read_record, read_verdict
from evalq.report.load_tables import load_rows, markdown
from evalq.report.progress import QuietWatcher

SERVED = {"act": "serve"}
KILLED = {"act": "serve", "load": {"act": "killed"}}


@pytest.fixture
def run(tmp_path: Path, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., sweep.SweepResult]:
    """run(configs, fp8_kv=act, ...): stubs in this process; with processes=True in processes of their own."""

    def go(configs: Sequence[RunConfig], processes: bool = False, **acts: dict[str, Any]) -> sweep.SweepResult:
        command = plan_command(tmp_path / "stub", default=SERVED, **acts)
        with monkeypatch.context() as patched:
            if not processes:
                patched.setattr(pipeline, "run_worker", in_process(command))
                patched.setattr(load_stage, "run_load_worker", in_process(command))
            return sweep.run(configs, QuietWatcher(), command)

    return go


def record_of(cell: sweep.CellResult) -> Record:
    assert cell.measured is not None
    return read_record(cell.measured.folder)


def test_load_is_added_to_the_record_that_is_there(tmp_path: Path, cell_config: Any, run: Any) -> None:
    result = run([cell_config("fp8-kv", "load=ladder")])
    assert starts(tmp_path / "stub") == ["baseline", "baseline+load", "fp8-kv", "fp8-kv+load"]
    assert result.exit_code == 0
    record = record_of(result.cells[0])
    assert record.loads_missing == []
    assert record.load_results["ladder"].levels[0].figures["output_tokens_per_second"].value == 101.0
    assert record.loads["ladder"].output_tokens_per_second == 101.0
    assert not list((tmp_path / "root" / "records" / ".work").iterdir())
    assert load_rows([record])[0][0] == "fp8-kv (cpu)"
    assert "| fp8-kv (cpu) | ladder: concurrency 10 | 101.0" in markdown([record])


def test_killed_load_leaves_the_quality_figures_and_their_verdict(tmp_path: Path, cell_config: Any, run: Any) -> None:
    result = run([cell_config("fp8-kv", "load=ladder")], fp8_kv=KILLED)
    (cell,) = result.cells
    assert cell.exit_code == 5, "what was asked for was not measured"
    assert not sweep.summary(result)["released"]
    assert cell.verdict is not None
    assert cell.verdict.status == "PASS"
    record = record_of(cell)
    assert record.status == "complete"
    assert record.tasks["wikitext"].metrics["word_perplexity"]
    assert record.loads_missing == ["ladder"]
    assert "load ladder was not measured: the engine's process was killed by signal 9" in record.notes[-1]
    assert read_verdict(cell.measured.folder).status == "PASS"


def test_same_command_again_measures_only_the_load(tmp_path: Path, cell_config: Any, run: Any) -> None:
    run([cell_config("fp8-kv", "load=ladder")], fp8_kv=KILLED)
    result = run([cell_config("fp8-kv", "load=ladder")])
    assert starts(tmp_path / "stub")[4:] == ["fp8-kv+load"], "the baseline is whole, and nothing is scored again"
    assert result.exit_code == 0
    record = record_of(result.cells[0])
    assert record.loads_missing == []
    assert not [note for note in record.notes if "was not measured" in note]


def is_alive(pid: int) -> bool:
    """Ended processes that nobody waited for do not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_b4_killed_load_leaves_no_process(tmp_path: Path, cell_config: Any, run: Any) -> None:
    """b4: a server with children of its own, in sessions of their own, one deaf to SIGTERM."""
    pids = tmp_path / "pids"
    family = {"act": "serve", "load": {"act": "family", "pids": str(pids), "then": "killed"}}
    result = run([cell_config("fp8-kv", "load=ladder")], processes=True, fp8_kv=family)
    assert result.exit_code == 5
    assert not [pid for pid in json.loads(pids.read_text()) if is_alive(pid)]
    assert record_of(result.cells[0]).status == "complete"


def test_candidate_stands_when_the_baselines_load_was_killed(cell_config: Any, run: Any) -> None:
    result = run([cell_config("fp8-kv", "load=ladder")], baseline=KILLED)
    (cell,) = result.cells
    assert cell.verdict is not None
    assert cell.verdict.status == "PASS"
    assert cell.exit_code == 5
    assert "killed by signal 9" in str(cell.error)


def test_rounds_run_the_cells_forth_and_back(tmp_path: Path, cell_config: Any, run: Any) -> None:
    """A B B A, so that drift falls on both."""
    result = run([cell_config("fp8-kv", "load=ladder", "load.rounds=2")])
    loads = [name for name in starts(tmp_path / "stub") if name.endswith("+load")]
    assert loads == ["baseline+load", "fp8-kv+load", "fp8-kv+load", "baseline+load"]
    candidate = record_of(result.cells[0])
    assert result.cells[0].baseline is not None
    baseline = read_record(result.cells[0].baseline.folder)
    for record in (baseline, candidate):
        assert [r.round for r in record.load_results["ladder"].levels[0].repeats] == [1, 1, 1, 2, 2, 2]
    rows = compare_loads(baseline.load_results["ladder"], candidate.load_results["ladder"])
    assert rows
    assert all(row.valid for row in rows)


def test_new_figures_take_the_place_of_old_ones_of_the_same_load() -> None:
    import record_builder
    from load_builder import level, result

    record = record_builder.record("baseline", record_builder.baseline_rows(items=10))
    once = with_result(record, result(level(100, 101, 99), level(10, 11, 12, label="all at once")))
    assert set(once.loads) == {"offline", "ladder-concurrency-10", "ladder-all-at-once"}
    twice = with_result(once, result(level(200, 201, 199), level(20, 21, 22, label="all at once")))
    assert set(twice.loads) == set(once.loads)
    assert twice.loads["ladder-concurrency-10"].output_tokens_per_second == 200
    assert twice.loads["offline"] == record.loads["offline"]


def test_e5_ledger_is_the_axis_and_not_what_the_driver_sees() -> None:
    """e5: two schemes, one device-wide figure; weights and KV still tell them apart, in MLflow as in the table."""
    import record_builder

    from evalq.report.load_tables import LEDGER_COLUMNS, ledger_rows
    from evalq.tracking.content import WEIGHTS_AND_KV, metrics_of

    rows = record_builder.baseline_rows(items=10)
    pair = []
    for name, weights in (("baseline", 1000), ("w4a16", 600)):
        ledger = dataclasses.replace(record_builder.LEDGER, weight_bytes=weights, driver_bytes=10**9)
        pair.append(record_builder.record(name, rows, ledger=ledger))
    first, second = (metrics_of(record, None).values for record in pair)
    assert first[WEIGHTS_AND_KV] > second[WEIGHTS_AND_KV]
    assert not [name for name in first if "driver" in name]
    shown = ledger_rows(pair)
    assert shown[0][-1] == shown[1][-1]
    assert shown[0][1] != shown[1][1]
    assert LEDGER_COLUMNS[-1] == "driver sees"
