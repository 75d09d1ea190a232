"""A sweep that is killed at a chosen disk operation: `python kill_points.py CHECKPOINT FOLDER SEED POINTS`.

A child process runs the sweep on stubs and kills itself with SIGKILL at its n-th fsync, rename or lock; the next child goes on, and
is killed too, up to four times on one store, before one may end the sweep. POINTS is the number of deaths. Prints one JSON line
per store: where it died, how often each cell's worker started, and the records that are there at the end.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stub_cell
from stub_worker import in_process, plan_command, starts

from evalq import pipeline, sweep
from evalq.app import compose
from evalq.config import RunConfig
from evalq.quantize import weights_hash
from evalq.records import RECORD_FILE, read_record
from evalq.report.progress import QuietWatcher
from evalq.sweep.journal import read_entries, read_plan

SCHEMES = ("fp8-kv", "w4a16")
MOST_PER_STORE = 4
FEW = {"act": "record", "documents": 25}


@functools.cache
def composed() -> list[RunConfig]:
    fixed = ("+model=smollm2-135m", "gpu=cpu", "tracking=off", "progress=false")
    return [compose([*fixed, f"+quant={scheme}"]) for scheme in SCHEMES]


def configs(root: Path) -> list[RunConfig]:
    return [dataclasses.replace(c, paths=dataclasses.replace(c.paths, root=str(root))) for c in composed()]


def count_operations(stop_at: int | None) -> list[int]:
    """Count what makes state durable, in all modules, and die at operation `stop_at`, before or after it by turns."""
    done = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            done[0] += 1
            if done[0] == stop_at and stop_at % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **named)
            if done[0] == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    os.fsync, os.replace, fcntl.flock = counted(os.fsync), counted(os.replace), counted(fcntl.flock)
    return done


def run_sweep(folder: Path, cells: list[RunConfig], stop_at: int | None) -> tuple[int, int]:
    """In a child process: the sweep, to its end or its death. Returns the child's wait status and the operations it made."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        command = plan_command(folder / "stub", FEW)
        pipeline.run_worker = in_process(command)
        operations = count_operations(stop_at)
        code = sweep.run(cells, QuietWatcher(), command).exit_code
        os.write(writing, json.dumps(operations[0]).encode())
        os._exit(code)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    told = os.read(reading, 64)
    os.close(reading)
    return status, int(told or b"0")


def report(folder: Path) -> dict[str, Any]:
    """What is there at the end: records without what chance and time decide, the sweep's own state, leftovers."""
    found = []
    for file in sorted((folder / "root" / "records").glob(f"[!.]*/{RECORD_FILE}")):
        record = read_record(file)
        tasks = {name: score.metrics for name, score in record.tasks.items()}
        found.append([record.cell.quant, record.status, record.config_hash, record.reuse_key, tasks, record.tables])
    sweeps = list((folder / "root" / "sweeps").glob("*/"))
    work = folder / "root" / "records" / ".work"
    return {
        "records": sorted(found, key=str),
        "states": sorted(entry.state for entry in read_entries(sweeps[0])),
        "done": [plan.done for plan in map(read_plan, sweeps) if plan],
        "starts": sorted(starts(folder / "stub")),
        "left": sorted(str(file) for file in work.glob("*")) if work.is_dir() else [],
    }


def main(checkpoint: str, folder: str, seed: str, points: str) -> int:
    stub_cell.patch(checkpoint)
    weights_hash(Path(checkpoint))  # kept beside the checkpoint: every run makes the same number of operations
    dice = random.Random(int(seed))
    whole = Path(folder) / "undisturbed"
    status, operations = run_sweep(whole, configs(whole / "root"), None)
    print(json.dumps({"point": None, "operations": operations, "status": status, **report(whole)}), flush=True)
    deaths, number = 0, 0
    while deaths < int(points):
        here = Path(folder) / f"store-{number}"
        number += 1
        cells, stops = configs(here / "root"), []
        while deaths < int(points) and len(stops) < MOST_PER_STORE:
            stop = dice.randint(1, operations if not stops else operations // 2)
            status, _ = run_sweep(here, cells, stop)
            if not os.WIFSIGNALED(status):
                break  # what was left needed fewer operations
            stops.append(stop)
            deaths += 1
        status, _ = run_sweep(here, cells, None)
        print(json.dumps({"point": stops, "status": status, **report(here)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
