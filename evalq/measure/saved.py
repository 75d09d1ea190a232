"""Scores kept while a long scoring runs, so that what is finished is never computed again after a kill.

A folder of numbered .npz files, each written whole or not at all. A sequence is known by evalq.measure.hidden.sequence_key.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from evalq.records import sync_folder, write_text

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
OWNER_FILE = "reuse_key"
MARK_FILE = "mark"


class SavedScores:
    """Finished sequences of one cell and group of tasks. `reuse_key` says which measurement they belong to."""

    def __init__(self, folder: Path, reuse_key: str) -> None:
        self.folder = folder
        self._reuse_key = reuse_key
        self._number = 0
        self._found: dict[str, Arrays] = {}
        if self._belongs():
            self._read()
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def _belongs(self) -> bool:
        try:
            return (self.folder / OWNER_FILE).read_text(encoding="utf-8") == self._reuse_key
        except (OSError, UnicodeDecodeError):
            return False

    def _read(self) -> None:
        for file in sorted(self.folder.glob("*.npz")):
            self._number = max(self._number, int(file.stem) + 1 if file.stem.isdigit() else 0)
            try:
                with np.load(file, allow_pickle=False) as content:
                    self._add({name: content[name] for name in content.files})
            except Exception:  # whatever a damaged archive makes of itself
                file.unlink(missing_ok=True)  # its sequences are computed again

    def _add(self, content: Arrays) -> None:
        stops = np.cumsum(content["lengths"])
        for key, start, stop in zip(content["keys"], stops - content["lengths"], stops, strict=True):
            rows = {name: values[start:stop] for name, values in content.items() if name not in ("keys", "lengths")}
            self._found[str(key)] = rows

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Arrays | None:
        """Arrays of one finished sequence, in order of position; None when it must be computed."""
        return self._found.get(key)

    @property
    def mark(self) -> str:
        """What `restart` was given last; empty when it never was."""
        try:
            return (self.folder / MARK_FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ""

    def restart(self, mark: str) -> None:
        """Give up what was kept and begin anew under a mark, by which something kept elsewhere knows these scores."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._found, self._number = {}, 0
        write_text(self.folder / MARK_FILE, mark)

    def keep(self, finished: dict[str, Arrays]) -> None:
        """Write finished sequences; equal array names and kinds in all of them."""
        if not finished:
            return
        names = list(next(iter(finished.values())))
        content = {name: np.concatenate([rows[name] for rows in finished.values()]) for name in names}
        content["keys"] = np.asarray(list(finished))
        content["lengths"] = np.asarray([len(rows[names[0]]) for rows in finished.values()], dtype=np.int64)
        self.folder.mkdir(parents=True, exist_ok=True)
        owner = self.folder / OWNER_FILE
        if not owner.exists():
            write_text(owner, self._reuse_key)
        target = self.folder / f"{self._number:06d}.npz"
        temporary = target.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            np.savez(file, **content)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(self.folder)
        self._number += 1
        self._found.update(finished)

    def clear(self) -> None:
        """Everything is in the record now."""
        shutil.rmtree(self.folder, ignore_errors=True)
