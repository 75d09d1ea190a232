"""The baseline's final hidden states on disk: what exact divergence needs, hundreds of times smaller than its logits.

A store is a folder

    meta.json    what it holds: dtype, hidden size, stride, and for each sequence its key, first row and rows
    rows.bin     (rows, hidden) in the model's dtype, row by row

A sequence is known by the hash of its token ids and of where scoring begins, so the candidate finds its rows whatever the order.
When all rows do not fit the room that is given, every stride-th scored token is kept, counted through all sequences.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evalq.errors import MeasurementError
from evalq.records import write_text

META_FILE = "meta.json"
ROWS_FILE = "rows.bin"
FORMAT = 1
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
GIB = 1 << 30
SPARE_BYTES = 64 << 20  # left free on the disk beside the store


def sequence_key(ids: Sequence[int], first: int) -> str:
    """What a sequence is known by: a hash of its ids and of the first scored position."""
    return hashlib.sha256(np.asarray([first, *ids], dtype=np.int64).tobytes()).hexdigest()[:32]


@dataclass(frozen=True)
class Kept:
    """Rows of one sequence in the store: of its scored tokens, those numbered phase, phase + stride, ..."""

    offset: int  # row of the first one
    count: int
    phase: int


@dataclass(frozen=True)
class Layout:
    """What a store holds, and where."""

    dtype: str
    hidden_size: int
    stride: int
    rows: int
    sequences: dict[str, Kept]

    @property
    def bytes(self) -> int:
        return self.rows * self.hidden_size * ELEMENT_BYTES[self.dtype]


def plan_layout(keys: Sequence[str], scored: Sequence[int], hidden_size: int, dtype: str, limit_bytes: int) -> Layout:
    """Where the rows of each sequence go; scored: tokens scored in each. The stride is the least that fits limit_bytes.

    At least one row is kept, however small the room.
    """
    row_bytes = hidden_size * ELEMENT_BYTES[dtype]
    unique = dict(zip(keys, scored, strict=True))
    stride = max(1, -(-sum(unique.values()) // max(1, limit_bytes // row_bytes)))
    sequences, rows, before = {}, 0, 0
    for key, count in unique.items():
        # Tokens are numbered through all sequences, so that the sample is even and never larger than its share.
        phase = -before % stride
        kept = max(0, -(-(count - phase) // stride))
        sequences[key] = Kept(rows, kept, phase)
        rows, before = rows + kept, before + count
    return Layout(dtype, hidden_size, stride, rows, sequences)


def write_layout(folder: Path, layout: Layout, head: list[str]) -> None:
    """Finish a store: its rows are on disk, now it may be read. head: hash of the output head on each rank."""
    content = {
        "format": FORMAT,
        "dtype": layout.dtype,
        "hidden_size": layout.hidden_size,
        "stride": layout.stride,
        "rows": layout.rows,
        "head": head,
        "sequences": {key: [kept.offset, kept.count, kept.phase] for key, kept in layout.sequences.items()},
    }
    write_text(folder / META_FILE, json.dumps(content))


def read_layout(folder: Path) -> tuple[Layout, list[str]]:
    """The layout of a finished store and the hashes of the baseline's head. Errors: MeasurementError in one sentence."""
    try:
        content = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        sequences = {key: Kept(*map(int, kept)) for key, kept in content["sequences"].items()}
        layout = Layout(
            str(content["dtype"]), int(content["hidden_size"]), int(content["stride"]), int(content["rows"]), sequences
        )
        size = (folder / ROWS_FILE).stat().st_size
        known = content["format"] == FORMAT and layout.dtype in ELEMENT_BYTES and size == layout.bytes
        inside = all(kept.offset >= 0 and kept.offset + kept.count <= layout.rows for kept in sequences.values())
        if not (known and inside):
            raise ValueError(f"{size} bytes of rows, {layout.bytes} expected")
        return layout, [str(one) for one in content["head"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MeasurementError(
            f"the baseline's hidden states in {folder} are not readable ({error}); measure the baseline anew with "
            "reuse_baseline=false",
            "incomplete",
        ) from error


def open_rows(folder: Path, layout: Layout, writable: bool) -> np.ndarray[Any, Any]:
    """rows.bin as (rows, hidden) of unsigned words of the dtype's size, mapped into memory."""
    words = np.dtype(f"u{ELEMENT_BYTES[layout.dtype]}")
    file = folder / ROWS_FILE
    if writable:
        folder.mkdir(parents=True, exist_ok=True)
        with open(file, "a+b") as opened:
            if opened.seek(0, os.SEEK_END) != layout.bytes:
                opened.truncate(0)
                # Reserved now: running out of room must not end the run half-way.
                if layout.bytes:
                    os.posix_fallocate(opened.fileno(), 0, layout.bytes)
    if not layout.rows:
        return np.zeros((0, layout.hidden_size), words)
    return np.memmap(file, dtype=words, mode="r+" if writable else "r", shape=(layout.rows, layout.hidden_size))


def kept_rows(kept: Kept, stride: int, low: int, high: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of the scored tokens low .. high - 1 of a sequence (0 = its first): numbers of those kept, and their rows."""
    start = low + (kept.phase - low) % stride
    numbers = np.arange(start, high, stride)
    return numbers, kept.offset + (numbers - kept.phase) // stride


def store_folder(records: Path, baseline_key: str) -> Path:
    """Where the hidden states of the baseline with this reuse key lie."""
    return records / ".hidden" / baseline_key[:24]


def require_room(folder: Path, wanted: int) -> None:
    """Errors: MeasurementError when the disk under `folder` has not `wanted` bytes and a little more free."""
    free = shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free
    if wanted > 0 and free < wanted + SPARE_BYTES:
        raise MeasurementError(
            f"exact divergence writes up to {wanted / GIB:.2f} GiB to {folder} and {free / GIB:.2f} GiB are free there; "
            "free some room, lower tasks.divergence_store_gib, or set tasks.divergence=none",
            "disk",
        )


def has_store(folder: Path) -> bool:
    """Whether a baseline's finished hidden states lie there."""
    try:
        read_layout(folder)
    except MeasurementError:
        return False
    return True
