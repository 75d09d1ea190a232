"""The KV cache of a study: whether scores read it, damage by position on the paths that do, needles found by both models."""

from __future__ import annotations

from pathlib import Path

from evalq.errors import RecordError
from evalq.judge.kv import needle_grid, path_pairs, position_buckets
from evalq.records import Record
from evalq.report.page.view import CacheView, PathBucket
from evalq.study.gather import brief

Place = tuple[Record, Path]
PATHS = ("decode", "long")


def cache_of(baseline: Place, candidate: Place, confidence: float = 0.95) -> CacheView | None:
    """What a candidate's record says of its KV cache beside the baseline's; None where neither was asked."""
    first, second = baseline[0].kv, candidate[0].kv
    if second is None:
        return None
    missing = list(second.notes)
    buckets = {}
    for path in PATHS:
        if first is not None and getattr(first, path) is not None and getattr(second, path) is not None:
            found = _buckets(baseline, candidate, path, confidence, missing)
            if found:
                buckets[path] = found
    grids = [_grid(side, missing) for side in (baseline, candidate)]
    return CacheView(second, buckets, grids[0], grids[1], missing)


def _buckets(baseline: Place, candidate: Place, path: str, confidence: float, missing: list[str]) -> list[PathBucket]:
    try:
        found = position_buckets(path_pairs(baseline, candidate, path), confidence)
    except RecordError as error:
        missing.append(brief(error, baseline[1], candidate[1]))
        return []
    return [PathBucket(b.low, b.high - 1, b.tokens, b.increase, b.mean_kld, b.same_top1) for b in found]


def _grid(side: Place, missing: list[str]) -> dict[tuple[int, int], tuple[int, int]]:
    report = side[0].kv
    if report is None or report.needle is None:
        return {}
    try:
        return needle_grid(side)
    except RecordError as error:
        missing.append(brief(error, side[1]))
        return {}
