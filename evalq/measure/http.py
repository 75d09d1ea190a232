"""Questions to a server on this machine: no proxy, a time-out on everything."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get_text(url: str, timeout_seconds: float = 30.0) -> str:
    """The body of a GET. Errors: OSError (urllib.error.URLError is one)."""
    with _OPENER.open(url, timeout=timeout_seconds) as answer:
        body: bytes = answer.read()
    return body.decode()


def post(url: str, content: dict[str, Any] | None = None, timeout_seconds: float = 120.0) -> str:
    """The body of a POST of JSON. Errors: OSError."""
    data = json.dumps(content or {}).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"}, method="POST")
    with _OPENER.open(request, timeout=timeout_seconds) as answer:
        body: bytes = answer.read()
    return body.decode()
