"""Exact divergence from the baseline: when hidden states are kept, where, and when they are compared with.

The baseline's run keeps them in the record store, keyed as the baseline is; each candidate's run compares with them. Nothing is
read before the store is finished, and a store that an interrupted run left is filled up, not begun anew.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evalq.errors import MeasurementError
from evalq.measure.engine import Engine
from evalq.measure.hidden import (
    GIB,
    ROWS_FILE,
    Layout,
    open_rows,
    plan_layout,
    read_layout,
    require_room,
    sequence_key,
    write_layout,
)
from evalq.measure.saved import SavedScores
from evalq.measure.scores import HiddenUse, ScoreRequest
from evalq.records import sync_folder, write_text

MARK_FILE = "scores"  # in an unfinished store: the mark of the kept scores that belong to it


@dataclass
class ExactDivergence:
    """One cell's part in exact divergence. `note` says why there is none, when there is none."""

    folder: Path
    compare: bool  # a candidate; else the baseline, which keeps
    limit_bytes: int
    checkpoint: Path | None  # of the baseline, for its output head
    say: Callable[[str], None]
    note: str = ""
    _use: HiddenUse | None = field(default=None, repr=False)
    _heads: list[str] = field(default_factory=list, repr=False)

    def begin(
        self, engine: Engine, requests: Sequence[ScoreRequest], saved: SavedScores | None = None
    ) -> HiddenUse | None:
        """Open the store for the sequences about to be scored; None, with a note, where exact divergence cannot be had.

        saved: scores kept by an interrupted run. They are given up when the hidden states that belong to them are not there.
        """
        if engine.scorer != "hook":
            self.note = f"no exact divergence: {engine.scorer_note or 'it needs tasks.scorer=hook'}"
            return None
        self._use = (
            self._begin_comparing(engine, requests) if self.compare else self._begin_keeping(engine, requests, saved)
        )
        return self._use

    def _begin_keeping(self, engine: Engine, requests: Sequence[ScoreRequest], saved: SavedScores | None) -> HiddenUse:
        keys = [sequence_key(request.ids, request.first) for request in requests]
        scored = [len(request.ids) - request.first for request in requests]
        dtype = str(engine.settings()["dtype"])
        layout = plan_layout(keys, scored, engine.hidden_size, dtype, self.limit_bytes)
        self.say(announcement(layout, sum(dict(zip(keys, scored, strict=True)).values())))
        part = self.folder.with_name(self.folder.name + ".part")
        part.mkdir(parents=True, exist_ok=True)
        _check_room(part, layout)
        if saved is not None and not (saved.mark and saved.mark == _mark_of(part, layout)):
            saved.restart(secrets.token_hex(16))
            write_text(part / MARK_FILE, saved.mark)
        open_rows(part, layout, writable=True)  # reserves the room, before the workers open it
        use = HiddenUse(part, layout, compare=False)
        self._heads = engine.keep_hidden(use)
        return use

    def _begin_comparing(self, engine: Engine, requests: Sequence[ScoreRequest]) -> HiddenUse | None:
        layout, heads = read_layout(self.folder)
        unknown = sum(sequence_key(request.ids, request.first) not in layout.sequences for request in requests)
        if unknown:
            raise MeasurementError(
                f"{unknown} of {len(requests)} sequences are not among those whose hidden states the baseline kept; "
                "measure the baseline anew on the same data with reuse_baseline=false",
                "incomplete",
            )
        use = HiddenUse(self.folder, layout, compare=True)
        problem = engine.compare_hidden(use, heads, self.checkpoint)
        if problem:
            self.note = f"no exact divergence: {problem}"
            return None
        return use

    def finish(self, engine: Engine) -> None:
        """Close the store; the baseline's becomes readable now."""
        use, self._use = self._use, None
        if use is None:
            return
        engine.close_hidden()
        if use.compare:
            return
        write_layout(use.folder, use.layout, self._heads)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.replace(use.folder, self.folder)
        sync_folder(self.folder.parent)


def _mark_of(part: Path, layout: Layout) -> str:
    """Which kept scores an unfinished store belongs to; empty when it is not there or not of this size."""
    try:
        whole = (part / ROWS_FILE).stat().st_size == layout.bytes
        return (part / MARK_FILE).read_text(encoding="utf-8") if whole else ""
    except (OSError, UnicodeDecodeError):
        return ""


def announcement(layout: Layout, scored: int) -> str:
    """What will be written, in words."""
    size = f"{layout.bytes / GIB:.2f} GiB" if layout.bytes >= GIB // 100 else f"{layout.bytes / 2**20:.1f} MiB"
    which = (
        "every scored token"
        if layout.stride == 1
        else f"every {_ordinal(layout.stride)} of {scored:,} scored tokens (all of them would be "
        f"{scored * layout.bytes / max(1, layout.rows) / GIB:.2f} GiB; see tasks.divergence_store_gib)"
    )
    return f"keeping the baseline's hidden states for exact divergence: {size} for {which}"


def _ordinal(number: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if 10 <= number % 100 <= 20 else endings.get(number % 10, 'th')}"


def _check_room(folder: Path, layout: Layout) -> None:
    held = 0
    with contextlib.suppress(OSError):
        held = (folder / ROWS_FILE).stat().st_size
    require_room(folder, layout.bytes - held)
