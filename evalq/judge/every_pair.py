"""Paired quality of every two cells of a sweep, for evalq.report.tradeoff: read once from the records' documents."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

from evalq.errors import RecordError
from evalq.judge.paired import as_increase, ratio
from evalq.judge.pairs import Tables, document_pairs
from evalq.judge.policy import METRIC_UNITS
from evalq.judge.tasks import PERPLEXITY_TASK
from evalq.records import Record


def pair_intervals(
    cells: Mapping[str, tuple[Record, Path]], metric: str = "word_perplexity", confidence: float = 0.95
) -> Callable[[str, str], tuple[float, float] | None]:
    """Intervals of the relative increase between any two cells, by name. Pairs that cannot be compared have none.

    Each pair keeps its own confidence; with many cells some pairs differ by chance, which here only means that fewer are tied.
    """
    tables: dict[str, Tables] = {}
    for name, (record, folder) in cells.items():
        if PERPLEXITY_TASK in record.tasks:
            tables[name] = Tables.read(record, folder)
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for first, second in itertools.permutations(tables, 2):
        try:
            pairs = document_pairs(tables[second], tables[first], PERPLEXITY_TASK)
            estimate = ratio(pairs.d, pairs.counts[METRIC_UNITS[metric]])
            low, high = estimate.interval(confidence)
        except RecordError:
            continue  # other documents or other tokens: another model
        increase = as_increase(metric, estimate.value, low, high, confidence, estimate.clusters, estimate.method)
        if increase.low is not None and increase.high is not None:
            found[first, second] = (increase.low, increase.high)
    return lambda first, second: found.get((first, second))
