"""Writing studies and cells to MLflow, each exactly once. mlflow is imported when it is used."""

from __future__ import annotations

import getpass
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from evalq import __version__
from evalq.errors import MeasurementError
from evalq.records import RECORD_FILE, Estimate, Record, Verdict, file_sha256, read_record
from evalq.tracking import content, summary
from evalq.tracking.card import CARD_FILE, model_card
from evalq.tracking.differences import difference_tables
from evalq.tracking.entities import datasets_of, system_metrics
from evalq.tracking.manifest import Manifest, Owner, StudyCell, clear_pending, is_gone, mark_pending, this_process
from evalq.tracking.store import Store, file_lock, slug
from evalq.tracking.system import Sample, read_samples

BATCH = 100  # params or tags in one request, MLflow's limit
LOCK_FILE = ".mlflow.lock"
CREATED_TAG = "evalq.created_ns"  # Unix nanoseconds; which of two runs was first
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # the UI then opens on runs, not on traces
T = TypeVar("T")


@dataclass(frozen=True)
class CellResult:
    """What became of one cell: uploaded | present (it was there already) | refused (the artifacts, not the figures)."""

    state: str
    run_id: str
    reason: str = ""


class Upload:
    """One store, opened. Everything here may be called again after a failure: what is there already is found."""

    def __init__(self, store: Store) -> None:
        from mlflow import MlflowClient

        self.store = store
        self._experiments: dict[str, str] = {}
        self._owner = this_process()
        with self._alone():  # the client opens, creates and migrates the store as soon as it is made
            _create_database(store)
            self._client: Any = again_when_locked(lambda: MlflowClient(tracking_uri=store.mlflow_uri))

    def _alone(self) -> AbstractContextManager[None]:
        """One writer at a time where the store is a local file: creation, migration, search-then-create."""
        return file_lock(self.store.root / LOCK_FILE) if self.store.is_sqlite else nullcontext()

    def reconcile(self) -> list[str]:
        """End runs that say RUNNING though their process is gone; returns their names."""
        with self._alone():
            return again_when_locked(self._reconcile)

    def _reconcile(self) -> list[str]:
        experiments = [e.experiment_id for e in _pages(self._client.search_experiments)]
        wanted = f"attributes.status = 'RUNNING' and tags.`evalq.host` = '{self._owner.host}'"
        found = _pages(lambda **page: self._client.search_runs(experiments, wanted, **page)) if experiments else []
        ended = []
        for run in found:
            owner = _owner_of(run.data.tags)
            if owner is not None and is_gone(owner):
                self._client.set_tag(run.info.run_id, "evalq.ended_by", "its process ended without saying so")
                self._client.set_terminated(run.info.run_id, "KILLED")
                ended.append(run.info.run_name)
        return ended

    def experiment_id(self, name: str) -> str:
        """Id of the experiment, made when there is none; its artifacts go where the store says, never to ./mlruns."""
        if name not in self._experiments:
            found = self._client.get_experiment_by_name(name)
            if found is None:
                found = self._create_experiment(name)
            elif found.lifecycle_stage == "deleted":
                self._client.restore_experiment(found.experiment_id)
            self._experiments[name] = found.experiment_id
        return self._experiments[name]

    def _create_experiment(self, name: str) -> Any:
        from mlflow.exceptions import MlflowException

        location = (self.store.artifacts / slug(name)).as_uri() if self.store.artifacts else None
        try:
            self._client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return self._client.get_experiment_by_name(name)

    def open_study(self, manifest: Manifest) -> tuple[str, str]:
        """Experiment id and run id of the study's parent run, found or made; it is RUNNING afterwards."""
        with self._alone():
            return again_when_locked(lambda: self._open_study(manifest))

    def _open_study(self, manifest: Manifest) -> tuple[str, str]:
        experiment = self.experiment_id(manifest.experiment)
        tags = _common_tags(manifest.study, manifest.owner if manifest.status == "RUNNING" else self._owner) | {
            "evalq.kind": "study",
            "evalq.model": manifest.model,
            "evalq.gpu": manifest.gpu,
        }
        wanted = f"tags.`evalq.kind` = 'study' and tags.`evalq.study` = {_quoted(manifest.study)}"
        found = self._find(experiment, wanted)
        if found is None:
            start = content.milliseconds(manifest.created_at)
            found = self._create(experiment, wanted, start, tags, manifest.study)
        if found.info.status != "RUNNING" and manifest.status == "RUNNING":
            self._client.update_run(found.info.run_id, status="RUNNING")
        self._log_tags(found.info.run_id, tags)
        return experiment, found.info.run_id

    def log_cell(self, manifest: Manifest, cell: StudyCell, experiment: str, parent: str) -> CellResult:
        """Upload one cell, or what a broken upload left out. Only a run tagged evalq.complete=true is whole.

        Errors: RecordError for a record that is damaged; whatever MLflow raises when the store fails.
        """
        folder = self.store.records / cell.folder
        record, verdict = read_record(folder), content.verdict_beside(folder)
        content.refuse_changed_tables(folder, record)
        with self._alone():
            result = again_when_locked(
                lambda: self._log_cell(manifest, cell, experiment, parent, _Loaded(folder, record, verdict))
            )
        if result.state == "refused":
            mark_pending(folder, self.store, manifest.study, result.reason)
        else:
            clear_pending(folder, self.store, manifest.study)
        return result

    def _log_cell(
        self, manifest: Manifest, cell: StudyCell, experiment: str, parent: str, loaded: _Loaded
    ) -> CellResult:
        digest = content.content_digest(loaded.folder)
        run = self._cell_run(manifest, cell, experiment, parent, loaded.record)
        if run.data.tags.get("evalq.complete") == "true" and run.data.tags.get("evalq.content") == digest:
            return CellResult("present", run.info.run_id)
        self._log_figures(run, loaded, cell.reused)
        refusal = self._log_artifacts(run.info.run_id, manifest, loaded)
        self._log_tags(
            run.info.run_id,
            {
                "evalq.artifacts": refusal or "complete",
                "evalq.gate_eligible": "true" if not refusal and loaded.record.status == "complete" else "false",
                "evalq.content": digest,
                "evalq.record_sha256": file_sha256(loaded.folder / RECORD_FILE),
            },
        )
        _, end = content.times_of(loaded.record)
        self._client.set_terminated(run.info.run_id, content.run_status(loaded.record), end)
        if refusal:
            return CellResult("refused", run.info.run_id, refusal)
        self._client.set_tag(run.info.run_id, "evalq.complete", "true")
        return CellResult("uploaded", run.info.run_id)

    def _cell_run(self, manifest: Manifest, cell: StudyCell, experiment: str, parent: str, record: Record) -> Any:
        wanted = (
            f"tags.`evalq.record_id` = {_quoted(cell.record_id)} and tags.`evalq.study` = {_quoted(manifest.study)}"
        )
        found = self._find(experiment, wanted)
        if found is not None:
            return found
        tags = _common_tags(manifest.study, self._owner) | {
            "mlflow.parentRunId": parent,
            "evalq.kind": "cell",
            "evalq.record_id": cell.record_id,
            "evalq.complete": "false",
        }
        start, _ = content.times_of(record)
        return self._create(experiment, wanted, start, tags, run_name_of(record))

    def _create(self, experiment: str, wanted: str, start: int, tags: dict[str, str], name: str) -> Any:
        """Make a run, and look again: another process, or the same request sent twice, may have made it too."""
        created = self._client.create_run(experiment, start, tags | {CREATED_TAG: str(time.time_ns())}, name)
        return self._find(experiment, wanted) or created

    def _log_figures(self, run: Any, loaded: _Loaded, reused: bool) -> None:
        from mlflow.entities import Metric, Param

        run_id = run.info.run_id
        metrics = content.metrics_of(loaded.record, loaded.verdict, loaded.estimates())
        stamp = content.milliseconds((loaded.verdict or loaded.record).created_at)
        logged = [Metric(name, value, stamp, 0) for name, value in metrics.values.items()]
        logged += system_metrics(read_samples(loaded.folder))
        logged += [Metric(*sensor) for sensor in content.system_metrics_of(loaded.folder)]
        for part in _parts(logged, 10 * BATCH):
            self._client.log_batch(run_id, metrics=part)
        params = content.params_of(loaded.record, loaded.config())
        new = [Param(name, value) for name, value in params.items() if name not in run.data.params]
        for part in _parts(new, BATCH):
            self._client.log_batch(run_id, params=part)
        self._log_tags(run_id, content.tags_of(loaded.record, loaded.verdict, reused, metrics))
        if not run.inputs.dataset_inputs:
            self._client.log_inputs(run_id, datasets_of(loaded.record))

    def _log_tags(self, run_id: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        for part in _parts([RunTag(name, value) for name, value in tags.items()], BATCH):
            self._client.log_batch(run_id, tags=part)

    def _log_artifacts(self, run_id: str, manifest: Manifest, loaded: _Loaded) -> str:
        """Upload the record's files; returns why they were refused, or nothing. Figures stay logged either way."""
        try:
            for file in content.artifact_files(loaded.folder):
                self._client.log_artifact(run_id, str(file), content.ARTIFACT_FOLDER)
            for name, table in self._differences(manifest, loaded).items():
                self._log_table(run_id, name, table)
            if loaded.record.status == "complete":
                card = model_card(loaded.record, loaded.verdict, loaded.estimates(), loaded.config() or {})
                self._client.log_text(run_id, card, CARD_FILE)
        except Exception as error:  # MLflow raises whatever its artifact store raises
            return f"the artifact store refused the files ({type(error).__name__}: {error})"[: content.TAG_LIMIT]
        return ""

    def _differences(self, manifest: Manifest, loaded: _Loaded) -> dict[str, dict[str, list[Any]]]:
        if loaded.verdict is None or loaded.verdict.baseline_id is None:
            return {}
        for cell in manifest.cells:
            if cell.record_id == loaded.verdict.baseline_id:
                return difference_tables(self.store.records / cell.folder, loaded.folder, loaded.record)
        return {}

    def _log_table(self, run_id: str, name: str, table: dict[str, list[Any]]) -> None:
        """Log a table as MLflow's own table artifact. Its log_table appends to what is there; this replaces it."""
        data = {"columns": list(table), "data": [list(row) for row in zip(*table.values(), strict=True)]}
        self._client.log_dict(run_id, data, name)
        logged = json.loads(self._client.get_run(run_id).data.tags.get("mlflow.loggedArtifacts", "[]"))
        entry = {"path": name, "type": "table"}
        if entry not in logged:
            self._client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps([*logged, entry]))

    def close_study(self, manifest: Manifest, parent: str, samples: Sequence[Sample] = ()) -> str:
        """Summary of the study on its parent run, then its end as the manifest has it; why it was refused, or nothing."""
        with self._alone():
            return again_when_locked(lambda: self._close_study(manifest, parent, samples))

    def _close_study(self, manifest: Manifest, parent: str, samples: Sequence[Sample]) -> str:
        from mlflow.entities import Metric

        rows = summary.rows_of(manifest, self.store.records)
        stamp = content.milliseconds(manifest.created_at)
        counts = summary.counts(rows)
        self._client.log_batch(parent, metrics=[Metric(f"study/{k}", v, stamp, 0) for k, v in counts.items()])
        for part in _parts(system_metrics(samples), 10 * BATCH):
            self._client.log_batch(parent, metrics=part)
        text = summary.markdown(rows)
        self._log_tags(parent, {"mlflow.note.content": text, "evalq.cells": str(len(rows))})
        refusal = ""
        try:
            with tempfile.TemporaryDirectory() as folder:
                summary.write(Path(folder), manifest.study, rows)
                self._client.log_artifacts(parent, folder, "study")
        except Exception as error:  # as in _log_artifacts
            refusal = f"the artifact store refused the summary ({type(error).__name__}: {error})"
        end = content.milliseconds(manifest.ended_at) if manifest.ended_at else None
        self._client.set_terminated(parent, manifest.status, end)
        return refusal

    def _find(self, experiment: str, wanted: str) -> Any:
        """The run that is meant; of several the first that was created, and the others are removed."""
        found = self._client.search_runs([experiment], wanted, max_results=BATCH)
        found = sorted(found, key=lambda run: (int(run.data.tags.get(CREATED_TAG, 0)), run.info.run_id))
        for double in found[1:]:
            self._remove(double.info.run_id)
        return found[0] if found else None

    def _remove(self, run_id: str) -> None:
        """Delete a double; whoever else made it may be deleting it at this moment too."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.delete_run(run_id)
        except MlflowException:
            if self._client.get_run(run_id).info.lifecycle_stage != "deleted":
                raise


@dataclass(frozen=True)
class _Loaded:
    folder: Path
    record: Record
    verdict: Verdict | None

    def estimates(self) -> list[Estimate]:
        return content.estimates_beside(self.folder, self.verdict)

    def config(self) -> dict[str, Any] | None:
        """The composed config beside the record; None when there is none or it is not a mapping."""
        try:
            data = yaml.safe_load((self.folder / content.CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):
            return None
        return data if isinstance(data, dict) else None


def _create_database(store: Store) -> None:
    """Make an empty sqlite store beside its place and move it there when it is whole.

    MLflow's first migration takes seconds, and a process killed inside it leaves a file that no later one can repair.
    """
    from mlflow import MlflowClient

    database = store.database
    if database is None or database.exists():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=database.parent, prefix=".new-store-") as folder:
        new = Path(folder) / "mlflow.db"
        MlflowClient(tracking_uri=f"sqlite:///{new}").search_experiments(max_results=1)
        os.replace(new, database)


def run_name_of(record: Record) -> str:
    """Short, and what tells runs of one experiment apart: the scheme, and the engine settings when they have a name."""
    cell = record.cell
    return cell.quant if cell.engine in ("", "default", cell.gpu) else f"{cell.quant}, {cell.engine}"


def _common_tags(study: str, owner: Owner) -> dict[str, str]:
    return {
        "evalq.study": study,
        "evalq.version": __version__,
        "evalq.host": owner.host,
        "evalq.pid": str(owner.pid),
        "evalq.process_started": f"{owner.started:.2f}",
        "evalq.pid_namespace": owner.namespace,
        "mlflow.user": _user(),
        "mlflow.source.name": f"evalq {__version__}",
        "mlflow.source.type": "JOB",
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def _owner_of(tags: dict[str, str]) -> Owner | None:
    try:
        return Owner(
            tags["evalq.host"],
            int(tags["evalq.pid"]),
            float(tags["evalq.process_started"]),
            tags["evalq.pid_namespace"],
        )
    except (KeyError, ValueError):
        return None


def _quoted(text: str) -> str:
    """Text as a literal of MLflow's search language, which has no escapes: whichever quote the text has not."""
    quote = "'" if "'" not in text else '"'
    if quote in text:
        raise MeasurementError(f"the name {text!r} holds both kinds of quotes, which MLflow cannot search for", "data")
    return f"{quote}{text}{quote}"


def _parts(items: list[T], size: int) -> list[list[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _pages(search: Callable[..., Any]) -> list[Any]:
    found: list[Any] = []
    token: str | None = None
    while True:
        page = search(page_token=token)
        found.extend(page)
        token = page.token
        if not token:
            return found


def again_when_locked(action: Callable[[], T], tries: int = 6) -> T:
    """Do `action`, again while sqlite says that another program (such as an open UI) is writing."""
    for attempt in range(tries):
        try:
            return action()
        except Exception as error:  # MLflow wraps sqlite's error in one of its own
            if "database is locked" not in str(error) or attempt == tries - 1:
                raise
            time.sleep(0.2 * 2**attempt)
    raise AssertionError("unreachable")
