"""Registering a checkpoint that passed as a model version in MLflow, with its verdict as tags. mlflow is imported when used."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evalq.errors import ConfigError, MeasurementError, RecordError
from evalq.records import RECORD_FILE, CheckpointId, Record, Verdict, file_sha256
from evalq.tracking import content
from evalq.tracking.card import CARD_FILE
from evalq.tracking.store import Store, file_lock, redact

ALIAS = "release-candidate"
FOLDER = "checkpoint"
IDENTITY_FILE = "checkpoint.json"
LOCK_FILE = ".promote.lock"


@dataclass(frozen=True)
class Promotion:
    """What is to be registered. `files`: the checkpoint's folder where its bytes are to be uploaded, else None."""

    name: str
    alias: str
    record: Record
    folder: Path
    verdict: Verdict
    checkpoint: CheckpointId
    files: Path | None


@dataclass(frozen=True)
class Promoted:
    """Where it is now; `fresh` is False for a checkpoint and record that had a version already."""

    version: str
    run_id: str
    fresh: bool


def promote(store: Store, wanted: Promotion) -> Promoted:
    """Register the checkpoint and set the alias; the same record and checkpoint again get the same version.

    Errors: ConfigError for anything but a PASS; RecordError when MLflow does not hold this very record whole;
    MeasurementError when the store fails.
    """
    if wanted.verdict.status != "PASS" or wanted.verdict.exit_code != 0:
        raise ConfigError(f"only a PASS is promoted and this is {wanted.verdict.status}: {wanted.verdict.summary}")
    with file_lock(store.root / LOCK_FILE):
        try:
            return _promote(store, wanted)
        except (ConfigError, RecordError):
            raise
        except Exception as error:  # MLflow raises whatever its store raises
            reason = " ".join(str(error).split())[:300]
            raise MeasurementError(
                f"MLflow at {redact(store.uri)} did not take the model version ({type(error).__name__}: {reason}); "
                "the alias was not moved; try again"
            ) from error


def _promote(store: Store, wanted: Promotion) -> Promoted:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store.mlflow_uri, registry_uri=store.mlflow_uri)
    run = _run_of(client, wanted)
    tags = version_tags(wanted)
    version = _known_version(client, wanted.name, tags)
    fresh = version is None
    if version is None:
        _upload(client, run.info.run_id, wanted)
        _ensure_model(client, wanted)
        version = client.create_model_version(
            wanted.name,
            f"{run.info.artifact_uri}/{FOLDER}",
            run_id=run.info.run_id,
            tags=tags,
            description=_card(client, run),
        ).version
    for key, value in tags.items():  # a version that was there may have been judged by another policy
        client.set_model_version_tag(wanted.name, version, key, value)
    client.set_registered_model_alias(wanted.name, wanted.alias, version)  # last: the alias never names half a version
    return Promoted(str(version), run.info.run_id, fresh)


def _run_of(client: Any, wanted: Promotion) -> Any:
    """The newest whole run of this very record. Errors: RecordError."""
    digest = file_sha256(wanted.folder / RECORD_FILE)
    numbers = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(
        numbers,
        f"tags.`evalq.record_sha256` = '{digest}' and tags.`evalq.kind` = 'cell'",
        order_by=["attributes.start_time DESC"],
    )
    whole = [
        run
        for run in found
        if run.data.tags.get("evalq.complete") == run.data.tags.get("evalq.gate_eligible") == "true"
    ]
    if not whole:
        state = "not whole there (its files were refused or the upload was cut short)" if found else "not there"
        raise RecordError(
            f"MLflow has no run of record {wanted.record.record_id} to register from: {state}; run evalq sync first"
        )
    return whole[0]


def version_tags(wanted: Promotion) -> dict[str, str]:
    """The verdict and what it rests on, as tags of the model version."""
    verdict, cell = wanted.verdict, wanted.record.cell
    tags = {
        "evalq.verdict": "PASS with a warning" if verdict.warning else verdict.status,
        "evalq.summary": verdict.summary,
        "evalq.record_id": wanted.record.record_id,
        "evalq.baseline_id": str(verdict.baseline_id),
        "evalq.judged_at": verdict.created_at,
        "evalq.version": verdict.evalq_version,
        "evalq.model": cell.model,
        "evalq.quant": cell.quant,
        "evalq.gpu": cell.gpu,
        "evalq.checkpoint_location": wanted.checkpoint.location,
        "evalq.checkpoint_sha256": wanted.checkpoint.weights_sha256,
        "evalq.policy": json.dumps(verdict.policy, ensure_ascii=False),
        **{f"evalq.{name}": value for name, value in verdict.inputs.items()},
    }
    if verdict.allowed_differences:
        tags["evalq.allowed_differences"] = "; ".join(verdict.allowed_differences)
    for check in verdict.checks:
        if check.required and check.estimate is not None and check.estimate.value is not None:
            name, scale = content.estimate_metric(check.estimate.name)
            for suffix, value in (
                ("", check.estimate.value),
                ("_low", check.estimate.low),
                ("_high", check.estimate.high),
            ):
                if value is not None:
                    tags[f"evalq.{name.replace('/', '.')}{suffix}"] = f"{value * scale:.6g}"
    return {key: value[: content.TAG_LIMIT] for key, value in tags.items()}


def _known_version(client: Any, name: str, tags: dict[str, str]) -> str | None:
    same = ("evalq.candidate_sha256", "evalq.checkpoint_sha256")
    for version in client.search_model_versions(f"name = '{name}'"):
        if all(version.tags.get(key) == tags.get(key) for key in same) and version.status == "READY":
            return str(version.version)
    return None


def _ensure_model(client: Any, wanted: Promotion) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(
            wanted.name,
            tags={"evalq.model": wanted.record.cell.model},
            description="Checkpoints that passed evalq's gate.",
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _upload(client: Any, run_id: str, wanted: Promotion) -> None:
    """What the version's source holds: the checkpoint's identity, and its files where they are to travel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / IDENTITY_FILE
        file.write_text(json.dumps(asdict(wanted.checkpoint), indent=1) + "\n", encoding="utf-8")
        client.log_artifact(run_id, str(file), FOLDER)
    if wanted.files is not None:
        client.log_artifacts(run_id, str(wanted.files), FOLDER)


def _card(client: Any, run: Any) -> str:
    """The run's model card, for the version's page; its front matter is for files."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            text = Path(client.download_artifacts(run.info.run_id, CARD_FILE, folder)).read_text(encoding="utf-8")
        except Exception:  # an older run has none
            return ""
    return text.split("---", 2)[-1].strip()[:5000]
