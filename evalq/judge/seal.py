"""Seals: an HMAC over record.json or verdict.json by a key that only the measuring machine and the gate hold.

The tables' hashes are inside record.json, so one seal covers the whole record. Without a key anyone who can write a record
folder can write a consistent one; with it they cannot. Source: RFC 2104.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from evalq.errors import ConfigError
from evalq.records import RECORD_FILE, file_sha256, write_text

KEY_VARIABLE = "EVALQ_SEAL_KEY"
SEAL_SUFFIX = ".seal"  # record.seal, verdict.seal
KEY_LENGTH = 16  # characters, at least


def seal_key() -> bytes | None:
    """The key of the environment; None where none is set. Errors: ConfigError for one that is too short."""
    key = os.environ.get(KEY_VARIABLE, "")
    if key and len(key) < KEY_LENGTH:
        raise ConfigError(
            f"{KEY_VARIABLE} has {len(key)} characters; use {KEY_LENGTH} or more, e.g. openssl rand -hex 32"
        )
    return os.fsencode(key) if key else None


def seal(folder: Path, key: bytes, file: str = RECORD_FILE) -> None:
    """Write the seal of a finished record, or of a verdict, beside it."""
    write_text((folder / file).with_suffix(SEAL_SUFFIX), _seal_of(folder / file, key) + "\n")


def why_unsealed(folder: Path, key: bytes, file: str = RECORD_FILE) -> str | None:
    """Why the seal of a record, or of a verdict, does not hold; None when it does."""
    beside = (folder / file).with_suffix(SEAL_SUFFIX)
    try:
        written = beside.read_bytes().strip()
    except OSError:
        return f"it has no {beside.name}; make it anew with {KEY_VARIABLE} set"
    if not hmac.compare_digest(written, _seal_of(folder / file, key).encode()):
        return f"its seal was made with another key, or {file} was changed afterwards; make it anew"
    return None


def _seal_of(file: Path, key: bytes) -> str:
    return hmac.new(key, file.name.encode() + b"\0" + file.read_bytes(), hashlib.sha256).hexdigest()


def record_digest(folder: Path) -> str:
    """sha256 of record.json, which names the sha256 of each table: one number for the whole record."""
    return file_sha256(folder / RECORD_FILE)
