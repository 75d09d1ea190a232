"""A record from an MLflow server over its REST interface: the gate in CI needs no mlflow package.

Source: MLflow's REST API 2.0 (runs/get) and the server's get-artifact, as of MLflow 3.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from evalq.errors import RecordError
from evalq.records import JUDGED_TABLES, RECORD_FILE, SEAL_FILE, TABLES, VERDICT_FILE, read_record

TIMEOUT_SECONDS = 60.0
ANSWERS_OF_OTHERS = (  # what reading the answer of anything but an MLflow server may end in
    OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, http.client.HTTPException,
)  # fmt: skip
OPTIONAL_FILES = (SEAL_FILE, VERDICT_FILE, "config.yaml")


def fetch_record(run_id: str, uri: str, target: Path) -> Path:
    """Download the artifact folder record/ of a run into `target`. Errors: RecordError in one sentence."""
    server = uri.rstrip("/")
    try:
        answer = _ask(f"{server}/api/2.0/mlflow/runs/get?{urllib.parse.urlencode({'run_id': run_id})}")
        run: dict[str, Any] = json.loads(answer)["run"]
        refuse_ineligible(run_id, {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])})
        _download(server, run_id, RECORD_FILE, target)
        for name in [f"{table}.parquet" for table in TABLES if table in read_record(target).tables]:
            _download(server, run_id, name, target, optional=name.removesuffix(".parquet") not in JUDGED_TABLES)
        for name in OPTIONAL_FILES:
            _download(server, run_id, name, target, optional=True)
    except urllib.error.HTTPError as error:
        raise RecordError(f"no record in MLflow run {run_id} at {shown(uri)}: {_why(error)}") from error
    except ANSWERS_OF_OTHERS as error:
        why = _without_login((str(error).splitlines() or [type(error).__name__])[0], uri)
        raise RecordError(
            f"MLflow run {run_id} at {shown(uri)} cannot be read ({why}); is the tracking URI right?"
        ) from error
    return target


def shown(uri: str) -> str:
    """The address without user and password: verdicts are printed and posted."""
    start, slashes, rest = uri.partition("://")
    place, slash, path = rest.partition("/")
    return f"{start}{slashes}{place.rpartition('@')[2]}{slash}{path}"


def _without_login(text: str, uri: str) -> str:
    login = uri.partition("://")[2].partition("/")[0].rpartition("@")[0]
    for part in filter(None, (login, login.partition(":")[2])):
        text = text.replace(part, "***")
    return text


def refuse_ineligible(run_id: str, tags: dict[str, str]) -> None:
    """Errors: RecordError for a run whose files MLflow did not take whole, or whose measurement did not end well."""
    if tags.get("evalq.gate_eligible") == "false":
        raise RecordError(
            f"MLflow run {run_id} may not be judged (evalq.gate_eligible=false: {tags.get('evalq.artifacts', 'unknown')}, "
            f"status {tags.get('evalq.status', 'unknown')}); run evalq sync where it was measured, or measure it anew"
        )


def _why(error: urllib.error.HTTPError) -> str:
    if error.code in (401, 403):
        return f"the server refused the login ({error.code}); set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    return f"the server answered {error.code}; is the tracking URI right?"


def _download(server: str, run_id: str, name: str, target: Path, optional: bool = False) -> None:
    query = urllib.parse.urlencode({"run_id": run_id, "run_uuid": run_id, "path": f"record/{name}"})
    try:
        with _open(f"{server}/get-artifact?{query}") as answer, open(target / name, "wb") as file:
            shutil.copyfileobj(answer, file)
    except urllib.error.HTTPError as error:
        if optional and error.code in (400, 404, 500):  # MLflow has several answers for a file that is not there
            (target / name).unlink(missing_ok=True)
            return
        raise


def _ask(address: str) -> bytes:
    with _open(address) as answer:
        return bytes(answer.read())


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows a redirect, and leaves the login behind when it leads to another host, port or scheme."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        follow = super().redirect_request(req, fp, code, msg, headers, newurl)
        if follow is not None and _origin(newurl) != _origin(req.full_url):
            follow.remove_header("Authorization")
        return follow


def _origin(address: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(address)
    return parts.scheme, parts.hostname, parts.port


def _open(address: str) -> Any:
    request = urllib.request.Request(address, headers=_login())
    return urllib.request.build_opener(_SameHost).open(request, timeout=TIMEOUT_SECONDS)


def _login() -> dict[str, str]:
    """Headers of MLflow's own variables: a bearer token, or user and password."""
    token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
    if token:
        return {"Authorization": f"Bearer {token}"}
    if user:
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
    return {}
