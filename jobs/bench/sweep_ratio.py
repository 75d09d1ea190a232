"""Six schemes in one sweep against six single commands, each with an empty record store: how much one shared baseline saves.

    python jobs/bench/sweep_ratio.py --folder /tmp/ratio              the CPU engine, few items; about 10 minutes on 2 idle cores
    python jobs/bench/sweep_ratio.py --folder /tmp/ratio --schemes fp8-kv,w4a16

The model is unpacked once before, for both sides. Made checkpoints are not shared: either side makes its own. Prints one line
per command and one JSON line at the end: seconds of each command, and the ratio. `--lock FILE` holds a lock around each
command, outside of its time; what is there from an earlier, interrupted start is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCHEMES = "fp8-kv,fp8-weights,fp8-weights-kv,int8-w8a8,w4a16,mixed-4-8"
FEW = ["tasks=perplexity", "load=off", "gate.required_tasks=[wikitext]", "gate.min_documents=2", "tracking=off"]


@contextlib.contextmanager
def held(file: Path | None) -> Iterator[None]:
    if file is None:
        yield
        return
    with open(file, "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(arguments: list[str], root: Path, models: Path) -> dict[str, object]:
    """One command on an empty store: its seconds, exit code, and how many engines it started."""
    shutil.rmtree(root, ignore_errors=True)
    command = [sys.executable, "-m", "evalq", *arguments, "+model=smollm2-135m", "gpu=cpu", f"paths.root={root}"]
    command += [f"paths.models={models}", *FEW]
    began = time.monotonic()
    with open(root.with_suffix(".log"), "wb") as log:
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        code = subprocess.run(
            command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": paths, "CI": "1"}
        ).returncode
    seconds = time.monotonic() - began
    records = [
        file for file in root.glob("records/[!.]*/record.json") if '"complete"' in file.read_text(encoding="utf-8")
    ]
    baselines = sum("--baseline--" in str(file) for file in records)
    return {"seconds": round(seconds, 1), "exit_code": code, "records": len(records), "baselines": baselines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--lock", type=Path)
    given = parser.parse_args()
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    from evalq.app import compose
    from evalq.quantize import source_checkpoint

    models = folder / "models"
    source_checkpoint(compose(["+model=smollm2-135m", "+quant=baseline", "gpu=cpu"]).model, models)
    limit = f"tasks.perplexity_limit={given.documents}"
    wanted = {"sweep": ["sweep", f"+quant={given.schemes}", limit]}
    wanted |= {scheme: [f"+quant={scheme}", limit] for scheme in given.schemes.split(",")}
    for name, arguments in wanted.items():
        note = folder / f"{name}.json"
        if not note.exists():
            with held(given.lock):
                told = run(arguments, folder / name, models)
            note.write_text(json.dumps(told), encoding="utf-8")
        print(name, note.read_text(encoding="utf-8"), flush=True)
    times = {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in wanted}
    singles = sum(times[name]["seconds"] for name in wanted if name != "sweep")
    ratio = times["sweep"]["seconds"] / singles
    print(json.dumps({"ratio": round(ratio, 3), "sweep": times["sweep"], "singles_seconds": round(singles, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
