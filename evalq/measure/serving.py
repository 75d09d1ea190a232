"""`vllm serve` in a process of its own: the engine as it is shipped, with its HTTP server, scheduler process and default runner.

The port is chosen free and may be taken before the server binds it: then another is chosen. The served model's name is a secret of
this run, so whoever answers with that name is our server and no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evalq.config import RunConfig
from evalq.errors import EvalqError, MeasurementError
from evalq.measure.engine import engine_arguments, own_cores
from evalq.measure.failures import classify
from evalq.measure.http import get_text, post

HOST = "127.0.0.1"
PORT_TRIES = 4
POLL_SECONDS = 0.25
STOP_SECONDS = 20.0
# What `vllm serve` starts. The command itself asks for the version of a distribution called vllm, which the CPU build is not.
# -P: files of the current folder are no modules.
SERVE = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server")
TAKEN = re.compile(r"address already in use|errno 98", re.IGNORECASE)
# Set by the scoring start for its hook; a server runs as it would without evalq.
SCORING_ONLY = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_WORKER_MULTIPROC_METHOD")
IN_PROCESS_ONLY = ("disable_log_stats",)
Progress = Callable[[int, int, str], None]


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def serve_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of vllm.LLM as those of `vllm serve`."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if name in IN_PROCESS_ONLY or value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict | list):
            flags += [f"--{flag}", json.dumps(value)]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def serve_environment(config: RunConfig, is_cpu: bool, caches: Path | None) -> dict[str, str]:
    """The server's environment: this process's, without what the scoring start sets for itself."""
    environment = {name: value for name, value in os.environ.items() if name not in SCORING_ONLY}
    environment |= {
        "VLLM_SERVER_DEV_MODE": "1",  # its own questions: resetting caches, asking the workers
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if is_cpu:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(config.gpu.cpu_kv_cache_gib)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = config.gpu.cpu_threads or own_cores()
    if caches is not None:
        names = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
        environment |= {name: str(caches / name.lower()) for name in names}
    return {**environment, **config.engine.env}


class Served:
    """A running server. `start` may take minutes; `close` ends it."""

    scorer = "none"
    scorer_note = ""

    def __init__(self, process: subprocess.Popen[bytes], port: int, name: str, start_seconds: float, log: Path) -> None:
        self._process = process
        self._log = log
        self.name = name
        self.base_url = f"http://{HOST}:{port}"
        self.port = port
        self.start_seconds = start_seconds
        self.start_kind = "unknown"
        self.earlier_starts: dict[str, float] = {}  # kind -> seconds of starts before this one
        self.sender: Any = None  # serving_load.LoadClient, started with the server
        self._said: dict[str, Any] = {}

    @classmethod
    def start(
        cls,
        config: RunConfig,
        checkpoint: Path,
        length: int,
        is_cpu: bool,
        log: Path,
        secret: str,
        alive: Callable[[], None] = lambda: None,
        caches: Path | None = None,
        command: Sequence[str] = SERVE,
    ) -> Served:
        """Start `vllm serve` on `checkpoint`, for requests of up to `length` tokens.

        alive is called while it starts. Errors: MeasurementError or InfeasibleError with the engine's cause in one sentence.
        """
        arguments = engine_arguments(config, checkpoint, length, is_cpu)
        flags = serve_flags(arguments)
        environment = serve_environment(config, is_cpu, caches)
        for attempt in range(PORT_TRIES):
            port, name = free_port(), f"evalq-{secret[:12]}-{attempt}"
            own = ["--host", HOST, "--port", str(port), "--served-model-name", name, "--uvicorn-log-level", "warning"]
            mark = log.stat().st_size if log.is_file() else 0
            server = _launch([*command, *flags, *own], environment, log, port, name)
            if server._await_answer(config.engine.start_timeout_seconds, alive, mark):
                server.start_kind = start_kind(_tail(log, mark), config.engine.enforce_eager)
                return server
        raise MeasurementError(
            f"{PORT_TRIES} free ports were taken by other programs before the server could bind them; run it again",
            "port",
        )

    def _await_answer(self, limit_seconds: float, alive: Callable[[], None], mark: int) -> bool:
        """True when our server answers; False when its port was taken; raises when it fails for another reason."""
        began = time.monotonic()
        while time.monotonic() - began < limit_seconds:
            ended = self._process.poll() is not None
            if ended:
                text = _tail(self._log, mark)
                if TAKEN.search(text):
                    return False
                raise _failure(text, self._process.returncode)
            with contextlib.suppress(OSError, ValueError):
                get_text(f"{self.base_url}/health", 5.0)
                if not self._is_ours():
                    self.close()
                    return False
                self.start_seconds = time.monotonic() - began
                return True
            alive()
            time.sleep(POLL_SECONDS)
        self.close()
        raise MeasurementError(
            f"the server did not answer within {limit_seconds:g} s; read engine.log, or raise engine.start_timeout_seconds",
            "timeout",
        )

    def _is_ours(self) -> bool:
        """Whether who answers serves the secret name of this run."""
        models = json.loads(get_text(f"{self.base_url}/v1/models", 10.0))
        return any(model.get("id") == self.name for model in models.get("data", []))

    def describe(self) -> list[dict[str, Any]]:
        """What each worker says was loaded (see probe.EngineProbe.evalq_describe), one entry per rank."""
        return [json.loads(answer) for answer in self.ask_workers("evalq_describe")]

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """The engine's own effective settings, read back from its workers."""
        return {**self._facts()["settings"], "scorer": self.scorer, "scorer_version": None}

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model knows."""
        return int(self._facts()["vocabulary"])

    @property
    def runner(self) -> str:
        """Module of the model runner that the server chose."""
        return str(self._facts()["runner"])

    def _facts(self) -> dict[str, Any]:
        if not self._said:
            self._said = json.loads(self.ask_workers("evalq_settings")[0])
        return self._said

    def ask_workers(self, method: str) -> list[Any]:
        """The answers of every rank to one of the probe's methods, as text. Errors: MeasurementError."""
        try:
            answer = json.loads(post(f"{self.base_url}/collective_rpc", {"method": method}))
        except (OSError, ValueError) as error:
            raise MeasurementError(
                f"the server does not answer {method}: {error}; read engine.log in the record folder", "engine"
            ) from error
        return list(answer["results"])

    def require_alive(self) -> None:
        """Errors: MeasurementError when the server has ended."""
        if self._process.poll() is not None:
            raise _failure(_tail(self._log, 0), self._process.returncode)

    def close(self) -> None:
        """End the server and wait until it is gone; whatever it leaves behind is ended with the worker's family."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _launch(command: list[str], environment: dict[str, str], log: Path, port: int, name: str) -> Served:
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
    return Served(process, port, name, 0.0, log)


def _tail(log: Path, mark: int, limit: int = 200_000) -> str:
    """What the log holds behind byte `mark`, at most the last `limit` bytes."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(mark, size - limit))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


ERROR_LINE = re.compile(r"^(?:\S+ .*?\] )?\s*((?:[a-z_]+\.)*[A-Za-z_]*(?:Error|Exception|Interrupt)): (.+)$")


def _failure(text: str, returncode: int | None) -> EvalqError:
    """The error of a server that ended, from the last error its log names."""
    found = [match for line in text.splitlines() if (match := ERROR_LINE.match(line))]
    causes = [m for m in found if "Engine core initialization failed" not in m[2] and "See root cause" not in m[2]]
    last = (causes or found)[-1] if found else None
    message = f"{last[1]}: {last[2]}" if last else f"vllm serve ended with exit code {returncode}"
    return classify(RuntimeError(message), "start")


def start_kind(log: str, eager: bool) -> str:
    """ "eager" (nothing is compiled), "warm" (compiled graphs came from a cache), "cold" (they were made), else "unknown"."""
    if eager:
        return "eager"
    if re.search(r"[Dd]irectly load(?:ed)? (?:the |AOT )?compil", log):
        return "warm"
    if re.search(r"torch\.compile takes|Compiling a graph|Dynamo bytecode transform time", log):
        return "cold"
    return "unknown"
