"""What a sweep says at its end: which cells are worth having, and which one to ship, per model and GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from evalq.errors import EvalqError
from evalq.records import Record, write_text

if TYPE_CHECKING:
    from evalq.report.tradeoff import Placed, Point, Recommendation, Workload
    from evalq.sweep import SweepResult

PARETO_FILE = "pareto.json"
FIGURE_FILE = "pareto.plotly.json"


def show_tradeoff(result: SweepResult) -> list[dict[str, str | None]]:
    """Print the table and the advice, keep both beside the sweep's state; returns the advice. Nothing measured = nothing shown."""
    from rich.console import Console

    from evalq.report.pareto import pareto_data, pareto_figure, pareto_table
    from evalq.report.tradeoff import Workload

    console, workload = Console(), Workload()
    try:
        placed, advice = tradeoff(result, workload)
    except (EvalqError, OSError) as error:
        console.print(f"warning: no trade-off: {error}", markup=False, highlight=False)
        return []
    if not any(item.point.memory_bytes for item in placed):
        return []
    console.print(pareto_table(placed, advice, workload))
    if result.folder:
        folder = Path(result.folder)
        try:
            write_text(folder / PARETO_FILE, json.dumps(pareto_data(placed, advice, workload), indent=1) + "\n")
            write_text(folder / FIGURE_FILE, json.dumps(pareto_figure(placed, workload)) + "\n")
        except OSError as error:
            console.print(f"warning: {error.filename} cannot be written ({error.strerror})", highlight=False)
    return [{"model": item.model, "gpu": item.gpu, "ship": item.name, "text": item.text} for item in advice]


def tradeoff(result: SweepResult, workload: Workload) -> tuple[list[Placed], list[Recommendation]]:
    """Every measured cell of a sweep in its place. Errors: RecordError."""
    from evalq.judge.every_pair import pair_intervals
    from evalq.report.tradeoff import front, recommendations

    points, records = _points(result, workload)
    metrics = {cell.config.gate.metric for cell in result.cells}
    placed = front(points, pair_intervals(records, sorted(metrics)[0]))
    return placed, recommendations(placed, workload)


def _points(result: SweepResult, workload: Workload) -> tuple[list[Point], dict[str, tuple[Record, Path]]]:
    from evalq.report.tradeoff import point_of

    points: list[Point] = []
    records: dict[str, tuple[Record, Path]] = {}
    several = len({cell.config.engine.name for cell in result.cells}) > 1
    places = {(cell.config.model.name, cell.config.gpu.name) for cell in result.cells}
    seen: set[str] = set()
    for cell in result.cells:
        parts = [cell.config.model.name, cell.config.gpu.name] if len(places) > 1 else []
        tail = [cell.config.engine.name] if several else []
        baseline = cell.measured if cell.is_baseline else cell.baseline
        if baseline is not None and baseline.record.record_id not in seen:
            seen.add(baseline.record.record_id)
            name = _free(" ".join([*parts, "baseline", *tail]), records)
            records[name] = (baseline.record, baseline.folder)
            points.append(point_of(name, baseline.record, None, workload))
        if cell.measured is not None and not cell.is_baseline:
            name = _free(" ".join([*parts, cell.config.quant.name, *tail]), records)
            records[name] = (cell.measured.record, cell.measured.folder)
            points.append(point_of(name, cell.measured.record, cell.verdict, workload))
    return points, records


def _free(name: str, taken: dict[str, tuple[Record, Path]]) -> str:
    number, free = 2, name
    while free in taken:
        free, number = f"{name} ({number})", number + 1
    return free
