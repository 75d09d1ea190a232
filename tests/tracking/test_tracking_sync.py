"""`evalq sync`: what a closed server left behind is uploaded later, once (case d5)."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import tracked_records as build

from evalq.cli import sync as command
from evalq.config import PathsConfig, TrackingConfig
from evalq.errors import ConfigError, RecordError
from evalq.tracking import log_study, open_tracker
from evalq.tracking.manifest import PENDING_FILE, end_manifest, open_manifest, read_pending
from evalq.tracking.store import store_at


def test_what_is_missing_is_uploaded_once(upload: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow import MlflowClient

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = TrackingConfig(uri=f"http://127.0.0.1:{port}", study="first try", timeout_seconds=1.0)
    folders = build.write_study(tmp_path / "records")
    tracker = open_tracker(config, PathsConfig(root=str(tmp_path)))
    assert log_study(tracker, "smollm2-135m", "cpu", folders[:2]).pending == 2
    loose = folders[2:]  # measured with tracking off

    assert command.main(["--root", str(tmp_path), "--timeout", "1"]) == 5, "the server is still closed"
    assert "does not take runs now" in capsys.readouterr().err
    target = f"sqlite:///{tmp_path}/mlflow.db"
    assert command.main(["--root", str(tmp_path), "--uri", target]) == 0
    assert "2 uploaded, 2 there already, 0 left" in capsys.readouterr().out
    assert command.main(["--root", str(tmp_path), "--uri", target]) == 0
    assert "0 uploaded, 4 there already, 0 left" in capsys.readouterr().out

    client = MlflowClient(target)
    runs = client.search_runs(["1"], "tags.`evalq.kind` = 'cell'")
    assert sorted(run.data.tags["evalq.quant"] for run in runs) == ["baseline", "fp8-kv", "int8-w8a8", "mixed-4-8"]
    assert all(run.data.tags["evalq.complete"] == "true" for run in runs)
    parents = client.search_runs(["1"], "tags.`evalq.kind` = 'study'")
    assert {run.info.run_name: run.info.status for run in parents}["first try"] == "FINISHED"
    assert read_pending(folders[0])[0]["uri"] == config.uri, "the server it was meant for still lacks it"
    assert not (loose[0] / PENDING_FILE).exists()


def test_a_password_is_asked_for_again(tmp_path: Path) -> None:
    store = store_at("postgresql://me:secret@127.0.0.1:1/runs", tmp_path, tmp_path / "records", 1.0)
    end_manifest(open_manifest(store, "s", "e", "m", "cpu"), "FINISHED")
    with pytest.raises(ConfigError, match="give the address with --uri"):
        command.main(["--root", str(tmp_path)])


def test_no_records_folder(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="there is no records folder"):
        command.main(["--root", str(tmp_path / "none")])
