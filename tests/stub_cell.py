"""A cell's process on a stub worker: `python stub_cell.py CHECKPOINT [GPU]`, asked on standard input like evalq.sweep.cell."""

from __future__ import annotations

import sys
from pathlib import Path

from stub_worker import TESTS

from evalq import checkpoints, preparation
from evalq.sweep import cell


def patch(checkpoint: str, gpu: str = "cpu") -> None:
    """Every cell starts from this checkpoint, on a machine with this device."""
    checkpoints.source_folder = lambda cell, watcher: Path(checkpoint)
    checkpoints.cell_checkpoint = lambda cell, source, watcher: source
    preparation.detect = lambda: gpu


def cell_command(checkpoint: Path, gpu: str = "cpu") -> tuple[str, ...]:
    return (sys.executable, str(TESTS / "stub_cell.py"), str(checkpoint), gpu)


if __name__ == "__main__":
    patch(*sys.argv[1:])
    sys.exit(cell.main())
