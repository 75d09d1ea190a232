"""A real engine killed within a group of tasks, and the same command again: what is kept, what is computed anew, and the result.

    EVALQ_DATA=../shared/data python jobs/bench/kill_and_resume.py --folder /tmp/cut +model=smollm2-135m gpu=cpu data=local \
        tasks.perplexity_limit=16                                                           about 6 minutes on 2 cores

Measures the baseline undisturbed; then again in another store, with SIGKILL to the engine's process once --after sequences of the
group are on disk; then the same command a third time. Prints one JSON line: sequences in all, on disk when the kill came, seconds
of scoring undisturbed and after the kill, largest difference of a token's log-probability (nats) and both perplexities.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from evalq.measure.groups import PARTIAL_FOLDER  # noqa: E402
from evalq.records import Record, read_record, read_table  # noqa: E402

ALWAYS = ["+quant=baseline", "tasks=perplexity", "load=off", "gate.required_tasks=[wikitext]", "tracking=off"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", help="as for python -m evalq")
    parser.add_argument("--folder", type=Path, required=True, help="gets both stores; must not hold them yet")
    parser.add_argument("--after", type=int, default=8, help="sequences on disk when the kill comes (default 8)")
    given = parser.parse_args()
    folder = given.folder.absolute()
    whole, cut = folder / "whole", folder / "cut"
    start(whole, given.overrides).wait()
    process = start(cut, given.overrides)
    kept = kill_after(process, cut, given.after)
    code = process.wait()
    again = start(cut, given.overrides).wait()
    (first, first_at), (second, second_at) = complete(whole), complete(cut)
    print(
        json.dumps({"kept_at_kill": kept, "exit_codes": [code, again], **compared(first, first_at, second, second_at)})
    )
    return 0 if code == 5 and kept else 1


def start(home: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "evalq", *ALWAYS, *overrides, f"paths.models={home.parent / 'models'}"]
    environment = {**os.environ, "EVALQ_HOME": str(home), "PYTHONPATH": str(ROOT), "CI": "1"}
    with open(home / "log", "ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def kill_after(process: subprocess.Popen[bytes], home: Path, wanted: int) -> int:
    """SIGKILL to the engine's process when so many sequences are on disk; how many there were."""
    while process.poll() is None:
        kept = on_disk(home)
        if kept >= wanted:
            for child in psutil.Process(process.pid).children(recursive=True):
                if "evalq.measure.worker" in child.cmdline():
                    child.send_signal(signal.SIGKILL)
            return kept
        time.sleep(0.05)
    return 0


def on_disk(home: Path) -> int:
    count = 0
    for file in home.glob(f"records/.work/*/{PARTIAL_FOLDER}/*/*.npz"):
        try:
            with np.load(file, allow_pickle=False) as content:
                count += len(content["keys"])
        except (OSError, ValueError):
            continue  # being moved by the engine
    return count


def complete(home: Path) -> tuple[Record, Path]:
    for file in home.glob("records/[!.]*/record.json"):
        record = read_record(file.parent)
        if record.status == "complete":
            return record, file.parent
    raise SystemExit(f"no complete record in {home}; see {home / 'log'}")


def compared(first: Record, first_at: Path, second: Record, second_at: Path) -> dict[str, Any]:
    tables = [read_table(place, record, "tokens") for record, place in ((first, first_at), (second, second_at))]
    one, other = (table["logprob"].to_numpy().astype(float) for table in tables if table is not None)
    return {
        "sequences": len(set(tables[0]["doc_id"].to_pylist())) if tables[0] is not None else None,
        "tokens": len(one),
        "largest_difference_nats": float(np.abs(one - other).max()),
        "mean_difference_nats": float((one - other).mean()),
        "word_perplexity": [record.tasks["wikitext"].metrics["word_perplexity"] for record in (first, second)],
        "scoring_seconds": [record.stage_seconds["score wikitext"] for record in (first, second)],
    }


if __name__ == "__main__":
    sys.exit(main())
