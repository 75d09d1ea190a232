"""evalq's command line on stub workers, as a process: `python stub_cli.py CHECKPOINT PLAN.json ARGUMENTS...`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from stub_cell import cell_command
from stub_worker import TESTS

from evalq import checkpoints, preparation, sweep
from evalq.cli import main


def run(checkpoint: str, plan: str, *arguments: str) -> int:
    command = (sys.executable, str(TESTS / "stub_worker.py"), plan)
    checkpoints.source_folder = lambda cell, watcher: Path(checkpoint)
    checkpoints.cell_checkpoint = lambda cell, source, watcher: source
    preparation.detect = lambda: "cpu"
    sweep.run = functools.partial(sweep.run, command=command, cell_command=cell_command(Path(checkpoint)))
    return main(list(arguments))


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
