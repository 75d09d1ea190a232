"""A hub of one model on 127.0.0.1, which can be told to refuse."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "someone/tiny"


class Stub(ThreadingHTTPServer):
    """`answer` = 200 serves the folder; any other status refuses; `fail_first` refuses only so many requests."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.answer = 200
        self.fail_first = 0
        self.error_code = ""
        self.seen: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        stub = self.server
        stub.seen.append(self.path)
        refuse = stub.answer != 200 and (not stub.fail_first or len(stub.seen) <= stub.fail_first)
        if refuse:
            headers = {"X-Error-Code": stub.error_code} if stub.error_code else {}
            self._send(stub.answer, b"{}", headers, body)
        elif self.path.startswith("/api/models/"):
            self._send(200, json.dumps(self._listing()).encode(), {}, body)
        else:
            self._send_file(body)

    def _listing(self) -> object:
        files = sorted(file for file in self.server.folder.iterdir() if file.is_file())
        if "/tree/" in self.path:
            return [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": digest(file)} for file in files
            ]
        return {"id": MODEL, "modelId": MODEL, "sha": COMMIT, "siblings": [{"rfilename": file.name} for file in files]}

    def _send_file(self, body: bool) -> None:
        file = self.server.folder / self.path.rpartition("/")[2].partition("?")[0]
        if not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        self._send(200, file.read_bytes(), {"ETag": f'"{digest(file)}"', "X-Repo-Commit": COMMIT}, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serving(folder: Path) -> Iterator[Stub]:
    stub = Stub(folder)
    thread = threading.Thread(target=stub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.shutdown()
        stub.server_close()
        thread.join()
