"""Real MLflow servers: one with a login, and one over PostgreSQL that is killed while eight processes write to it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tracking"))
import tracked_records as build

from evalq.cli.fetch import fetch_record
from evalq.cli.ui import SERVER_ENVIRONMENT
from evalq.config import PathsConfig, TrackingConfig
from evalq.errors import RecordError
from evalq.records import read_record
from evalq.tracking import Outcome, log_study, open_tracker
from evalq.tracking.process import child_environment

pytestmark = pytest.mark.ui
REPOSITORY = Path(__file__).parents[2]
LOGIN = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "a-password-of-the-test"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that asks for a login."""
    if importlib.util.find_spec("flask_wtf") is None:
        pytest.skip("MLflow's login needs Flask-WTF; pip install Flask-WTF")
    folder = tmp_path_factory.mktemp("server")
    (folder / "auth.ini").write_text(
        "[mlflow]\ndefault_permission = READ\nauthorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        f"database_uri = sqlite:///{folder}/auth.db\nadmin_username = admin\n"
        f"admin_password = {LOGIN['MLFLOW_TRACKING_PASSWORD']}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts"), "--serve-artifacts"]
    extra = {"MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"), "MLFLOW_FLASK_SERVER_SECRET_KEY": "of the test"}
    environment = child_environment(10.0) | SERVER_ENVIRONMENT | extra
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=folder)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 300
    while not _answers(address):
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.3)
    yield address
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(30)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def upload(server: str, root: Path, folders: list[Path]) -> Outcome:
    config = TrackingConfig(uri=server, study="with a login", finish_limit_seconds=300)
    return log_study(open_tracker(config, PathsConfig(root=str(root))), "smollm2-135m", "cpu", folders)


def test_a_server_with_a_login(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nothing is lost; with it everything arrives, and the gate reads it back without the mlflow package."""
    for name in LOGIN:
        monkeypatch.delenv(name, raising=False)
    folders = build.write_study(tmp_path / "records")
    refused = upload(server, tmp_path, folders)
    assert (refused.uploaded, refused.pending) == (0, 4)
    assert "MLFLOW_TRACKING_USERNAME" in " ".join(refused.messages)
    for name, value in LOGIN.items():
        monkeypatch.setenv(name, value)
    done = upload(server, tmp_path, folders)
    assert (done.uploaded, done.messages) == (4, [])
    run_id = _runs(server, done.experiment_id or "", monkeypatch)["int8-w8a8"]
    (tmp_path / "fetched").mkdir()
    fetched = fetch_record(run_id, server, tmp_path / "fetched")
    assert read_record(fetched) == read_record(tmp_path / "records" / "int8-w8a8")
    assert (fetched / "documents.parquet").read_bytes() == (
        tmp_path / "records/int8-w8a8/documents.parquet"
    ).read_bytes()
    with pytest.raises(RecordError, match="no record in MLflow run"):
        fetch_record("f" * 32, server, tmp_path / "fetched")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong")
    with pytest.raises(RecordError, match="refused the login"):
        fetch_record(run_id, server, tmp_path / "fetched")


def _runs(server: str, experiment: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    from evalq.cli import fetch

    request = urllib.request.Request(
        f"{server}/api/2.0/mlflow/runs/search",
        data=json.dumps({"experiment_ids": [experiment], "filter": "tags.`evalq.kind` = 'cell'"}).encode(),
        headers={"Content-Type": "application/json", **fetch._login()},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return {run["info"]["run_name"]: run["info"]["run_id"] for run in json.load(answer)["runs"]}


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_eight_writers_and_a_server_that_is_killed(store: str) -> None:
    """jobs/bench/mlflow_writers.py, shorter: each run complete, none double, also after the server was away."""
    if store == "postgres" and not list(Path("/usr/lib/postgresql").glob("*/bin")):
        pytest.skip("PostgreSQL is not installed; Debian: apt-get install postgresql")
    if store == "postgres" and importlib.util.find_spec("psycopg2") is None:
        pytest.skip("needs psycopg2; pip install psycopg2-binary")
    command = [
        sys.executable,
        str(REPOSITORY / "jobs/bench/mlflow_writers.py"),
        store,
        "--writers",
        "8",
        "--cells",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["cells_whole"], answer["studies"], answer["doubles"]) == (16, 8, 0)
