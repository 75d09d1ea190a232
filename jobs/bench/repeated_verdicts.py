"""How often some of many searches on the same kept documents passes wrongly, with the levels of `evalq.judge.repeated`.

    OMP_NUM_THREADS=1 python jobs/bench/repeated_verdicts.py --draws 20000 --out reports/repeated-verdicts.md

Twelve series of one candidate each, all exactly at the limit (so that every pass is wrong), judged on the same documents by the
gate's own interval; populations as in evalq/judge/simulation.py. Candidates of one search resemble each other: `correlation` is
that of their damage per document. Takes about three minutes with 20,000 draws on one core.
"""

from __future__ import annotations

import argparse
import datetime
import math
from pathlib import Path

import numpy as np

from evalq import __version__
from evalq.judge.repeated import FIRST_SHARE, confidence_at, level
from evalq.judge.simulation import LOG_WORDS, TAILS, Draws, gate_bounds
from evalq.records import write_text

SERIES = 12
CONFIDENCE = 0.95
NOISE = 0.004  # nats per word of a 1,000-word document; every interval scales with it, so no rate depends on it
LAWS = ("normal", "t3", "skewed", "one in ten", "gamma", "very skewed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5000, help="simulated sets of documents per row (default 5000)")
    parser.add_argument(
        "--documents", type=int, nargs="+", default=[20, 33, 62], help="kept documents (default 20 33 62)"
    )
    parser.add_argument(
        "--correlation", type=float, nargs="+", default=[0.0, 0.7], help="between candidates' damage (default 0 0.7)"
    )
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", type=Path, help="Markdown file to write (default: standard output alone)")
    arguments = parser.parse_args()
    rows = []
    for documents in arguments.documents:
        for law in LAWS:
            for correlation in arguments.correlation:
                rows.append(row(documents, law, correlation, arguments.draws, np.random.default_rng(arguments.seed)))
                print(rows[-1], flush=True)
    if arguments.out:
        write_text(arguments.out, report(rows, arguments.draws))
    return 0


def row(documents: int, law: str, correlation: float, draws: int, rng: np.random.Generator) -> str:
    """One line of the table: rates of wrong passes in percent."""
    series = candidates(documents, law, correlation, draws, rng)
    alone = passes(series[0], CONFIDENCE)
    levels = [level([False] * number) for number in range(SERIES)]
    with_levels = np.any([passes(one, confidence_at(CONFIDENCE, part)) for one, part in zip(series, levels)], axis=0)
    without = np.any([passes(one, confidence_at(CONFIDENCE, FIRST_SHARE)) for one in series], axis=0)
    shown = " | ".join(f"{100 * found.mean():.2f}" for found in (alone, with_levels, without))
    return f"| {documents} | {law} | {correlation:g} | {shown} |"


def candidates(documents: int, law: str, correlation: float, draws: int, rng: np.random.Generator) -> list[Draws]:
    """Paired losses of SERIES candidates on the same documents, each with a true effect of 0."""
    size = (draws, documents)
    words = np.maximum(np.round(np.exp(rng.normal(*LOG_WORDS, size))), 20.0)
    spread = NOISE * np.sqrt(0.5 + 0.5 * 1000.0 / words)
    common = TAILS[law](rng, size)
    return [
        Draws(
            words * spread * (math.sqrt(correlation) * common + math.sqrt(1 - correlation) * TAILS[law](rng, size)),
            words,
        )
        for _ in range(SERIES)
    ]


def passes(data: Draws, confidence: float) -> np.ndarray:
    """(draws,): whether the upper bound is within a limit that the truth is exactly at."""
    return np.asarray(gate_bounds(data, confidence)[1] <= 0.0)


def report(rows: list[str], draws: int) -> str:
    error = 100 * math.sqrt(0.025 * 0.975 / draws)
    return f"""# Wrong passes of repeated searches on the same kept documents

{datetime.date.today()}, evalq {__version__}: `python jobs/bench/repeated_verdicts.py --draws {draws}`.

Percent of {draws:,} simulated sets of documents (standard error about {error:.2f} at 2.5 %) on which at least one passes that sits
exactly at the limit: one verdict at 95 % (promises 2.5), {SERIES} series with the levels of
[the design](../docs/design/repeated-verdicts.md), and {SERIES} with the first level each time, as without notes. Correlation:
between the damage that different candidates do to a document.

| documents | damage | correlation | one | {SERIES} with levels | {SERIES} without |
|---:|---|---:|---:|---:|---:|
{chr(10).join(rows)}
"""


if __name__ == "__main__":
    raise SystemExit(main())
