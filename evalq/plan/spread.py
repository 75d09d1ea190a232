"""Spreads of paired differences, for the planner: from earlier verdicts, or guessed from a baseline alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evalq.plan.quantiles import t_quantile
from evalq.records import Estimate, Record, Verdict, read_table

# A pair cancels most of what makes documents differ: 0.07 % paired against 0.9 % unpaired over wikitext-2.
PAIRED_SHARE = 0.07 / 0.9
CHOICE_NOISE_NATS = 0.3  # assumed standard deviation that a scheme adds to the log-probability of one ending

Spreads = dict[str, tuple[float, str]]


def spreads_from_verdicts(verdicts: Iterable[Verdict]) -> Spreads:
    """Largest spread seen per task in earlier pairs: half width / t * sqrt(n) of each check's interval."""
    found: Spreads = {}
    for verdict in verdicts:
        for check in verdict.checks:
            task = "wikitext" if check.metric.endswith("_perplexity") else check.metric.split(" ")[0]
            spread = _spread(check.estimate, relative=task == "wikitext")
            if spread is not None and spread > found.get(task, (0.0, ""))[0]:
                found[task] = (spread, f"of an earlier pair, {verdict.candidate_id}")
    return {task: kept for task, kept in found.items() if task != "condition"}


def _spread(estimate: Estimate | None, relative: bool) -> float | None:
    if estimate is None or estimate.low is None or estimate.high is None or estimate.n < 2:
        return None
    low, high = (math.log1p(x) if relative else x for x in (estimate.low, estimate.high))
    t = t_quantile(0.5 + min(estimate.confidence, 1.0 - 1e-9) / 2.0, estimate.n - 1.0)
    return (high - low) / (2.0 * t) * math.sqrt(estimate.n)


def spreads_from_baseline(record: Record, folder: Path) -> Spreads:
    """Guesses from what a baseline record holds: its documents' spread, and how near its items are to flipping.

    Errors: RecordError for a damaged table.
    """
    found: Spreads = {}
    documents = read_table(folder, record, "documents")
    if documents is not None and len(documents) >= 2:
        nll, words = (np.asarray(documents.column(name).to_numpy(), float) for name in ("nll_nats", "words"))
        residual = nll - words * nll.sum() / words.sum()
        unpaired = math.sqrt(float(np.sum(residual**2)) / (len(nll) - 1) * len(nll) ** 2) / float(words.sum())
        found["wikitext"] = (unpaired * PAIRED_SHARE, "guessed from the baseline's documents")
    items = read_table(folder, record, "items")
    if items is not None:
        gaps = _gaps(items.column("task").to_pylist(), items.column("choice_logprobs").to_pylist())
        for task, values in gaps.items():
            found[task] = (math.sqrt(expected_flips(np.array(values))), "guessed from the baseline's near ties")
    return found


def _gaps(tasks: list[str], choices: list[list[float] | None]) -> dict[str, list[float]]:
    """Difference between the best and the second log-probability of each item, by task; nats."""
    found: dict[str, list[float]] = {}
    for task, values in zip(tasks, choices, strict=True):
        if values is not None and len(values) >= 2:
            best, second = sorted(values, reverse=True)[:2]
            found.setdefault(task, []).append(best - second)
    return found


def expected_flips(gaps: NDArray[np.float64], noise: float = CHOICE_NOISE_NATS) -> float:
    """Share of items whose best ending changes when each log-probability moves by normal noise; gaps in nats, (items,)."""
    z = gaps / (noise * math.sqrt(2.0))
    return float(np.mean([0.5 * math.erfc(x / math.sqrt(2.0)) for x in z])) if len(gaps) else 0.0
