"""One cell: what refuses it, what makes a measurement the same one, and what stays on disk when it fails."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from stub_worker import in_process, plan_command, starts

from evalq import checkpoints, identity, pipeline, preparation
from evalq.config import ModelConfig
from evalq.errors import ConfigError, InfeasibleError, MeasurementError
from evalq.judge.seal import why_unsealed
from evalq.measure import launch
from evalq.measure.cells import CellLock
from evalq.records import read_record
from evalq.report.progress import QuietWatcher


@pytest.fixture
def measured(tmp_path: Path, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def go(config: Any, reuse: bool = False, **act: Any) -> pipeline.Measured:
        command = plan_command(tmp_path / "stub", act or None)
        monkeypatch.setattr(pipeline, "run_worker", in_process(command))
        return pipeline.measure(preparation.prepare(config), QuietWatcher(), command, reuse)

    return go


def test_record_says_what_it_is_of(cell_config: Any, measured: Any, no_checkpoint: Path) -> None:
    config = cell_config("fp8-kv")
    done = measured(config)
    record = read_record(done.folder)
    assert record == done.record
    assert done.folder.name == record.record_id
    assert (record.cell.model, record.cell.quant, record.cell.gpu, record.cell.engine) == (
        "smollm2-135m",
        "fp8-kv",
        "cpu",
        "cpu",
    )
    assert record.cell.is_baseline is False
    assert record.fingerprint["model_id"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert record.fingerprint["gpu"] == preparation.device_name("cpu") != "cpu"
    composed = yaml.safe_load((done.folder / "config.yaml").read_text())
    assert composed["quant"]["name"] == "fp8-kv"


def test_records_are_sealed_where_there_is_a_key(
    cell_config: Any, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only a sealed one is used again; the process that runs the model's code never has the key."""
    config = cell_config("baseline")
    plain = measured(config)
    assert why_unsealed(plain.folder, b"k" * 32) is not None
    assert measured(config, reuse=True).reused is True
    monkeypatch.setenv("EVALQ_SEAL_KEY", "k" * 32)
    sealed = measured(config, reuse=True)
    assert sealed.reused is False, "a record without a seal may be anybody's"
    assert why_unsealed(sealed.folder, b"k" * 32) is None
    assert measured(config, reuse=True).record.record_id == sealed.record.record_id
    assert "EVALQ_SEAL_KEY" not in launch._environment()
    monkeypatch.setenv("EVALQ_SEAL_KEY", "short")
    with pytest.raises(ConfigError, match="use 16 or more"):
        preparation.prepare(config)


def test_a_record_names_the_checkpoint_it_was_measured_on(
    cell_config: Any, measured: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = preparation.prepare(cell_config("fp8-kv"))
    known = identity.checkpoint_id(cell, no_checkpoint)
    assert known is not None
    assert known.location == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert known.weights_sha256 == identity.identity_of(cell, no_checkpoint)["weights_hash"]
    inside = cell.places.root / "checkpoints" / "x"
    inside.parent.mkdir(parents=True)
    no_checkpoint.rename(inside)
    assert identity.checkpoint_id(cell, inside) == dataclasses.replace(known, location="checkpoints/x")


def test_identity_follows_weights_tokenizer_and_path(cell_config: Any, no_checkpoint: Path) -> None:
    cell = preparation.prepare(cell_config("fp8-kv"))
    first = identity.identity_of(cell, no_checkpoint)
    assert len(str(first["weights_hash"])) == len(str(first["tokenizer_hash"])) == 64
    (no_checkpoint / "tokenizer.json").write_text('{"other": 1}')
    second = identity.identity_of(cell, no_checkpoint)
    assert second["weights_hash"] == first["weights_hash"]
    assert second["tokenizer_hash"] != first["tokenizer_hash"]
    named = dataclasses.replace(cell.config.model, path="/some/where/my-model")
    own = dataclasses.replace(cell, config=dataclasses.replace(cell.config, model=named))
    assert identity.identity_of(own, no_checkpoint)["model_id"] == "my-model"


def test_renamed_tokenizer_file_is_another_tokenizer(tmp_path: Path) -> None:
    """The name is part of the hash: the same bytes as vocabulary and as merges are not the same tokenizer."""
    hashes = set()
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("same")
        hashes.add(identity.tokenizer_hash(tmp_path))
        (tmp_path / name).unlink()
    assert len(hashes) == 2


def test_failure_is_a_record_with_its_log(tmp_path: Path, cell_config: Any, measured: Any) -> None:
    config = cell_config("fp8-kv")
    with pytest.raises(MeasurementError) as caught:
        measured(config, act="fail", kind="oom", message="no memory", code=5)
    note = next(text for text in caught.value.__notes__ if text.startswith("record: "))
    record = read_record(Path(note.removeprefix("record: ")))
    assert record.status == "failed"
    assert record.failure is not None
    assert (record.failure.kind, record.failure.message) == ("oom", "no memory")
    assert record.tasks == {}
    assert record.tables == {}


def test_two_failures_are_two_records_and_success_comes_after(tmp_path: Path, cell_config: Any, measured: Any) -> None:
    config = cell_config("fp8-kv")
    for _ in range(2):
        with pytest.raises(MeasurementError):
            measured(config, act="killed")
    assert measured(config).record.status == "complete"
    statuses = sorted(read_record(f.parent).status for f in (tmp_path / "root").rglob("record.json"))
    assert statuses == ["complete", "failed", "failed"]


def test_failure_and_full_disk_at_once_is_still_the_failure(
    cell_config: Any, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pipeline, "write_record", full)
    with pytest.raises(MeasurementError, match="signal 9"):
        measured(cell_config("fp8-kv"), act="killed")


def test_missing_data_and_missing_device_refuse_early(cell_config: Any, no_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="/nowhere is not a folder"):
        preparation.prepare(cell_config("fp8-kv", "data=local", "data.root=/nowhere"))
    config = cell_config("fp8-kv")
    config.gpu = dataclasses.replace(config.gpu, name="a100-80g")
    with pytest.raises(InfeasibleError):
        preparation.prepare(config)


def test_no_task_and_no_load_is_refused(cell_config: Any, no_checkpoint: Path) -> None:
    nothing = ("tasks.perplexity=false", "tasks.hellaswag=false", "tasks.truthfulqa=false", "load=off")
    with pytest.raises(ConfigError, match="no task is switched on"):
        preparation.prepare(cell_config("fp8-kv", *nothing))


def test_unknown_checkpoint_folder_is_a_config_error(tmp_path: Path, cell_config: Any) -> None:
    cell = preparation.prepare(cell_config("fp8-kv"))
    model = ModelConfig(name="mine", path=str(tmp_path / "missing"), bos="never")
    cell = dataclasses.replace(cell, config=dataclasses.replace(cell.config, model=model))
    with pytest.raises(ConfigError, match="missing"):
        checkpoints.source_folder(cell, QuietWatcher())


def test_baseline_of_a_cell_differs_in_nothing_but_the_scheme(cell_config: Any, no_checkpoint: Path) -> None:
    cell = preparation.prepare(cell_config("mixed-4-8"))
    baseline = preparation.as_baseline(cell)
    assert baseline.is_baseline
    assert not cell.is_baseline
    restored = dataclasses.replace(baseline.config, quant=cell.config.quant)
    assert restored == cell.config
    assert baseline.predicted["weight_bytes"] > cell.predicted["weight_bytes"]
    key = {identity.reuse_key(c, {"model_id": "x"}) for c in (cell, baseline)}
    assert len(key) == 2


def test_same_cell_waits_for_the_one_that_runs(tmp_path: Path) -> None:
    told: list[str] = []

    class Told(QuietWatcher):
        def stage(self, stage: str, label: str) -> None:
            told.append(stage)

    order: list[str] = []

    def second() -> None:
        with CellLock(tmp_path, "key", Told()):
            order.append("second")

    with CellLock(tmp_path, "key", Told()):
        thread = threading.Thread(target=second)
        thread.start()
        while "wait" not in told:
            thread.join(0.05)
        with CellLock(tmp_path, "another", Told()):
            order.append("first")
    thread.join(10.0)
    assert order == ["first", "second"]


def test_second_of_two_waiting_baselines_uses_the_first_ones_record(
    tmp_path: Path, cell_config: Any, measured: Any
) -> None:
    """The look into the store comes after the lock, so whoever waited finds what was measured meanwhile."""
    config = cell_config("baseline")
    first = measured(config, reuse=True)
    second = measured(config, reuse=True)
    assert (first.reused, second.reused) == (False, True)
    assert second.folder == first.folder
    assert starts(tmp_path / "stub") == ["baseline"]


def test_another_calibration_text_under_the_same_name_is_another_measurement(
    cell_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint has other bytes, so no stored record and no kept scores are its own."""
    text = tmp_path / "mine.jsonl"
    text.write_text('{"page": "one text"}\n', encoding="utf-8")
    given = ("calibration.source=local", f"calibration.file={text}", "calibration.columns=[page]")
    cell = preparation.prepare(cell_config("fp8-static", "data=embedded", *given))

    def key(cell: preparation.Prepared) -> str:
        return identity.reuse_key(cell, {"model_id": "x"})

    before = key(cell)
    assert key(cell) == before
    text.write_text('{"page": "another text"}\n', encoding="utf-8")
    after = key(cell)
    assert after != before
    monkeypatch.setattr("evalq.quantize.calibrated.CALIBRATOR_VERSION", "next")
    assert key(cell) not in (before, after)
    plain = preparation.prepare(cell_config("w4a16"))
    plainly = key(plain)
    monkeypatch.setattr("evalq.quantize.QUANTIZER_VERSION", "next")
    assert key(plain) != plainly
