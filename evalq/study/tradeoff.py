"""Which cells of a study are worth having, and which scheme may be shipped, in words (rules: `evalq.report.tradeoff`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from evalq.errors import RecordError
from evalq.judge.every_pair import pair_intervals
from evalq.judge.pairs import Tables
from evalq.records import Record
from evalq.report.page.view import WORKLOAD, Candidate
from evalq.report.tradeoff import PairInterval, Placed, Point, front, point_of, recommendations

Place = tuple[Record, Path]


def placed_cells(baseline: Place | None, candidates: Sequence[Candidate]) -> list[Placed]:
    """Baseline and every complete candidate, placed. Where no cell has a speed, quality and memory alone decide."""
    cells = {"baseline": baseline} if baseline else {}
    cells |= {one.name: (one.record, one.folder) for one in candidates if one.record.status == "complete"}
    verdicts = {one.name: one.verdict for one in candidates}
    points = [point_of(name, record, verdicts.get(name), WORKLOAD) for name, (record, _) in cells.items()]
    if all(point.speed is None for point in points):
        points = [dataclasses.replace(point, speed=1.0) for point in points]
        return [_without_speed(item) for item in front(points, _quality(cells))]
    return front(points, _quality(cells))


def _quality(cells: dict[str, Place]) -> PairInterval:
    """Paired intervals of every two cells whose documents can be read."""
    readable = {}
    for name, (record, folder) in cells.items():
        try:
            Tables.read(record, folder)
        except RecordError:
            continue
        readable[name] = (record, folder)
    return pair_intervals(readable)


def _without_speed(item: Placed) -> Placed:
    return dataclasses.replace(item, point=dataclasses.replace(item.point, speed=None), reason="speed was not measured")


def recommendation(candidates: Sequence[Candidate], placed: Sequence[Placed]) -> str:
    """What may be shipped and why, in one or a few sentences."""
    if not candidates:
        return "Only the baseline was measured; there is no scheme to judge."
    if all(one.verdict is None for one in candidates):
        return "These records measured memory and speed only; nothing here says that a scheme may be shipped."
    known: list[Point] = [item.point for item in placed]
    able = [item if item.point.speed else _as_fast(item) for item in placed]
    said = [one.text for one in recommendations(able, WORKLOAD)] if known else []
    return " ".join(said) or "No cell could be placed, so nothing can be advised."


def _as_fast(item: Placed) -> Placed:
    return dataclasses.replace(item, point=dataclasses.replace(item.point, speed=1.0))
