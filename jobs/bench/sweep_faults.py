"""A sweep of real processes (stub engines) that is killed at random moments, and ends like one that was left alone.

    python jobs/bench/sweep_faults.py --folder /tmp/faults --kills 25 --seed 1        about 5 minutes on 2 idle cores

Two cells run at once, each in a process of its own, with an engine process below it. Each time one of three is killed with
SIGKILL after a random time: the sweep, a cell's process, or an engine; then the same command is given again. When the sweep
ends before its time, its store is put aside and a new one begins. Prints one JSON line: kills by victim, sweeps that came to
their end, and whether each had the records of the undisturbed one, none twice, and no process left.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "judge"), str(ROOT)]

import conftest  # noqa: E402
import psutil  # noqa: E402
from stub_worker import plan_command  # noqa: E402

from evalq.records import read_record  # noqa: E402

SCHEMES = "fp8-kv,int8-w8a8,w4a16,mixed-4-8"


def start(folder: Path, root: Path) -> subprocess.Popen[bytes]:
    """The command line, as a user would give it; stubs take half a second."""
    command = [
        sys.executable,
        str(ROOT / "tests" / "stub_cli.py"),
        str(folder / "checkpoint"),
        str(folder / "stub" / "plan.json"),
    ]
    command += ["sweep", "+model=smollm2-135m", f"+quant={SCHEMES}", "gpu=cpu", "tracking=off", "executor.workers=2"]
    return subprocess.Popen(
        [*command, f"paths.root={root}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CI": "1",
            "EVALQ_LEASES": str(folder / "leases"),
            "EVALQ_FAULTS": str(folder),
        },
    )


def family(folder: Path) -> list[psutil.Process]:
    """Everything that was started for this folder, whoever its parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get("EVALQ_FAULTS") == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_one(sweep: subprocess.Popen[bytes], folder: Path, dice: random.Random) -> str:
    """SIGKILL to the sweep, or to one of the cells' processes or engines that are there."""
    members = [process for process in family(folder) if process.pid != sweep.pid]
    kinds = {"sweep": [psutil.Process(sweep.pid)]}
    for process in members:
        try:
            text = " ".join(process.cmdline())
        except psutil.Error:
            continue
        kind = "cell" if "stub_cell.py" in text else "engine" if "stub_worker.py" in text else ""
        if kind:
            kinds.setdefault(kind, []).append(process)
    kind = dice.choice(sorted(kinds))
    dice.choice(kinds[kind]).kill()
    return kind


def records(root: Path) -> list[list[Any]]:
    """Complete records without what chance and time decide."""
    found = [read_record(file) for file in root.glob("records/[!.]*/record.json")]
    return sorted([r.cell.quant, r.reuse_key, r.config_hash, r.tables] for r in found if r.status == "complete")


def nobody_left(folder: Path, seconds: float = 30.0) -> int:
    deadline = time.monotonic() + seconds
    while (left := family(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    folder, dice = given.folder.absolute(), random.Random(given.seed)
    conftest.tiny_safetensors(folder / "checkpoint")
    plan_command(folder / "stub", {"act": "record", "seconds": 0.5})
    began = time.monotonic()
    whole = start(folder, folder / "undisturbed")
    whole.wait()
    usual = time.monotonic() - began
    wanted = records(folder / "undisturbed")
    killed: collections.Counter[str] = collections.Counter()
    ended, same, left, number = 0, 0, 0, 0
    while sum(killed.values()) < given.kills or ended == 0 or family(folder):
        root = folder / f"store-{number}"
        sweep = start(folder, root)
        if sum(killed.values()) < given.kills:
            try:
                sweep.wait(dice.uniform(0.2, usual))
            except subprocess.TimeoutExpired:
                killed[kill_one(sweep, folder, dice)] += 1
        sweep.wait()
        left += nobody_left(folder)
        if sweep.returncode == 0:
            ended, number = ended + 1, number + 1
            same += records(root) == wanted
    told: dict[str, Any] = {"kills": dict(killed), "sweeps_ended": ended, "same_records": same, "processes_left": left}
    told |= {"cells": len(wanted), "undisturbed_seconds": round(usual, 1), "seconds": round(time.monotonic() - began)}
    print(json.dumps(told))
    return 0 if ended == same and not left else 1


if __name__ == "__main__":
    sys.exit(main())
