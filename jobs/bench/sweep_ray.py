"""A sweep of eight cells on a Ray cluster of three machines (all of them this one), of which one is killed in the middle.

    python jobs/bench/sweep_ray.py --folder /tmp/ray-sweep              stubs in place of engines, about a minute
    python jobs/bench/sweep_ray.py --folder /tmp/ray-sweep --engine     the real CPU engine, few items, about 15 minutes on 2 cores

Prints one JSON line: cells done, records per cell, which machine each record is from, seconds, and with --engine the largest
difference to the same sweep with executor=local.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "judge"), str(ROOT)]

import conftest  # noqa: E402
from ray_cluster import Cluster  # noqa: E402
from stub_worker import plan_command  # noqa: E402

PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
FEW = [
    "tasks.perplexity_limit=4",
    "tasks.hellaswag_limit=4",
    "tasks.truthfulqa_limit=4",
    "load=off",
    "gate.min_documents=2",
]
SCHEMES = "fp8-kv,int8-w8a8,w4a16,mixed-4-8"


def command(folder: Path, engine: bool, executor: list[str], root: Path, schemes: str) -> list[str]:
    if engine:
        start = [sys.executable, "-m", "evalq"]
    else:
        conftest.tiny_safetensors(folder / "checkpoint")
        plan_command(folder / "stub", {"act": "record", "seconds": 3.0})
        start = [
            sys.executable,
            str(ROOT / "tests" / "stub_cli.py"),
            str(folder / "checkpoint"),
            str(folder / "stub" / "plan.json"),
        ]
    cells = ["+model=smollm2-135m", f"+quant={schemes}", "gpu=cpu", "tracking=off", f"paths.root={root}"]
    cells += FEW if engine else ["engine.seed=0,1"]
    return [*start, "sweep", *cells, *executor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument(
        "--kill-after", type=int, default=3, help="kill a machine when so many records are there; 0 = never"
    )
    given = parser.parse_args()
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    root = folder / "head"
    began = time.monotonic()
    killed: list[int] = []
    with Cluster(folder) as cluster:
        executor = ["executor=ray", f"executor.address={cluster.address}"]
        sweep = subprocess.Popen(
            command(folder, given.engine, executor, root, given.schemes),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PATHS, "EVALQ_LEASES": str(folder / "leases"), "CI": "1"},
            text=True,
        )
        while sweep.poll() is None:
            time.sleep(0.2)
            if (
                given.kill_after
                and not killed
                and len(list(root.glob("records/[!.]*/record.json"))) >= given.kill_after
            ):
                killed = cluster.kill(2)
        out = sweep.stdout.read() if sweep.stdout else ""
    answer = json.loads(out.splitlines()[-1])
    told: dict[str, Any] = {
        "seconds": round(time.monotonic() - began, 1),
        "exit_code": sweep.returncode,
        "expected": answer.get("expected"),
        "done": answer.get("done"),
        "killed_processes": len(killed),
        **records_of(root),
        "attempts": attempts_of(root),
    }
    if given.engine:
        told["largest_difference_to_local"] = difference(folder, root, given.schemes)
    print(json.dumps(told))
    return 0 if told["done"] and told["done"] == told["expected"] and not told["twice"] else 1


def records_of(root: Path) -> dict[str, Any]:
    """How many records there are, and which measurement has two of them."""
    from evalq.records import read_record

    keys = collections.Counter(
        record.reuse_key
        for record in map(read_record, root.glob("records/[!.]*/record.json"))
        if record.status == "complete"
    )
    return {"records": sum(keys.values()), "twice": [key for key, count in keys.items() if count > 1]}


def attempts_of(root: Path) -> dict[str, int]:
    """Measurements that were started more than once, with the number of starts."""
    from evalq.sweep.journal import read_entries

    entries = [entry for folder in root.glob("sweeps/*/") for entry in read_entries(folder)]
    return {entry.name: entry.attempt for entry in entries if entry.attempt > 1}


def difference(folder: Path, root: Path, schemes: str) -> dict[str, float]:
    """The same sweep here: largest difference of any metric of any cell, and of a document's loss (nats)."""
    from evalq.records import read_record, read_table

    here = folder / "local"
    subprocess.run(
        command(folder, True, [], here, schemes),
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": PATHS, "EVALQ_LEASES": str(folder / "leases"), "CI": "1"},
    )
    found: dict[str, list[Any]] = {}
    for store in (root, here):
        for file in store.glob("records/[!.]*/record.json"):
            record = read_record(file)
            if record.status == "complete":
                found.setdefault(record.cell.quant, []).append((record, file.parent))
    metrics, losses = [0.0], [0.0]
    for pair in found.values():
        (first, first_folder), (second, second_folder) = pair
        for task, score in first.tasks.items():
            for name, value in score.metrics.items():
                other = second.tasks[task].metrics[name]
                if value is not None and other is not None and value:
                    metrics.append(abs(other / value - 1.0))
        tables = [read_table(f, r, "documents") for r, f in ((first, first_folder), (second, second_folder))]
        rows = [table.column("nll_nats").to_pylist() for table in tables if table is not None]
        losses += [abs(a - b) for a, b in zip(*rows)]
    return {"relative_metric": max(metrics), "document_nats": max(losses)}


if __name__ == "__main__":
    sys.exit(main())
