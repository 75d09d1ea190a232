"""`evalq ui`: MLflow's web interface on evalq's own store, for this machine only."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any

from evalq.app import default_root
from evalq.errors import EXIT_PASS, ConfigError, MeasurementError, MissingExtraError
from evalq.tracking.process import child_environment, end_group
from evalq.tracking.store import ARTIFACTS_FOLDER

HOST = "127.0.0.1"
START_LIMIT_SECONDS = 120.0
PORTS_TRIED = 20
SERVER_ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_ENABLE_AI_GATEWAY": "false",
    "MLFLOW_ENABLE_ASSISTANT_SANDBOX": "true",  # the page's assistant may then start no program on this machine
}


def parser() -> argparse.ArgumentParser:
    """Options of `evalq ui`."""
    made = argparse.ArgumentParser(
        prog="evalq ui",
        description="Open MLflow's web interface on evalq's runs. It listens on 127.0.0.1 only; Ctrl-C ends it.",
    )
    made.add_argument(
        "--port", type=int, default=5000, help="first port to try (default: 5000; then the next free one)"
    )
    made.add_argument(
        "--root",
        type=Path,
        default=None,
        help="folder of evalq's output, as paths.root (default: $EVALQ_HOME, else runs)",
    )
    made.add_argument("--db", type=Path, default=None, help="sqlite file of the runs (default: ROOT/mlflow.db)")
    return made


def main(argv: list[str]) -> int:
    """Errors: EvalqError, for the dispatcher to print."""
    options = parser().parse_args(argv)
    if importlib.util.find_spec("mlflow") is None:
        raise MissingExtraError("evalq ui", "mlflow", "measure")
    database = (options.db or (options.root or default_root()) / "mlflow.db").absolute()
    if not database.is_file():
        raise ConfigError(
            f"there are no MLflow runs at {database}; run python -m evalq first, or name its folder with --root"
        )
    signal.signal(signal.SIGTERM, _interrupt)
    port = free_port(options.port)
    if port != options.port:
        print(f"port {options.port} is taken; using {port}")
    print(f"starting MLflow on {database} (about 10 seconds) ...", flush=True)
    server = start_server(database, port)
    try:
        wait_until_ours(server, port)
        for line in addresses(port):
            print(line, flush=True)
        print("Ctrl-C ends it", flush=True)
        server.wait()
        raise MeasurementError(f"MLflow's server ended by itself with code {server.returncode}; start evalq ui again")
    except KeyboardInterrupt:
        return EXIT_PASS
    finally:
        end_group(server)
        print("\nMLflow's pages are closed")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def free_port(first: int) -> int:
    """The first free port from `first` on. Errors: ConfigError when none of PORTS_TRIED is free or the number is none."""
    if not 1 <= first <= 65535:
        raise ConfigError(f"--port {first} is not a port; use 1024 to 65535")
    for port in range(first, min(first + PORTS_TRIED, 65536)):
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((HOST, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"ports {first} to {first + PORTS_TRIED - 1} are all taken; give another one with --port")


def start_server(database: Path, port: int) -> subprocess.Popen[bytes]:
    """Start MLflow's server in a process group of its own; it can read the artifacts beside the database."""
    artifacts = database.parent / ARTIFACTS_FOLDER
    command = [sys.executable, "-P", "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{database}", "--default-artifact-root", artifacts.as_uri()]
    return subprocess.Popen(
        command,
        cwd=database.parent,
        env=child_environment(10.0) | SERVER_ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_until_ours(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server answers, and make sure that it is this one and not another on the same port.

    Errors: MeasurementError.
    """
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise MeasurementError(
                f"MLflow's server did not start on port {port}; try evalq ui --port {port + 1}", "port"
            )
        if _answers(port) and _listens(server.pid, port):
            return
        time.sleep(0.3)
    raise MeasurementError(f"MLflow's server did not answer within {START_LIMIT_SECONDS:g} s; try again", "timeout")


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _listens(pid: int, port: int) -> bool:
    import psutil

    try:
        parent = psutil.Process(pid)
        sockets = [held for one in (parent, *parent.children(recursive=True)) for held in one.net_connections("tcp")]
    except psutil.Error:
        return False
    return any(held.status == psutil.CONN_LISTEN and held.laddr.port == port for held in sockets)


def addresses(port: int) -> list[str]:
    """Lines for people: the page of every experiment, and the comparison of its latest study's runs."""
    lines = [f"MLflow: http://{HOST}:{port}/"]
    try:
        experiments = _ask(port, "experiments/search", {"max_results": 1000}).get("experiments", [])
        for experiment in experiments:
            lines += _experiment_lines(port, experiment)
    except (OSError, ValueError, KeyError) as error:
        lines.append(f"(its experiments could not be listed: {error})")
    return lines


def _experiment_lines(port: int, experiment: dict[str, Any]) -> list[str]:
    number = experiment["experiment_id"]
    studies = _runs(port, number, "tags.`evalq.kind` = 'study'", 1)
    if not studies:
        return []
    parent = studies[0]["info"]["run_id"]
    cells = _runs(port, number, f"tags.`mlflow.parentRunId` = '{parent}'", 50)
    cells.sort(key=_baseline_first)
    lines = [f"{experiment['name']}: http://{HOST}:{port}/#/experiments/{number}/runs"]
    if len(cells) > 1:
        runs = urllib.parse.quote(json.dumps([run["info"]["run_id"] for run in cells], separators=(",", ":")))
        where = urllib.parse.quote(json.dumps([number]))
        address = f"http://{HOST}:{port}/#/compare-runs?runs={runs}&experiments={where}"
        lines.append(f"  compare the {len(cells)} cells of its latest study: {address}")
    return lines


def _baseline_first(run: dict[str, Any]) -> tuple[bool, float, str]:
    """Order of columns on the comparison page: the baseline, then by size of the weights, largest first."""
    tags = {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
    metrics = {metric["key"]: metric["value"] for metric in run["data"].get("metrics", [])}
    weights = float(metrics.get("memory/weight_bytes", 0.0))
    return tags.get("evalq.is_baseline") != "true", -weights, tags.get("evalq.quant", "")


def _runs(port: int, experiment: str, wanted: str, limit: int) -> list[dict[str, Any]]:
    body = {"experiment_ids": [experiment], "filter": wanted, "max_results": limit, "order_by": ["start_time DESC"]}
    found: list[dict[str, Any]] = _ask(port, "runs/search", body).get("runs", [])
    return found


def _ask(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://{HOST}:{port}/api/2.0/mlflow/{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20.0) as answer:
        data: dict[str, Any] = json.load(answer)
    return data
