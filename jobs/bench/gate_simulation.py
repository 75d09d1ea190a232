"""Error rates and coverage of the gate, as a table in Markdown.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python jobs/bench/gate_simulation.py --draws 10000 --out reports/gate-simulation.md

One core, a few minutes at 10,000 draws. Needs evalq installed or the repository root on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from evalq import __version__
from evalq.judge.fidelity import mean_estimate, quantile_estimate
from evalq.judge.simulation import (
    EFFECTS,
    METHODS,
    NOISES,
    REPORTED,
    TAILS,
    Draws,
    batch_intervals,
    draw,
    gate_bounds,
    rates,
    sequential_bounds,
)
from evalq.judge.tasks import tango_interval, wilson_interval
from evalq.plan.quantiles import normal_quantile

MAIN_TAILS = ("normal", "t3", "skewed", "very skewed")
DOCUMENTS = (10, 20, 62, 500)
LOOKS = ((20, 40, 62), (62, 250, 500))
NOISE = 0.004  # nats a word; a standard error near 0.07 % with 62 documents
CONFIDENCE = 0.95
TARGET, LIMIT = 0.01, 0.015


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000, help="simulated comparisons per row (default: 10000)")
    parser.add_argument("--resamples", type=int, default=1999, help="bootstrap resamples per interval (default: 1999)")
    parser.add_argument("--seed", type=int, default=20, help="of the random numbers (default: 20)")
    parser.add_argument("--out", metavar="FILE", help="where the report goes (default: standard output)")
    arguments = parser.parse_args()
    started = time.process_time()
    lines = [*coverage_lines(arguments), *before_lines(), *fixed_lines(), *sequential_lines(arguments)]
    lines += [*other_lines(arguments), *task_lines(arguments), *fidelity_lines(arguments)]
    seconds = time.process_time() - started
    text = "\n".join([*head(arguments, seconds), *lines, ""])
    if arguments.out:
        Path(arguments.out).write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


def head(arguments: argparse.Namespace, seconds: float) -> list[str]:
    error = 100 * (0.025 * 0.975 / arguments.draws) ** 0.5
    return [
        "# How often the gate is wrong",
        "",
        f"`OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python jobs/bench/gate_simulation.py --draws {arguments.draws} "
        f"--resamples {arguments.resamples} --seed {arguments.seed}`",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {seconds:.0f} s of processor time; evalq {__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}.",
        "",
        f"Target {TARGET:.1%}, limit {LIMIT:.1%}, two-sided confidence {CONFIDENCE:.0%}: each side is meant to err in "
        f"2.5 % of cases; the requirement is at most 5 %. Monte Carlo error of a rate near 2.5 %: ±{error:.2f} points "
        "(one standard deviation). Populations are described in evalq/judge/simulation.py. Figures in percent.",
        "",
        "A false pass is a PASS when the truth is at or above the target, or a PASS with a warning when it is at or "
        "above the limit; a false fail is a FAIL when the truth is at or below the limit. **Bold**: outside the requirement.",
    ]


def samples(
    arguments: argparse.Namespace, tail: str, documents: int, kind: str = "mixed"
) -> tuple[Draws, np.random.Generator]:
    rng = np.random.default_rng([arguments.seed, list(TAILS).index(tail), documents, NOISES.index(kind)])
    return draw(tail, documents, arguments.draws, NOISE, rng, kind), rng


def coverage_lines(arguments: argparse.Namespace) -> list[str]:
    """Coverage of each interval, and how often the truth lies above its upper bound; fills the cache of bounds."""
    lines = ["", "## Coverage of the intervals, and share of draws with the truth above the upper bound", ""]
    lines += [f"Reported by evalq: {' and '.join(REPORTED)}. The others were tried and are reported nowhere.", ""]
    lines += ["| tail | documents | " + " | ".join(METHODS) + " |", "|---|---:|" + "---:|" * len(METHODS)]
    for tail in MAIN_TAILS:
        for documents in DOCUMENTS:
            data, rng = samples(arguments, tail, documents)
            found = batch_intervals(data, CONFIDENCE, arguments.resamples, rng)
            BOUNDS[tail, documents] = {name: found[name] for name in ("gate", "outer")}
            lines.append(f"| {tail} | {documents} | " + " | ".join(coverage(*found[name]) for name in METHODS) + " |")
            print(lines[-1], file=sys.stderr)
    return lines


BOUNDS: dict[tuple[str, int], dict[str, tuple[np.ndarray, np.ndarray]]] = {}


def before_lines() -> list[str]:
    """Power and false passes of the interval that decided before, beside those of the gate."""
    lines = ["", "## Before (outer) and after (gate), one look", ""]
    lines += ["| tail | documents | interval | PASS at 0 % | PASS at 0.5 % | FAIL at 3 % | false pass | false fail |"]
    lines += ["|---|---:|---|---:|---:|---:|---:|---:|"]
    for (tail, documents), bounds in BOUNDS.items():
        for name in ("outer", "gate"):
            look = [(documents, *bounds[name])]
            none, half, most = (rates(look, effect, TARGET, LIMIT) for effect in (0.0, 0.005, 0.03))
            wrong = rates(look, TARGET, TARGET, LIMIT).passed, rates(look, LIMIT, TARGET, LIMIT).failed
            power = (f"{100 * x:.1f}" for x in (none.passed, half.passed, most.failed))
            cells = [tail, str(documents), name, *power, *(marked(x) for x in wrong)]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def marked(share: float) -> str:
    return f"{100 * share:.2f}" if share <= 0.05 else f"**{100 * share:.2f}**"


def other_lines(arguments: argparse.Namespace) -> list[str]:
    """The gate in populations that its correction was not built on."""
    lines = ["", "## Other populations: coverage, truth above the upper bound, truth below the lower bound", ""]
    lines += ["| noise | tail | " + " | ".join(f"{count} documents" for count in DOCUMENTS) + " |"]
    lines += ["|---|---|" + "---:|" * len(DOCUMENTS)]
    for kind in NOISES:
        for tail in TAILS if kind in ("mixed", "equal") else MAIN_TAILS:
            if kind == "mixed" and tail in MAIN_TAILS:
                continue
            cells = [three(*gate_bounds(samples(arguments, tail, n, kind)[0], CONFIDENCE)) for n in DOCUMENTS]
            lines.append(f"| {kind} | {tail} | " + " | ".join(cells) + " |")
            print(lines[-1], file=sys.stderr)
    return lines


def three(low: np.ndarray, high: np.ndarray) -> str:
    return f"{coverage(low, high)[:-1]}, {marked(float(np.mean(low > 0)))})"


def coverage(low: np.ndarray, high: np.ndarray) -> str:
    covered, above = 100 * float(np.mean((low <= 0) & (high >= 0))), 100 * float(np.mean(high < 0))
    word = f"{covered:.1f}" if 93.0 <= covered <= 97.0 else f"**{covered:.1f}**"
    return f"{word} (" + (f"{above:.1f}" if above <= 5.0 else f"**{above:.1f}**") + ")"


def fixed_lines() -> list[str]:
    lines = ["", "## One look", "", *rate_head()]
    for (tail, documents), bounds in BOUNDS.items():
        lines += rate_rows(tail, str(documents), [(documents, *bounds["gate"])])
    return lines


def sequential_lines(arguments: argparse.Namespace) -> list[str]:
    lines = ["", "## Several looks (alpha spent as the cube of the share of documents)", "", *rate_head()]
    for tail in MAIN_TAILS:
        for looks in LOOKS:
            bounds = sequential_bounds(samples(arguments, tail, looks[-1])[0], looks, CONFIDENCE)
            lines += rate_rows(tail, "/".join(map(str, looks)), bounds)
            print(lines[-1], file=sys.stderr)
    return lines


def rate_head() -> list[str]:
    names = (
        "tail",
        "documents",
        "true %",
        "PASS",
        "warned",
        "INCONCLUSIVE",
        "FAIL",
        "false pass",
        "false fail",
        "documents used",
    )
    return ["| " + " | ".join(names) + " |", "|---|---|" + "---:|" * (len(names) - 2)]


def rate_rows(tail: str, documents: str, bounds: list[tuple[int, np.ndarray, np.ndarray]]) -> list[str]:
    rows = []
    for effect in EFFECTS:
        found = rates(bounds, effect, TARGET, LIMIT)
        wrong = [found.false_pass(TARGET, LIMIT), found.false_fail(LIMIT)]
        shares = [f"{100 * x:.1f}" for x in (found.passed, found.warned, found.inconclusive, found.failed)]
        cells = [tail, documents, f"{100 * effect:.1f}", *shares, *(marked(x) for x in wrong), f"{found.documents:.0f}"]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def task_lines(arguments: argparse.Namespace) -> list[str]:
    """Coverage of the intervals of task accuracies, over items that change sides with given rates."""
    lines = ["", "## Intervals of task accuracies", ""]
    lines += ["| items | right to wrong % | wrong to right % | difference (Tango) | flips (Wilson) |"]
    lines += ["|---:|---:|---:|---:|---:|"]
    rng = np.random.default_rng(arguments.seed)
    for items in (100, 817, 1000, 10_042):
        for lost, won in ((0.0, 0.0), (0.01, 0.01), (0.03, 0.02), (0.08, 0.05)):
            counts = rng.multinomial(items, [lost, won, 1 - lost - won], arguments.draws)
            lines.append(task_row(items, lost, won, counts))
    return lines


def task_row(items: int, lost: float, won: float, counts: np.ndarray) -> str:
    inside = {"difference": 0, "flips": 0}
    pairs, repeats = np.unique(counts[:, :2], axis=0, return_counts=True)
    for (a, b), times in zip(pairs.tolist(), repeats.tolist(), strict=True):
        low, high = tango_interval(a, b, items, CONFIDENCE)
        inside["difference"] += times * (low <= won - lost <= high)
        low, high = wilson_interval(a + b, items, CONFIDENCE)
        inside["flips"] += times * (low <= lost + won <= high)
    shares = [100 * inside[name] / len(counts) for name in ("difference", "flips")]
    words = [f"{share:.1f}" if 93 <= share <= 97 else f"**{share:.1f}**" for share in shares]
    return f"| {items} | {100 * lost:.0f} | {100 * won:.0f} | {words[0]} | {words[1]} |"


QUANTILES = (0.5, 0.95, 0.99, 0.999)
SPREADS = (0.3, 1.5)  # of ln(divergence): between documents, between tokens


def fidelity_lines(arguments: argparse.Namespace) -> list[str]:
    """Coverage of the means and quantiles of per-token values that are lognormal and alike within a document."""
    draws = max(arguments.draws // 20, 1)
    names = ["mean", "share of 2 %", *(f"quantile {q:g}" for q in QUANTILES)]
    lines = ["", f"## Intervals of per-token figures ({draws} draws)", ""]
    lines += ["| documents | " + " | ".join(names) + " |", "|---:|" + "---:|" * len(names)]
    for documents in (20, 62, 500):
        rng = np.random.default_rng([arguments.seed, documents])
        inside = np.mean([fidelity_draw(documents, rng) for _ in range(draws)], axis=0)
        words = (f"{100 * x:.1f}" if 0.93 <= x <= 0.97 else f"**{100 * x:.1f}**" for x in inside)
        lines.append(f"| {documents} | " + " | ".join(words) + " |")
        print(lines[-1], file=sys.stderr)
    return lines


def fidelity_draw(documents: int, rng: np.random.Generator) -> list[bool]:
    """Whether each interval holds the truth, in one draw of documents of about 100 tokens, as uneven as wikitext-2's."""
    tokens = np.maximum(np.exp(rng.normal(math.log(100.0), 1.06, documents)).astype(int), 5)
    document = np.repeat(np.arange(documents), tokens)
    scale = math.hypot(*SPREADS)
    logs = rng.normal(0.0, SPREADS[0], documents)[document] + rng.normal(0.0, SPREADS[1], len(document))
    values = np.exp(logs)
    rare = (logs > scale * normal_quantile(0.98)).astype(np.float64)
    found = [
        (mean_estimate("mean", values, document, CONFIDENCE), math.exp(scale**2 / 2.0)),
        (mean_estimate("share", rare, document, CONFIDENCE), 0.02),
    ]
    for q in QUANTILES:
        truth = math.exp(scale * normal_quantile(q))
        found.append((quantile_estimate("quantile", values, document, q, CONFIDENCE), truth))
    return [e.low is not None and e.high is not None and e.low <= truth <= e.high for e, truth in found]


if __name__ == "__main__":
    sys.exit(main())
