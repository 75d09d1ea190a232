"""Identical load tests one after the other: how often two of them differ by more than the spread that they report.

    python jobs/bench/load_pairs.py --folder /tmp/pairs +model=smollm2-135m gpu=cpu gpu.cpu_kv_cache_gib=1 load=ladder \
        'load.concurrencies=[1,4]' load.waves=2 load.requests=8 load.peak_requests=0 load.input_tokens=64 load.output_tokens=16

Runs `python -m evalq +quant=baseline tasks=none ...` --runs times, each on an engine start and a record store of its own, and
compares each run with the next: a pair is within its spread when no compared figure of any level differs by more than the noise
that `evalq loads` would print. Resumes: a run whose record is there is not repeated. Ends with 0 when nine of ten figures (each
level of each pair) are.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from evalq.loads.compare import Compared, compare_loads  # noqa: E402
from evalq.loads.results import LoadResult  # noqa: E402
from evalq.records import read_record  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", help="as for python -m evalq")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=11, help="identical runs (default 11: ten pairs)")
    given = parser.parse_args()
    results = [measured(given.folder.absolute(), number, given.overrides) for number in range(given.runs)]
    pairs = [compare_loads(one, other) for one, other in pairwise(results)]
    print(table(pairs))
    within = sum(not any(row.differs for row in rows) for rows in pairs)
    per_figure = [not row.differs for rows in pairs for row in rows]
    answer = {
        "pairs": len(pairs),
        "within_in_every_figure": within,
        "figures_compared": len(per_figure),
        "figures_within": sum(per_figure),
        "share_within": round(sum(per_figure) / len(per_figure), 4),
    }
    print(json.dumps(answer))
    return 0 if answer["share_within"] >= 0.9 else 1


def measured(folder: Path, number: int, overrides: list[str]) -> LoadResult:
    """The one load of run `number`. Errors: CalledProcessError when evalq fails, ValueError when it left no load."""
    home = folder / f"run-{number:02d}"
    if not records(home):
        command = [sys.executable, "-m", "evalq", "+quant=baseline", "tasks=none", "tracking=off", *overrides]
        environment = {**os.environ, "EVALQ_HOME": str(home), "PYTHONPATH": str(ROOT), "CI": "1"}
        home.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        models = folder / "models"
        with open(home / "log", "wb") as log:
            subprocess.run([*command, f"paths.models={models}"], env=environment, stdout=log, stderr=log, check=False)
        print(f"run {number}: {time.monotonic() - began:.0f} s", flush=True)
    for file in records(home):
        for result in read_record(file.parent).load_results.values():
            return result
    raise ValueError(f"{home} holds no load; see {home / 'log'}")


def records(home: Path) -> list[Path]:
    return [file for file in home.glob("records/[!.]*/record.json") if read_record(file.parent).load_results]


def table(pairs: list[list[Compared]]) -> str:
    """Per level and figure: in how many pairs it stayed within the noise, the largest difference, and the median noise."""
    found: dict[tuple[str, str], list[Compared]] = collections.defaultdict(list)
    for rows in pairs:
        for row in rows:
            found[row.level, row.figure].append(row)
    lines = [
        "| level | figure | pairs within | largest difference | reported noise, median |",
        "|---|---|---:|---:|---:|",
    ]
    for (level, figure), rows in found.items():
        noises = sorted(row.noise for row in rows if row.noise is not None)
        noise = f"{100 * noises[len(noises) // 2]:.1f} %" if noises else "-"
        largest = max(abs(row.share - 1.0) for row in rows)
        within = sum(not row.differs for row in rows)
        lines.append(f"| {level} | {figure} | {within} of {len(rows)} | {100 * largest:.1f} % | {noise} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
