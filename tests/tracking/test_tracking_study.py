"""The measuring side: it never waits for a server (case d5), and its end shows in MLflow however it ends (case d2)."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tracked_records as build

from evalq.config import PathsConfig, TrackingConfig
from evalq.records import read_record
from evalq.tracking import NullTracker, log_study, open_tracker
from evalq.tracking.child import Session
from evalq.tracking.manifest import PENDING_FILE, add_cell, manifests, open_manifest, read_manifest, read_pending
from evalq.tracking.store import Store, resolve_store
from evalq.tracking.study import LocalStudy, Outcome, names_of

PROCESSES = 8


@pytest.fixture
def silent_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def paths(root: Path) -> PathsConfig:
    return PathsConfig(root=str(root))


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "evalq.tracking.child" in " ".join(child.cmdline())]


def test_a_silent_server_costs_nothing_but_a_later_sync(tmp_path: Path, silent_port: int) -> None:
    """Case d5: it accepts and never answers."""
    said: list[str] = []
    config = TrackingConfig(uri=f"http://127.0.0.1:{silent_port}", timeout_seconds=0.5, finish_limit_seconds=20.0)
    tracker = open_tracker(config, paths(tmp_path), said.append)
    folders = build.write_study(tmp_path / "records")
    began = time.monotonic()
    study = tracker.start_study("smollm2-135m", "cpu", ["fp8-kv"])
    for folder in folders:
        study.log_cell(folder)
    assert time.monotonic() - began < 2.0, "the measurement does not wait"
    outcome = study.finish()
    assert (outcome.uploaded, outcome.pending) == (0, 4)
    assert outcome.seconds < 15.0
    assert any("did not answer within 0.5 s" in text for text in said)
    assert any("evalq sync" in text for text in said)
    for folder in folders:
        assert read_pending(folder)[0]["uri"] == config.uri
        assert (folder / "record.json").is_file()
    assert children() == []


def test_a_closed_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    tracker = open_tracker(TrackingConfig(uri=f"http://127.0.0.1:{port}"), paths(tmp_path))
    outcome = log_study(tracker, "smollm2-135m", "cpu", build.write_study(tmp_path / "records"))
    assert outcome.pending == 4
    assert outcome.seconds < 10.0
    assert "cannot be reached" in outcome.messages[0]


def test_a_server_that_falls_silent_later_is_left_alone(tmp_path: Path) -> None:
    """It answers the first question and then nothing: the hard limit ends the wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer_health_only, args=(server,), daemon=True).start()
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        config = TrackingConfig(uri=uri, timeout_seconds=30.0, finish_limit_seconds=3.0)
        folder = build.write(tmp_path / "records" / "baseline", build.record())
        outcome = log_study(open_tracker(config, paths(tmp_path)), "m", "cpu", [folder])
    assert outcome.seconds < 6.0
    assert outcome.pending == 1
    assert (folder / PENDING_FILE).is_file()
    assert children() == []


def _answer_health_only(server: socket.socket) -> None:
    kept = []
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        kept.append(connection)
        if connection.recv(65536).startswith(b"GET /health"):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nOK")
            connection.close()


def test_missing_mlflow_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said: list[str] = []
    tracker = open_tracker(TrackingConfig(), paths(tmp_path), said.append)
    assert isinstance(tracker, NullTracker)
    assert "pip install 'evalq[measure]'" in said[0]
    folder = build.write(tmp_path / "records" / "baseline", build.record())
    assert log_study(tracker, "m", "cpu", [folder]).pending == 1
    assert (folder / PENDING_FILE).is_file()


def test_off_writes_nothing(tmp_path: Path) -> None:
    tracker = open_tracker(TrackingConfig(enabled=False), paths(tmp_path))
    folder = build.write(tmp_path / "records" / "baseline", build.record())
    outcome = log_study(tracker, "m", "cpu", [folder])
    assert (outcome.where, outcome.pending) == ("MLflow: off", 0)
    assert not (folder / PENDING_FILE).exists()
    assert manifests(tmp_path / "records") == []


def test_names() -> None:
    study, experiment = names_of(TrackingConfig(), "m", "h200", ["a", "b", "c", "d", "e", "f"])
    assert experiment == "m on h200"
    assert study.startswith("a, b, c, d and 2 more 2")
    assert names_of(TrackingConfig(experiment="x", study="y"), "m", "h200", ["a"]) == ("y", "x")


class Recorded(list[dict[str, Any]]):
    def __call__(self, event: str, **fields: Any) -> None:
        self.append({"event": event, **fields})


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_a_study_ends_as_it_was_told(upload: Any, store: Store, records: Path, status: str) -> None:
    events = Recorded()
    session = Session(store, events)
    session._upload = upload
    session.open(open_manifest(store, records.name, "ends", "m", "cpu"))
    session.finish(status)
    run = upload._client.get_run(events[0]["run"])
    assert run.info.status == status
    assert events[-1] == {"event": "finished", "left": 0}


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED"), (None, "FINISHED")]
)
def test_the_with_block_says_how_it_ended(tmp_path: Path, error: type[BaseException] | None, status: str) -> None:
    """Case d2, seen from Python."""
    place = resolve_store(TrackingConfig(), paths(tmp_path))
    path = open_manifest(place, "s", "e", "m", "cpu")
    ending = pytest.raises(error) if error is not None else contextlib.nullcontext()
    with ending, LocalStudy(place, path, Outcome()):
        if error is not None:
            raise error
    assert read_manifest(path).status == status


SLEEPER = """
import sys, time
from evalq.config import PathsConfig, TrackingConfig
from evalq.tracking import open_tracker
config = TrackingConfig(study="cut short", experiment="cut")
study = open_tracker(config, PathsConfig(root=sys.argv[1])).start_study("m", "cpu", ["q"])
event = study._child.next_event(120.0)
print(event["event"], study._child.pid, flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_measurement_shows_as_killed(upload: Any, store: Store, number: signal.Signals) -> None:
    """Case d2: the process is gone without a word; its run says KILLED, and nothing is left behind."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPER, str(store.root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    word, child = process.stdout.readline().split()
    assert word == "opened"
    experiment = upload._client.get_experiment_by_name("cut").experiment_id
    os.kill(process.pid, number)
    process.wait()
    wait_until(lambda: not psutil.pid_exists(int(child)), 20.0)
    (run,) = upload._client.search_runs([experiment])
    assert run.info.status == "KILLED"


def wait_until(condition: Any, limit_seconds: float) -> None:
    deadline = time.monotonic() + limit_seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _one_of_eight(root: str, folder: str, barrier: Any, answers: Any) -> None:
    place, events = resolve_store(TrackingConfig(), paths(Path(root))), Recorded()
    path = open_manifest(place, "start together", "smollm2-135m on cpu", "smollm2-135m", "cpu", join=False)
    add_cell(path, place.records, Path(folder), read_record(Path(folder)), reused=True)
    session = Session(place, events)
    barrier.wait()
    session.open(path)
    session.finish("FINISHED")
    answers.put(events)


def test_eight_processes_on_an_empty_store(upload: Any, tmp_path: Path) -> None:
    """Case d3: eight real processes begin at once where there is no store yet. Forked, so that MLflow is there already."""
    import matplotlib.figure  # noqa: F401
    from mlflow import MlflowClient

    folder = build.write(tmp_path / "records" / "baseline", build.record())
    fork = multiprocessing.get_context("fork")
    barrier, answers = fork.Barrier(PROCESSES), fork.Queue()
    arguments = (str(tmp_path), str(folder), barrier, answers)
    processes = [fork.Process(target=_one_of_eight, args=arguments) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    all_events = [answers.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(30)
    kinds = [[event["event"] for event in events] for events in all_events]
    assert kinds == [["opened", "cell", "finished"]] * PROCESSES, all_events
    assert {events[0]["experiment"] for events in all_events} == {"1"}
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs(["1"])
    assert len(runs) == 2 * PROCESSES
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len({run.data.tags["evalq.study"] for run in runs}) == PROCESSES
    assert not (folder / PENDING_FILE).exists()
