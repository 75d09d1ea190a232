"""Fetching from an MLflow server: the login goes to that server alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from evalq.cli import fetch

Seen = list[tuple[str, str | None]]


@pytest.fixture
def servers() -> Iterator[tuple[str, str, Seen]]:
    """Two servers; "/there" of the first leads to the second, "/here" to itself. All requests with their login."""
    seen: Seen = []
    addresses: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Authorization")))
            leads = {"/there": f"{addresses[1]}/end", "/here": "/end"}.get(self.path)
            self.send_response(302 if leads else 200)
            if leads:
                self.send_header("Location", leads)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    made = [HTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    addresses += [f"http://127.0.0.1:{server.server_port}" for server in made]
    for server in made:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield addresses[0], addresses[1], seen
    for server in made:
        server.shutdown()
        server.server_close()


def test_a_redirect_to_another_server_does_not_take_the_login_along(
    servers: tuple[str, str, Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    first, _, seen = servers
    fetch._ask(f"{first}/there")
    fetch._ask(f"{first}/here")
    assert seen == [
        ("/there", "Bearer secret"),
        ("/end", None),
        ("/here", "Bearer secret"),
        ("/end", "Bearer secret"),
    ]
