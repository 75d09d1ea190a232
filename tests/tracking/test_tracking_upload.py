"""Writing to a real MLflow store: each run once, half-uploaded runs made whole (cases d1-d4, d6, d7)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tracked_records as build
import yaml

from evalq.errors import RecordError
from evalq.records import VERDICT_FILE, Record, read_record, to_json, write_text
from evalq.tracking import manifest as m
from evalq.tracking.store import Store
from evalq.tracking.system import keep_samples
from evalq.tracking.upload import again_when_locked

pytestmark = pytest.mark.usefixtures("upload")


PROMOTED = ("checkpoints", ".promote.lock")  # of the tests of promote, which share this store


class Study:
    """A study of one test in the shared store."""

    def __init__(self, upload: Any, store: Store, records: Path) -> None:
        self.upload, self.store, self.records = upload, store, records
        self.path = m.open_manifest(store, records.name, "smollm2-135m on cpu", "smollm2-135m", "cpu")
        self.experiment, self.parent = upload.open_study(m.read_manifest(self.path))

    def add(self, made: Record, verdict: Any = None, reused: bool = False, config: str = "quant: {name: x}\n") -> str:
        folder = build.write(self.records / made.record_id, made, verdict, config)
        m.add_cell(self.path, self.store.records, folder, read_record(folder), reused)
        return made.record_id

    def log(self, record_id: str) -> Any:
        manifest = m.read_manifest(self.path)
        cell = next(cell for cell in manifest.cells if cell.record_id == record_id)
        return self.upload.log_cell(manifest, cell, self.experiment, self.parent)

    def runs(self) -> list[Any]:
        wanted = f"tags.`mlflow.parentRunId` = '{self.parent}'"
        return list(self.upload._client.search_runs([self.experiment], wanted))

    def run(self, run_id: str) -> Any:
        return self.upload._client.get_run(run_id)

    def files(self, run_id: str, folder: str) -> set[str]:
        return {Path(file.path).name for file in self.upload._client.list_artifacts(run_id, folder)}


@pytest.fixture
def study(upload: Any, store: Store, records: Path) -> Study:
    return Study(upload, store, records)


def test_a_cell_becomes_one_run_with_everything(study: Study, store: Store) -> None:
    baseline = study.add(build.record())
    made = build.record("int8-w8a8")
    candidate = study.add(made, build.verdict(made))
    study.log(baseline)
    result = study.log(candidate)
    run = study.run(result.run_id)
    assert result.state == "uploaded"
    assert run.info.run_name == "int8-w8a8"
    assert run.info.status == "FINISHED"
    assert run.data.metrics["quality/perplexity_increase_percent"] == pytest.approx(0.8)
    assert run.data.params["quant.name"] == "x"
    assert run.data.tags["evalq.verdict"] == "PASS"
    assert run.data.tags["evalq.gate_eligible"] == "true"
    assert run.data.tags["evalq.complete"] == "true"
    assert run.data.tags["mlflow.parentRunId"] == study.parent
    record_files = {"record.json", "verdict.json", "config.yaml", "engine.log", "documents.parquet", "items.parquet"}
    assert study.files(result.run_id, "record") == record_files
    assert study.files(result.run_id, "tables") == {"document_differences.json", "item_differences.json"}
    assert {entry.dataset.name for entry in run.inputs.dataset_inputs} == {"wikitext: embedded", "hellaswag: embedded"}
    assert run.info.artifact_uri.startswith(store.artifacts.as_uri())


def test_uploading_again_changes_nothing(study: Study) -> None:
    record_id = study.add(build.record())
    first, second = study.log(record_id), study.log(record_id)
    assert (first.state, second.state) == ("uploaded", "present")
    assert first.run_id == second.run_id
    assert len(study.runs()) == 1


def test_a_half_uploaded_run_is_made_whole(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    record_id = study.add(build.record())
    with monkeypatch.context() as patch:
        patch.setattr(study.upload, "_log_artifacts", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            study.log(record_id)
    (half,) = study.runs()
    assert (half.info.status, half.data.tags["evalq.complete"]) == ("RUNNING", "false")
    assert study.log(record_id).state == "uploaded"
    (whole,) = study.runs()
    assert (whole.info.run_id, whole.info.status) == (half.info.run_id, "FINISHED")
    history = study.upload._client.get_metric_history(whole.info.run_id, "memory/weight_bytes")
    assert len(history) == 1, "the second upload added no second value"


def test_a_later_verdict_goes_to_the_same_run(study: Study) -> None:
    made = build.record("fp8-kv")
    record_id = study.add(made, build.verdict(made, "INCONCLUSIVE", 0.012))
    study.log(record_id)
    later = dataclasses.replace(build.verdict(made, "PASS", 0.008), created_at="2026-11-30T10:00:00+00:00")
    write_text(study.records / record_id / VERDICT_FILE, to_json(later))
    assert study.log(record_id).state == "uploaded"
    (run,) = study.runs()
    assert run.data.tags["evalq.verdict"] == "PASS"
    assert run.data.metrics["quality/perplexity_increase_percent"] == pytest.approx(0.8)


def test_a_reused_baseline_is_a_run_of_its_own_in_each_study(study: Study) -> None:
    record_id = study.add(build.record(), reused=True)
    result = study.log(record_id)
    assert study.run(result.run_id).data.tags["evalq.reused"] == "true"


def test_missing_figures_are_tags(study: Study) -> None:
    """Case d1."""
    result = study.log(study.add(build.record("x", perplexity=None)))
    run = study.run(result.run_id)
    assert "quality/wikitext_word_perplexity" not in run.data.metrics
    assert run.data.tags["evalq.invalid.quality/wikitext_word_perplexity"] == "no words were scored"


def test_a_long_value_is_whole_in_the_config_artifact(study: Study) -> None:
    """Case d7."""
    result = study.log(study.add(build.record("x"), config=f"engine: {{extra: {'x' * 7000}}}\n"))
    assert "record/config.yaml" in study.run(result.run_id).data.params["engine.extra"]
    text = Path(study.upload._client.download_artifacts(result.run_id, "record/config.yaml")).read_text()
    assert "x" * 7000 in text


def test_a_failed_cell_is_a_failed_run(study: Study) -> None:
    result = study.log(study.add(build.failed("w4a16")))
    run = study.run(result.run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["evalq.gate_eligible"] == "false"


def test_a_changed_table_is_not_uploaded(study: Study) -> None:
    record_id = study.add(build.record())
    (study.records / record_id / "items.parquet").write_bytes(b"other")
    with pytest.raises(RecordError, match="not the table"):
        study.log(record_id)
    assert study.runs() == []


def test_refused_artifacts_keep_a_run_from_the_gate(
    study: Study, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case d6: the artifact root cannot be written (a file stands in its place). Later it can, and the run is whole."""
    record_id = study.add(build.record())
    folder = store.artifacts / "smollm2-135m-on-cpu"
    hidden = folder.rename(folder.with_name("hidden")) if folder.exists() else None
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("not a folder")
    try:
        result = study.log(record_id)
    finally:
        folder.unlink()
        if hidden:
            hidden.rename(folder)
    tags = study.run(result.run_id).data.tags
    assert result.state == "refused"
    assert "artifact store refused" in result.reason
    assert (tags["evalq.gate_eligible"], tags["evalq.complete"]) == ("false", "false")
    assert m.read_pending(study.records / record_id)[0]["study"] == study.records.name
    assert (study.records / record_id / "record.json").is_file()
    assert study.log(record_id).state == "uploaded"
    assert study.run(result.run_id).data.tags["evalq.gate_eligible"] == "true"
    assert m.read_pending(study.records / record_id) == []


def test_the_parent_run_sums_up(study: Study) -> None:
    for made in (build.record(), build.record("int8-w8a8", perplexity=32.4, weight_bytes=163_000_000)):
        study.log(study.add(made, None if made.cell.is_baseline else build.verdict(made)))
    m.end_manifest(study.path, "FINISHED")
    assert study.upload.close_study(m.read_manifest(study.path), study.parent) == ""
    run = study.run(study.parent)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["study/pass_cells"] == 1
    assert "| int8-w8a8 | PASS |" in run.data.tags["mlflow.note.content"]
    assert study.files(study.parent, "study") == {"summary.md", "summary.json", "accuracy_against_memory.png"}


def test_runs_of_processes_that_are_gone_are_ended(study: Study) -> None:
    """Case d2: a run left RUNNING by a killed process; one of a living process is left alone."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    started = m.process_started(dead.pid) or 0.0
    dead.wait()
    client, me = study.upload._client, m.this_process()
    tags = {"evalq.host": me.host, "evalq.pid_namespace": me.namespace}
    stale = client.create_run(
        study.experiment, tags=tags | {"evalq.pid": str(dead.pid), "evalq.process_started": str(started)}
    )
    assert study.upload.reconcile() == [stale.info.run_name]
    assert client.get_run(stale.info.run_id).info.status == "KILLED"
    assert study.run(study.parent).info.status == "RUNNING"


def test_a_deleted_experiment_of_that_name_is_restored(study: Study) -> None:
    number = study.upload.experiment_id("deleted once")
    study.upload._client.delete_experiment(number)
    study.upload._experiments.clear()
    assert study.upload.experiment_id("deleted once") == number
    assert study.upload._client.get_experiment(number).lifecycle_stage == "active"


def test_nothing_lands_where_evalq_was_called(study: Study, store: Store) -> None:
    """Case d4."""
    study.log(study.add(build.record()))
    assert {path.name for path in store.root.iterdir()} <= {
        "records",
        "mlflow.db",
        "mlartifacts",
        ".mlflow.lock",
        *PROMOTED,
    }


def test_two_runs_of_one_record_become_one(study: Study) -> None:
    """As when two processes made it at the same moment, or a request was sent twice: the first one stays."""
    record_id = study.add(build.record())
    first = study.log(record_id)
    tags = {"evalq.record_id": record_id, "evalq.study": study.records.name, "mlflow.parentRunId": study.parent}
    study.upload._client.create_run(study.experiment, tags=tags | {"evalq.created_ns": str(2**62)})
    assert len(study.runs()) == 2
    assert (study.log(record_id).state, study.log(record_id).run_id) == ("present", first.run_id)
    assert [run.info.run_id for run in study.runs()] == [first.run_id]


def test_system_metrics_are_mlflows_own(study: Study) -> None:
    """Kept beside the record, and on the page that MLflow has for them (names that begin with system/)."""
    record_id = study.add(build.record())
    samples = [(1_764_410_400_000 + 5000 * i, {"cpu_utilization_percentage": 50.0 + i}) for i in range(3)]
    keep_samples(study.records / record_id, samples)
    run_id = study.log(record_id).run_id
    history = study.upload._client.get_metric_history(run_id, "system/cpu_utilization_percentage")
    assert [(point.timestamp, point.value) for point in history] == [
        (s, v["cpu_utilization_percentage"]) for s, v in samples
    ]
    assert "system.json" in study.files(run_id, "record")


def test_a_cell_has_the_card_of_its_checkpoint(study: Study) -> None:
    group = "{targets: [x], weights: {num_bits: 4}}"
    config = f"model: {{hub_id: owner/model}}\nquant: {{origin: evalq, method: rtn, groups: {{g: {group}}}}}\n"
    made = build.record("mixed-4-8", notes=["weights went through 4 bits once"])
    result = study.log(study.add(made, build.verdict(made), config=config))
    text = Path(study.upload._client.download_artifacts(result.run_id, "model_card.md")).read_text()
    for part in (
        "base_model: owner/model",
        "**PASS.**",
        "| g | x | 4 bit",
        "weights went through 4 bits once",
        "| hellaswag | acc |",
    ):
        assert part in text
    assert yaml.safe_load(text.split("---")[1])["evalq"] == {"record": "mixed-4-8-0001", "verdict": "PASS"}


def test_a_locked_database_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    calls = []

    def locked_twice() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("(sqlite3.OperationalError) database is locked")
        return "written"

    assert again_when_locked(locked_twice) == "written"
    with pytest.raises(ValueError, match="other"):
        again_when_locked(lambda: (_ for _ in ()).throw(ValueError("other")))
