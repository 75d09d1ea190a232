"""Where tracked runs go: the store's address, its local folders, whether a server answers, locks between processes."""

from __future__ import annotations

import fcntl
import http.client
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from evalq.config import PathsConfig, TrackingConfig
from evalq.errors import ConfigError, MeasurementError

HTTP_SCHEMES = ("http", "https")
SERVER_DATABASES = ("postgresql", "mysql", "mssql")
DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
SQLITE_BUSY_SECONDS = 60
ARTIFACTS_FOLDER = "mlartifacts"


@dataclass(frozen=True)
class Store:
    """One MLflow store as evalq sees it. `artifacts` is None where the server decides where artifacts go."""

    uri: str
    root: Path
    records: Path
    artifacts: Path | None
    timeout_seconds: float

    @property
    def is_sqlite(self) -> bool:
        return self.uri.startswith("sqlite:")

    @property
    def is_http(self) -> bool:
        return urlsplit(self.uri).scheme in HTTP_SCHEMES

    @property
    def database(self) -> Path | None:
        """The sqlite file, or None for a server."""
        return Path(self.uri.removeprefix("sqlite:///").split("?")[0]) if self.is_sqlite else None

    @property
    def mlflow_uri(self) -> str:
        """The address as MLflow gets it: sqlite waits for other writers instead of failing at once."""
        if self.is_sqlite and "?" not in self.uri:
            return f"{self.uri}?timeout={SQLITE_BUSY_SECONDS}"
        return self.uri

    @property
    def where(self) -> str:
        """One line for people: where runs and their artifacts go."""
        artifacts = f"artifacts in {self.artifacts}" if self.artifacts else "artifacts where the server keeps them"
        return f"MLflow: {redact(self.uri)}, {artifacts}"


def resolve_store(config: TrackingConfig, paths: PathsConfig) -> Store:
    """Store of a config. A folder named mlruns, or MLflow's own environment, never decides where runs land.

    Errors: ConfigError for an address that evalq cannot use.
    """
    root = Path(paths.root).absolute()
    uri = config.uri or f"sqlite:///{root / paths.mlflow_db}"
    return store_at(uri, root, root / paths.records, config.timeout_seconds)


def store_at(uri: str, root: Path, records: Path, timeout_seconds: float) -> Store:
    """Store at `uri`; a relative sqlite file is taken from `root`. Errors: ConfigError."""
    _check_uri(uri)
    if uri.startswith("sqlite:"):
        file, _, query = uri.removeprefix("sqlite:///").partition("?")
        database = root / file
        uri = f"sqlite:///{database}" + (f"?{query}" if query else "")
        return Store(uri, root, records, database.parent / ARTIFACTS_FOLDER, timeout_seconds)
    return Store(uri, root, records, None, timeout_seconds)


def _check_uri(uri: str) -> None:
    parts = urlsplit(uri)
    scheme = parts.scheme.split("+")[0]
    if scheme == "sqlite" and uri.startswith("sqlite:///") and len(uri) > len("sqlite:///"):
        return
    if scheme in HTTP_SCHEMES and parts.hostname:
        if parts.password is not None:
            raise ConfigError(
                f"tracking.uri={redact(uri)} holds a password; leave it out and "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
            )
        return
    if scheme in SERVER_DATABASES and parts.hostname:
        return
    if scheme == "databricks":
        return
    raise ConfigError(
        f"tracking.uri={redact(uri)!r} is not an address that evalq can use; allowed: sqlite:////folder/mlflow.db, "
        "http(s)://server:port, postgresql://user@host/database, mysql://..., mssql://... or databricks"
    )


def redact(uri: str) -> str:
    """The address without its password: what may be printed or written to a file."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc or ":" not in parts.netloc.rsplit("@", 1)[0]:
        return uri
    user = parts.netloc.split(":", 1)[0]
    host = parts.netloc.rsplit("@", 1)[1]
    return urlunsplit(parts._replace(netloc=f"{user}:***@{host}"))


def why_unreachable(uri: str, timeout_seconds: float) -> str | None:
    """None when the server at `uri` connects and answers in time, else the reason; never takes longer than the limit.

    Any HTTP answer counts, a refusal (401, 404) too: what matters is that a request comes back. Of a database
    server only the connection is tried.
    """
    parts = urlsplit(uri)
    scheme = parts.scheme.split("+")[0]
    if scheme in HTTP_SCHEMES and parts.hostname:
        return _why_no_answer(uri, timeout_seconds)
    if scheme in SERVER_DATABASES and parts.hostname:
        port = parts.port or DATABASE_PORTS[scheme]
        try:
            socket.create_connection((parts.hostname, port), timeout_seconds).close()
        except OSError as error:
            return f"{redact(uri)} cannot be reached ({error})"
    return None


def _why_no_answer(uri: str, timeout_seconds: float) -> str | None:
    parts = urlsplit(uri)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_seconds)
    began = time.monotonic()
    try:
        connection.connect()
        left = timeout_seconds - (time.monotonic() - began)
        connection.sock.settimeout(max(left, 0.05))
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        connection.getresponse()
    except TimeoutError:
        return f"{redact(uri)} did not answer within {timeout_seconds:g} s"
    except (OSError, http.client.HTTPException) as error:
        return f"{redact(uri)} cannot be reached ({error})"
    finally:
        connection.close()
    return None


@contextmanager
def file_lock(path: Path, limit_seconds: float = 300.0) -> Iterator[None]:
    """Hold `path` as a lock between processes; freed by the system when the holder dies.

    Errors: MeasurementError when another process holds it for longer than the limit.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + limit_seconds
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise MeasurementError(
                    f"{path} is held by another evalq for more than {limit_seconds:g} s; end that process", "timeout"
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def slug(text: str) -> str:
    """Text as a file name: letters, digits, dot, dash and underscore only, at most 80 characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:80] or "unnamed"
