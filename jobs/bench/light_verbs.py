"""How long the verbs that need no engine take, from shell to answer: plan, gate, and the bootstrap behind a verdict.

    python jobs/bench/light_verbs.py              about half a minute; the fastest of --repeats runs counts

Bounds: a plan under 2 s, the whole matrix of models, schemes and GPUs under 3 s of processor time, `evalq gate` under 1 s, 10,000
bootstrap resamples over 62 documents and 300,000 tokens under 1 s. Ends with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "judge"), str(ROOT)]

import record_builder  # noqa: E402

from evalq.judge.paired import studentised_interval  # noqa: E402

Seconds = tuple[float, float]  # wall, processor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each (default 5)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one, other = pair(Path(folder))
        works: list[tuple[str, float, int, Callable[[], Seconds]]] = [
            ("evalq plan, one cell", 2.0, 0, lambda: evalq("plan", "+model=llama3.1-405b", "+quant=fp8-weights-kv", "+gpu=mi325x")),
            ("evalq plan, every cell", 3.0, 1, lambda: evalq("plan", "+model=all", "+quant=all", "+gpu=all")),
            ("evalq gate", 1.0, 0, lambda: evalq("gate", "--baseline", str(one), "--candidate", str(other))),
            ("10,000 resamples", 1.0, 0, resamples),
        ]  # fmt: skip
        missed = 0
        for name, bound, which, work in works:
            found = [work() for _ in range(given.repeats)]
            wall, cpu = (min(each[kind] for each in found) for kind in (0, 1))
            kept = (wall, cpu)[which] < bound
            missed += not kept
            told = f"bound {bound:.0f} s {('wall', 'processor')[which]}: {'kept' if kept else 'MISSED'}"
            print(f"{name:<24} wall {wall:6.3f} s   processor {cpu:6.3f} s   {told}", flush=True)
    return 1 if missed else 0


def pair(folder: Path) -> tuple[Path, Path]:
    """A baseline and a good candidate on disk."""
    rows = record_builder.baseline_rows()
    better = record_builder.damaged(rows, 0.003)
    record_builder.write(folder / "one", record_builder.record("baseline", rows), rows)
    record_builder.write(folder / "other", record_builder.record("good", better), better)
    return folder / "one", folder / "other"


def evalq(*arguments: str) -> Seconds:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "evalq", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def resamples() -> Seconds:
    rng = np.random.default_rng(6)
    documents = np.sort(rng.integers(0, 62, 300_000))
    nll = rng.normal(0.005, 0.3, 300_000)
    wall, cpu = time.perf_counter(), time.process_time()
    studentised_interval(
        np.bincount(documents, weights=nll), np.bincount(documents).astype(float), 0.95, resamples=10_000
    )
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    sys.exit(main())
