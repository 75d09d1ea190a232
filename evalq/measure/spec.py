"""What the parent tells a worker (WorkerSpec, JSON) and what the worker tells its parent (Events, lines of JSON)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from evalq.records import Calibration, Cell, CheckpointId, Scalar, from_mapping, parse_json

RECORD_FOLDER = "record"
LOAD_FILE = "load.json"


@dataclass(frozen=True)
class WorkerSpec:
    """All that the worker needs; written by the parent, read by the worker, JSON."""

    run_id: str
    record_id: str
    cell: Cell
    config: dict[str, Any]
    checkpoint: str
    checkpoint_bytes: int | None
    identity: dict[
        str, Scalar
    ]  # parts of the fingerprint that the parent knows: model id, weights and tokenizer hashes, gpu
    config_hash: str
    reuse_key: str
    work_dir: str
    is_cpu: bool
    predicted: dict[str, int | None]
    calibration: Calibration | None = None
    checkpoint_id: CheckpointId | None = None
    prompts: list[str] = dataclasses.field(default_factory=list)  # to generate from, for people to review
    output_tokens: int = 0  # at most, of each
    hidden_folder: str = ""  # where the baseline's hidden states are kept; "" = no exact divergence
    baseline_key: str = ""  # reuse key of the baseline whose hidden states they are
    baseline_checkpoint: str = ""  # where the baseline's output head can be read
    store_dir: str = ""  # where answers about this engine are kept; empty = in the work folder
    stage: str = "cell"  # cell: everything, the product is a record | load: a serving load for a record that is there
    round: int = 1  # of a sweep whose cells are loaded several times

    @property
    def owner(self) -> str:
        """Whose scores kept on the way are: this measurement's, of these very weights."""
        return f"{self.reuse_key} {self.checkpoint_id.weights_sha256}" if self.checkpoint_id else self.reuse_key


def read_spec(path: Path) -> WorkerSpec:
    """The spec written by the parent. Errors: RecordError."""
    spec: WorkerSpec = from_mapping(WorkerSpec, parse_json(path.read_text(encoding="utf-8"), str(path)), str(path))
    return spec


class Events:
    """Lines of JSON to the parent, and the current stage for failures."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._last_progress = 0.0
        self.stage = "start"
        self.stage_seconds: dict[str, float] = {}

    def send(self, event: str, **values: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._stream.write(json.dumps({"event": event, **values}) + "\n")
            self._stream.flush()

    @contextlib.contextmanager
    def timed(self, stage: str, label: str) -> Iterator[None]:
        """Announce a stage and keep its wall seconds."""
        self.stage = stage
        self.send("stage", stage=stage, label=label)
        began = time.monotonic()
        yield
        self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + time.monotonic() - began

    def progress(self, done: int, total: int, unit: str) -> None:
        """At most five lines a second, the last one always."""
        now = time.monotonic()
        if done == total or now - self._last_progress > 0.2:
            self._last_progress = now
            self.send("progress", done=done, total=total, unit=unit)
