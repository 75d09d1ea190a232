"""What a sweep itself costs: a thousand cells that take no time, and what passes all the same.

    python jobs/bench/sweep_overhead.py --cells 1000                    scheduling, checks and state on disk; the judge is left out
    python jobs/bench/sweep_overhead.py --cells 1000 --judge            with the judge
    python jobs/bench/sweep_overhead.py --cells 40 --processes 2        every cell a process of its own, its engine a stub process

The first is the scheduler's own time per cell: checking and planning the cell, its job, three writes of its state with fsync.
Prints one JSON line: milliseconds per cell, and the parent's resident memory after a tenth of the cells and at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "judge"), str(ROOT)]

import conftest  # noqa: E402
import psutil  # noqa: E402
import stub_cell  # noqa: E402
from stub_worker import in_process, plan_command  # noqa: E402

from evalq import pipeline, sweep  # noqa: E402
from evalq.app import compose  # noqa: E402
from evalq.config import RunConfig  # noqa: E402
from evalq.pipeline import Measured  # noqa: E402
from evalq.report.progress import QuietWatcher  # noqa: E402
from evalq.sweep import flow  # noqa: E402
from evalq.sweep.jobs import Event, Job, Outcome  # noqa: E402


class Memory(QuietWatcher):
    """The resident memory of this process each time a tenth of the cells is done."""

    def __init__(self, cells: int) -> None:
        self._cells = cells
        self._done = 0
        self.mib: list[float] = []

    def state(self, cell: str, state: str, detail: str = "") -> None:
        self._done += state in ("done", "failed")
        if state == "done" and self._done % max(1, self._cells // 10) == 0:
            self.mib.append(psutil.Process().memory_info().rss / 1024**2)


class NoTime:
    """An executor whose jobs have ended before they began: each has the record of its kind."""

    def __init__(self, baseline: Measured, candidate: Measured) -> None:
        self._records = {True: baseline, False: candidate}
        self._ended: list[Event] = []

    def room(self, job: Job) -> bool:
        return not self._ended

    def start(self, job: Job) -> None:
        self._ended.append(Event(job, {}, Outcome(self._records[job.cell.is_baseline])))

    def wait(self, seconds: float) -> list[Event]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        return


def cells_of(count: int, root: Path, workers: int | None) -> list[RunConfig]:
    """Cells of one baseline: a scheme whose left-out layers differ."""
    one = compose(
        ["+model=smollm2-135m", "+quant=mixed-4-8", "gpu=cpu", "tracking=off", "progress=false", f"paths.root={root}"]
    )
    one = dataclasses.replace(one, executor=dataclasses.replace(one.executor, workers=workers))
    return [
        dataclasses.replace(
            one, quant=dataclasses.replace(one.quant, name=f"scheme-{i}", ignore=["lm_head", f"layer-{i}"])
        )
        for i in range(count)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--processes", type=int, default=0)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="evalq-overhead-"))
    os.environ["EVALQ_LEASES"] = str(folder / "leases")
    checkpoint = conftest.tiny_safetensors(folder / "checkpoint")
    stub_cell.patch(str(checkpoint))
    command = plan_command(folder / "stub")
    watcher = Memory(given.cells)
    cells = cells_of(given.cells, folder / "root", given.processes or None)
    if not given.processes:
        pipeline.run_worker = in_process(command)
        made = sweep.run(cells_of(1, folder / "made", None), QuietWatcher(), command).cells[0]
        sweep.make_executor = lambda *_: NoTime(made.baseline, made.measured)
        if not given.judge:
            verdict = made.verdict
            flow.judge_cell = lambda *_: verdict
    began, cpu = time.monotonic(), time.process_time()
    result = sweep.run(cells, watcher, command, stub_cell.cell_command(checkpoint))
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    told: dict[str, Any] = {
        "cells": len(result.cells),
        "done": result.done,
        "milliseconds_per_cell": round(1000 * seconds / given.cells, 2),
        "processor_milliseconds_per_cell": round(1000 * cpu / given.cells, 2),
        "memory_mib": [round(value, 1) for value in watcher.mib],
    }
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
