"""The process that talks to MLflow, so that nothing measured ever waits for it. One JSON message a line, both ways.

In:  {"do": "open", "manifest": path} · {"do": "cell", "record_id": id} · {"do": "finish", "status": word}
Out: {"event": "opened" | "cell" | "unreachable" | "note" | "finished", ...}

It ends when its input ends. An input that ends inside a study means that the measuring process is gone: the study's
run is then KILLED, within END_LIMIT_SECONDS.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from evalq.errors import EvalqError
from evalq.records import read_record
from evalq.tracking.content import times_of
from evalq.tracking.manifest import ENDED, Manifest, StudyCell, end_manifest, is_gone, mark_pending, read_manifest
from evalq.tracking.store import Store, why_unreachable
from evalq.tracking.system import Sampler, keep_samples

if TYPE_CHECKING:
    from evalq.tracking.upload import Upload

END_LIMIT_SECONDS = 20.0
POLL_SECONDS = 1.0
ASK_AGAIN_SECONDS = 60.0  # a store that failed is not asked for every cell
Emit = Callable[..., None]


class Session:
    """One study at a time; what cannot be uploaded now is tried once more when the study ends, then left to sync."""

    def __init__(self, store: Store, emit: Emit) -> None:
        self._store = store
        self._emit = emit
        self._upload: Upload | None = None
        self._path: Path | None = None
        self._place: tuple[str, str] | None = None  # experiment id, run id of the study
        self._done: set[str] = set()
        self._failed_at: float | None = None
        self._reason = ""
        self._sampler = Sampler()
        self._opened_ms = 0

    @property
    def is_open(self) -> bool:
        return self._path is not None

    @property
    def owner_is_gone(self) -> bool:
        return self._path is not None and is_gone(read_manifest(self._path).owner)

    def open(self, path: Path) -> None:
        self._path, self._place, self._done = path, None, set()
        self._opened_ms = int(1000 * time.time())
        if self._manifest().status not in ENDED:  # a study that is only uploaded later has no load of its own
            self._sampler.start()
        self._connect()

    def cell(self, record_id: str) -> None:
        self._keep_samples(record_id)
        if self._failed_at is not None and time.monotonic() - self._failed_at < ASK_AGAIN_SECONDS:
            self._unreachable(self._reason)
        elif self._connect():
            self._log([cell for cell in self._manifest().cells if cell.record_id == record_id])

    def _keep_samples(self, record_id: str) -> None:
        """What the machine did while this cell was measured, beside its record."""
        for cell in self._manifest().cells:
            if cell.record_id == record_id and not cell.reused:
                folder = self._store.records / cell.folder
                with contextlib.suppress(EvalqError):
                    keep_samples(folder, self._sampler.between(*times_of(read_record(folder))))

    def finish(self, status: str) -> None:
        """Upload what is left, write the summary, end the study's run."""
        if self._path is None:
            return
        end_manifest(self._path, status)
        manifest = self._manifest()
        left = [cell for cell in manifest.cells if cell.record_id not in self._done]
        if self._connect() and self._log(left):
            self._close(manifest)
        self._emit("finished", left=sum(cell.record_id not in self._done for cell in manifest.cells))
        self._path = None

    def _manifest(self) -> Manifest:
        assert self._path is not None
        return read_manifest(self._path)

    def _connect(self) -> bool:
        """Reach the store and find or make the study's run; False, and a word about it, when that does not work."""
        if self._upload is not None and self._place is not None:
            return True
        reason = why_unreachable(self._store.uri, self._store.timeout_seconds)
        if reason is None:
            try:
                self._open_upload()
                return True
            except Exception as error:  # MLflow raises whatever its store raises; none of it may end the measurement
                reason = _in_words(error)
        self._fail(reason)
        return False

    def _fail(self, reason: str) -> None:
        self._place, self._failed_at, self._reason = None, time.monotonic(), reason
        self._unreachable(reason)

    def _open_upload(self) -> None:
        from evalq.tracking.upload import Upload

        if self._upload is None:
            upload = Upload(self._store)
            for name in upload.reconcile():
                self._emit("note", text=f"the run {name} was left open by a process that is gone; it is now KILLED")
            self._upload = upload
        self._place = self._upload.open_study(self._manifest())
        self._failed_at = None
        self._emit("opened", experiment=self._place[0], run=self._place[1])

    def _unreachable(self, reason: str) -> None:
        manifest = self._manifest()
        for cell in manifest.cells:
            if cell.record_id not in self._done:
                mark_pending(self._store.records / cell.folder, self._store, manifest.study, reason)
        self._emit("unreachable", reason=reason)

    def _log(self, cells: list[StudyCell]) -> bool:
        """Upload cells; False as soon as the store itself fails: a silent server is not asked for every cell."""
        assert self._upload is not None
        assert self._place is not None
        for cell in cells:
            manifest = self._manifest()
            try:
                result = asdict(self._upload.log_cell(manifest, cell, *self._place))
            except EvalqError as error:
                result = {"state": "failed", "reason": str(error)}
                mark_pending(self._store.records / cell.folder, self._store, manifest.study, str(error))
            except Exception as error:  # as in _connect
                self._fail(_in_words(error))
                return False
            if result["state"] in ("uploaded", "present"):
                self._done.add(cell.record_id)
            self._emit("cell", record_id=cell.record_id, **result)
        return True

    def _close(self, manifest: Manifest) -> None:
        assert self._upload is not None
        assert self._place is not None
        try:
            samples = self._sampler.between(self._opened_ms, int(1000 * time.time()))
            refusal = self._upload.close_study(manifest, self._place[1], samples)
        except Exception as error:  # as in _connect
            refusal = _in_words(error)
        if refusal:
            self._emit("note", text=f"the study's summary is not in MLflow: {refusal}")


def _in_words(error: Exception) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
    if re.search(r"\b40[13]\b|not authenticated|unauthorized", text, re.IGNORECASE):
        text += "; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN)"
    return text


def serve(session: Session, messages: queue.Queue[dict[str, Any] | None]) -> None:
    """Carry out messages until the input ends or the measuring process is gone."""
    while True:
        try:
            message = messages.get(timeout=POLL_SECONDS)
        except queue.Empty:
            if not session.owner_is_gone:
                continue
            message = None
        if message is None:
            if session.is_open:
                threading.Timer(END_LIMIT_SECONDS, os._exit, [1]).start()
                session.finish("KILLED")
            return
        if message["do"] == "open":
            session.open(Path(message["manifest"]))
        elif message["do"] == "cell":
            session.cell(message["record_id"])
        elif message["do"] == "finish":
            session.finish(message["status"])


def _read(stream: IO[str], messages: queue.Queue[dict[str, Any] | None]) -> None:
    for line in stream:
        messages.put(json.loads(line))
    messages.put(None)


def main(argv: list[str]) -> None:
    """argv: the store as JSON. Whatever MLflow prints goes to standard error; standard output carries events only."""
    data = json.loads(argv[0])
    artifacts = Path(data["artifacts"]) if data["artifacts"] else None
    store = Store(data["uri"], Path(data["root"]), Path(data["records"]), artifacts, data["timeout_seconds"])
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")
        events.flush()

    messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(sys.stdin, messages), daemon=True).start()
    try:
        serve(Session(store, emit), messages)
    except BrokenPipeError:
        pass
    finally:
        os._exit(0)  # MLflow's own threads may still wait for a server


if __name__ == "__main__":
    main(sys.argv[1:])
