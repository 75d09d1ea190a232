"""Many writers on one MLflow store, and a server that is killed in the middle: is every run there, whole, and once?

    python jobs/bench/mlflow_writers.py sqlite
    python jobs/bench/mlflow_writers.py postgres     # Debian: apt-get install postgresql; pip install psycopg2-binary

Each writer is a process with a study of its own that hands over records as a sweep does. With postgres they write to an
`mlflow server` over PostgreSQL, which is killed (SIGKILL, its whole group) while they write and started again on the same
database; then two `evalq sync` run at once, and a third one. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "tracking")]
from evalq.cli.ui import SERVER_ENVIRONMENT  # noqa: E402
from evalq.tracking.process import child_environment  # noqa: E402

LIMIT_SECONDS = 600.0
KILL_AFTER_CELLS = 0.25  # share of all cells that are whole in MLflow when the server is killed
AWAY_SECONDS = 3.0


def main() -> int:
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that database and server are ended too
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="evalq-writers-") as name:
        folder = Path(name)
        with _store(arguments.store, folder) as server:
            pending = _write(folder, server, arguments)
            codes = [_sync(folder, server.uri, times) for times in (2, 1)]
            found = _look(server.uri)
    answer = _judge(found, arguments, pending, codes) | {"seconds": round(time.monotonic() - began, 1)}
    for key, value in answer.items():
        print(f"{key:>20}  {value}")
    print(json.dumps(answer))
    return 0 if answer["complete_and_once"] else 1


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("store", choices=("sqlite", "postgres"))
    made.add_argument("--writers", type=int, default=8)
    made.add_argument("--cells", type=int, default=4, help="of each writer")
    made.add_argument("--pause", type=float, default=3.0, help="seconds between cells")
    return made


class Server:
    """Where runs go; `restart` exists for a server only."""

    def __init__(self, uri: str, command: list[str] | None = None, log: Path | None = None) -> None:
        self.uri, self._command, self._log = uri, command, log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def can_be_killed(self) -> bool:
        return self._command is not None

    def start(self) -> None:
        assert self._command is not None
        assert self._log is not None
        with open(self._log, "ab") as log:
            environment = child_environment(10.0) | SERVER_ENVIRONMENT
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        _wait(self._is_up, f"{self.uri}")

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._log is not None
        if self._process.poll() is not None:
            raise SystemExit(f"mlflow server ended by itself:\n{self._log.read_text()[-2000:]}")
        return _answers(self.uri)

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def _store(kind: str, folder: Path) -> Iterator[Server]:
    if kind == "sqlite":
        yield Server(f"sqlite:///{folder / 'mlflow.db'}")
        return
    with _postgres(folder / "pg") as database:
        port = _free_port()
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--workers",
            "2",
        ]
        command += [
            "--backend-store-uri",
            database,
            "--artifacts-destination",
            str(folder / "artifacts"),
            "--serve-artifacts",
        ]
        server = Server(f"http://127.0.0.1:{port}", command, folder / "server.log")
        try:
            server.start()
            yield server
        finally:
            server.kill()


@contextlib.contextmanager
def _postgres(folder: Path) -> Iterator[str]:
    """A PostgreSQL of our own from Debian's package, on a free port; it refuses to run as root, so another user does."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        raise SystemExit("PostgreSQL is not installed; Debian: apt-get install postgresql")
    folder.mkdir()
    folder.parent.chmod(0o755)
    as_user: list[str] = []
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]
    port = _free_port()
    control = [*as_user, str(programs[-1] / "pg_ctl"), "-D", str(folder / "data"), "-w"]
    run = {"check": True, "stdout": subprocess.DEVNULL, "cwd": folder}
    subprocess.run(
        [*as_user, str(programs[-1] / "initdb"), "-D", str(folder / "data"), "-A", "trust", "-U", "evalq"], **run
    )  # type: ignore[call-overload]
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    subprocess.run([*control, "-l", str(folder / "log"), "-o", options, "start"], **run)  # type: ignore[call-overload]
    try:
        yield f"postgresql+psycopg2://evalq@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], **run)  # type: ignore[call-overload]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _answers(uri: str) -> bool:
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _wait(condition: Any, what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"gave up waiting for {what}")
        time.sleep(0.2)


def _write(folder: Path, server: Server, arguments: argparse.Namespace) -> int:
    """Run the writers, and the accident in the middle; returns how many records were not whole in MLflow when they ended."""
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    writers = [
        spawn.Process(target=_one_writer, args=(n, str(folder), server.uri, arguments.cells, arguments.pause, answers))
        for n in range(arguments.writers)
    ]
    for writer in writers:
        writer.start()
    if server.can_be_killed:
        enough = max(1, int(KILL_AFTER_CELLS * arguments.writers * arguments.cells))
        _wait(lambda: _uploaded(folder) >= enough, "the first records to arrive")
        server.kill()
        time.sleep(AWAY_SECONDS)
        server.start()
    pending = sum(answers.get(timeout=LIMIT_SECONDS) for _ in writers)
    for writer in writers:
        writer.join(30)
    return int(pending)


def _uploaded(folder: Path) -> int:
    """Records that MLflow has taken: their marker is gone."""
    return sum(not (file.parent / "sync_pending").exists() for file in folder.glob("records/*/config.yaml"))


def _one_writer(number: int, root: str, uri: str, cells: int, pause: float, answers: Any) -> None:
    import tracked_records as build

    from evalq.config import PathsConfig, TrackingConfig
    from evalq.tracking import open_tracker

    config = TrackingConfig(uri=uri, study=f"writer {number}", timeout_seconds=5.0, finish_limit_seconds=120.0)
    study = open_tracker(config, PathsConfig(root=root)).start_study("smollm2-135m", "cpu", ["x"])
    for cell in range(cells):
        made = build.record("baseline" if cell == 0 else "int8-w8a8", record_id=f"w{number}-c{cell}")
        made = replace(made, notes=[f"writer {number}"])
        verdict = None if cell == 0 else replace(build.verdict(made), baseline_id=f"w{number}-c0")
        study.log_cell(build.write(Path(root) / "records" / made.record_id, made, verdict))
        time.sleep(pause)
    answers.put(study.finish().pending)


def _sync(folder: Path, uri: str, at_once: int) -> list[int]:
    """`evalq sync`, so many of them at the same moment; their exit codes."""
    command = [sys.executable, "-m", "evalq", "sync", "--root", str(folder), "--uri", uri]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) for _ in range(at_once)]
    for process in running:
        out, _ = process.communicate(timeout=LIMIT_SECONDS)
        print(out.splitlines()[-1] if out else "sync said nothing", file=sys.stderr)
    return [process.returncode for process in running]


def _look(uri: str) -> list[dict[str, Any]]:
    """Every run of the store: kind, study, record, states, and how many files it has."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    numbers = [experiment.experiment_id for experiment in client.search_experiments()]
    found = []
    for run in client.search_runs(numbers, max_results=10_000):
        tags = run.data.tags
        files = client.list_artifacts(run.info.run_id, "record") if tags.get("evalq.kind") == "cell" else []
        entry = {key: tags.get(f"evalq.{key}") for key in ("kind", "study", "record_id", "complete")}
        found.append(entry | {"status": run.info.status, "files": len(files), "metrics": len(run.data.metrics)})
    return found


def _judge(
    found: list[dict[str, Any]], arguments: argparse.Namespace, pending: int, codes: list[list[int]]
) -> dict[str, Any]:
    cells = [run for run in found if run["kind"] == "cell"]
    studies = [run for run in found if run["kind"] == "study"]
    doubles = [key for key, times in Counter((run["study"], run["record_id"]) for run in found).items() if times > 1]
    whole = [
        r
        for r in cells
        if r["complete"] == "true" and r["status"] == "FINISHED" and r["files"] >= 5 and r["metrics"] > 10
    ]
    wanted = arguments.writers * arguments.cells
    good = len(cells) == len(whole) == wanted and len(studies) == arguments.writers and not doubles
    good = (
        good
        and all(run["status"] == "FINISHED" for run in studies)
        and all(code == 0 for call in codes for code in call)
    )
    return {
        "store": arguments.store,
        "writers": arguments.writers,
        "cells_wanted": wanted,
        "cells": len(cells),
        "cells_whole": len(whole),
        "studies": len(studies),
        "doubles": len(doubles),
        "pending_before_sync": pending,
        "sync_exit_codes": codes,
        "complete_and_once": good,
    }


if __name__ == "__main__":
    sys.exit(main())
