"""One MLflow store for all tests of tracking that need it: MLflow's import and first migration take seconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evalq.config import PathsConfig, TrackingConfig
from evalq.tracking.store import Store, resolve_store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    pytest.importorskip("mlflow")
    root = tmp_path_factory.mktemp("tracked")
    return resolve_store(TrackingConfig(), PathsConfig(root=str(root)))


@pytest.fixture(scope="session")
def upload(store: Store):  # type: ignore[no-untyped-def]
    from evalq.tracking.process import child_environment

    quiet = child_environment(10.0)
    os.environ.update({key: quiet[key] for key in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "MLFLOW_LOGGING_LEVEL")})
    from evalq.tracking.upload import Upload

    return Upload(store)


@pytest.fixture
def records(store: Store, request: pytest.FixtureRequest) -> Path:
    return store.records / request.node.name.replace("[", "-").replace("]", "")
