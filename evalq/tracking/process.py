"""The measuring side's handle on the process that talks to MLflow: start, send, listen, and a hard end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import evalq
from evalq.tracking.manifest import STUDIES_FOLDER
from evalq.tracking.store import Store

LOG_FILE = "mlflow.log"


class ChildProcess:
    """A started `evalq.tracking.child`. `send` never blocks on MLflow; `next_event` waits no longer than told."""

    def __init__(self, store: Store) -> None:
        store.root.mkdir(parents=True, exist_ok=True)
        log = store.records / STUDIES_FOLDER / LOG_FILE
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "evalq.tracking.child", _as_json(store)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=store.root,  # MLflow makes folders where it stands
                env=child_environment(store.timeout_seconds),
                start_new_session=True,  # Ctrl-C is for the measuring process; it then ends this one
            )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=_listen, args=(self._process.stdout, self._events), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, **message: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # a child that died is seen by next_event
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def next_event(self, timeout_seconds: float) -> dict[str, Any] | None:
        """The next event; None when none came in time; {"event": "ended"} when the process is gone."""
        try:
            event = self._events.get(timeout=max(timeout_seconds, 0.0))
        except queue.Empty:
            return None
        return event if event is not None else {"event": "ended"}

    def end(self, patience_seconds: float = 2.0) -> None:
        """Close its input; kill it when it does not go by itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        end_group(self._process, patience_seconds=0.0)


def end_group(leader: subprocess.Popen[Any], patience_seconds: float = 5.0) -> None:
    """End a process and all of its group: asked first, then made to."""
    if patience_seconds > 0:
        _signal_group(leader.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(patience_seconds)
    _signal_group(leader.pid, signal.SIGKILL)
    leader.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _as_json(store: Store) -> str:
    return json.dumps(
        {
            "uri": store.uri,
            "root": str(store.root),
            "records": str(store.records),
            "artifacts": str(store.artifacts) if store.artifacts else None,
            "timeout_seconds": store.timeout_seconds,
        }
    )


def child_environment(timeout_seconds: float) -> dict[str, str]:
    """Environment of MLflow's processes: no telemetry, no chatter, short patience with servers, no GPU."""
    package_root = str(Path(evalq.__file__).parents[1])
    path = os.pathsep.join(part for part in (package_root, os.environ.get("PYTHONPATH", "")) if part)
    kept = {key: value for key, value in os.environ.items() if key not in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID")}
    return {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(max(1, round(timeout_seconds))),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        **kept,
        "PYTHONPATH": path,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "GIT_PYTHON_REFRESH": "quiet",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def _listen(stream: IO[str], events: queue.Queue[dict[str, Any] | None]) -> None:
    for line in stream:
        try:
            events.put(json.loads(line))
        except ValueError:
            continue
    events.put(None)
