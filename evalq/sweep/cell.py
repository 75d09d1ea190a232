"""One measurement in a process of its own, on this machine or as a Ray task.

`python -m evalq.sweep.cell` reads a Request (one line of JSON) from its standard input, answers in lines of JSON on its
standard output, and ends when its standard input does: whoever asked is gone then. It starts the engine's worker from its main
thread: the system kills a child when the thread that started it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import evalq
from evalq.config import RunConfig
from evalq.errors import EXIT_INTERRUPTED, ConfigError, MeasurementError
from evalq.load_stage import measure_with_load
from evalq.measure.launch import WORKER
from evalq.measure.worker import die_with_parent
from evalq.pipeline import identify
from evalq.preparation import prepare
from evalq.records import from_mapping
from evalq.report.live import tail
from evalq.report.progress import QuietWatcher
from evalq.sweep.jobs import failure_folder, known_error
from evalq.tracking.manifest import this_process

CELL = (sys.executable, "-P", "-m", "evalq.sweep.cell")
LINE_EVERY_SECONDS = 2.0


@dataclass(frozen=True)
class Request:
    """What to measure. `known`: reuse key -> id of a record that the asking side has already and would take."""

    config: dict[str, Any]
    version: str
    since: float | None = None
    hint: str = ""
    known: dict[str, str] = field(default_factory=dict)
    root: str | None = None  # the store on this machine, where it is not that of the asking side
    command: list[str] = field(default_factory=lambda: list(WORKER))


class Relay(QuietWatcher):
    """Tells the asking side what happens, and now and then the last line of the engine's log."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._last_line = 0.0
        self.log_file: Path | None = None

    def send(self, event: str, **values: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._stream.write(json.dumps({"event": event, **values}) + "\n")
            self._stream.flush()

    def stage(self, stage: str, label: str) -> None:
        self.send("stage", stage=stage, label=label)

    def progress(self, done: int, total: int, unit: str) -> None:
        self.send("progress", done=done, total=total, unit=unit)
        now = time.monotonic()
        if self.log_file is not None and now - self._last_line > LINE_EVERY_SECONDS:
            self._last_line = now
            self.send("line", text=tail(self.log_file))

    def scored(self, group: str, metrics: dict[str, Any]) -> None:
        self.send("scored", group=group, metrics=metrics)

    def say(self, text: str) -> None:
        self.send("say", text=text)


def main() -> int:
    """Measure what the first line of standard input asks for. The exit code says nothing: the last event does."""
    die_with_parent()
    signal.signal(signal.SIGTERM, _stop)
    relay = Relay(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # what libraries print is no event
    text = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_the_asking_side, daemon=True).start()
    try:
        run(from_mapping(Request, json.loads(text), "request"), relay)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        known = known_error(error)
        traceback.print_exc()
        relay.send(
            "failed",
            message=str(known),
            exit_code=known.exit_code,
            kind=known.kind if isinstance(known, MeasurementError) else "",
            trace=traceback.format_exc(),
            folder=_text(failure_folder(known)),
        )
    return 0


def run(request: Request, relay: Relay) -> None:
    """Errors: EvalqError."""
    if request.version != evalq.__version__:
        raise ConfigError(
            f"this machine has evalq {evalq.__version__} and the sweep was started by {request.version}; "
            "install one version on all machines"
        )
    config: RunConfig = from_mapping(RunConfig, request.config, "request.config")
    if request.root is not None:
        config = dataclasses.replace(config, paths=dataclasses.replace(config.paths, root=request.root))
    cell = prepare(config)
    found = identify(cell, relay)
    relay.log_file = found.work / "engine.log"
    relay.send("running", owner=dataclasses.asdict(this_process()), log=str(relay.log_file))
    if found.key in request.known:
        relay.send("known", record=request.known[found.key])
        return
    measured = measure_with_load(cell, relay, request.command, since=request.since, hint=request.hint, known=found)
    relay.send("ended", folder=str(measured.folder), reused=measured.reused)


def _text(folder: Path | None) -> str | None:
    return None if folder is None else str(folder)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first one is being obeyed
    raise KeyboardInterrupt


def _end_with_the_asking_side() -> None:
    while os.read(0, 1 << 12):  # not through sys.stdin: its lock would be held when this process ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
