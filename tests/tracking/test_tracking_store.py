"""Addresses, passwords, and servers that do not answer (case d5)."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalq.config import PathsConfig, TrackingConfig
from evalq.errors import ConfigError, MeasurementError
from evalq.tracking.store import file_lock, redact, resolve_store, slug, store_at, why_unreachable


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_default_store_is_under_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case d4: neither an old mlruns folder nor MLflow's own variable decides."""
    (tmp_path / "mlruns").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    store = resolve_store(TrackingConfig(), PathsConfig(root=str(tmp_path / "runs")))
    assert store.uri == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert store.artifacts == tmp_path / "runs/mlartifacts"
    assert store.where == f"MLflow: sqlite:///{tmp_path}/runs/mlflow.db, artifacts in {tmp_path}/runs/mlartifacts"


def test_relative_sqlite_file_is_taken_from_the_root(tmp_path: Path) -> None:
    store = store_at("sqlite:///a.db", tmp_path, tmp_path / "records", 1.0)
    assert store.database == tmp_path / "a.db"
    assert store.mlflow_uri == f"sqlite:///{tmp_path}/a.db?timeout=60"


@pytest.mark.parametrize("uri", ["mlruns", "./mlruns", "file:///x", "sqlite://", "http://", "ftp://host/x", ""])
def test_other_addresses_are_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed: sqlite"):
        store_at(uri, tmp_path, tmp_path, 1.0)


def test_passwords_are_neither_taken_nor_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        store_at("https://me:secret@host", tmp_path, tmp_path, 1.0)
    assert "secret" not in str(caught.value)
    assert redact("postgresql://me:secret@host:5432/runs") == "postgresql://me:***@host:5432/runs"
    assert redact("http://host:5000") == "http://host:5000"


def test_closed_port_is_seen_at_once(closed_port: int) -> None:
    reason = why_unreachable(f"http://127.0.0.1:{closed_port}", 5.0)
    assert reason is not None
    assert "cannot be reached" in reason


def test_server_that_never_answers_costs_the_limit_and_no_more(silent_port: int) -> None:
    began = time.monotonic()
    reason = why_unreachable(f"http://127.0.0.1:{silent_port}", 0.4)
    assert reason == f"http://127.0.0.1:{silent_port} did not answer within 0.4 s"
    assert time.monotonic() - began < 2.0


def test_database_server_that_is_down(closed_port: int) -> None:
    reason = why_unreachable(f"postgresql://me:secret@127.0.0.1:{closed_port}/runs", 1.0)
    assert reason is not None
    assert "secret" not in reason


def test_any_answer_counts() -> None:
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, *args: object) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert why_unreachable(f"http://127.0.0.1:{server.server_port}", 2.0) is None
    server.shutdown()


def test_lock_has_a_limit(tmp_path: Path) -> None:
    with file_lock(tmp_path / "x.lock"), pytest.raises(MeasurementError, match="held by another"):  # noqa: SIM117
        with file_lock(tmp_path / "x.lock", limit_seconds=0.1):
            pass
    with file_lock(tmp_path / "x.lock", limit_seconds=0.1):
        pass


def test_slug() -> None:
    assert slug("smollm2 on cpu / x") == "smollm2-on-cpu-x"
    assert slug("../..") == "unnamed"
