"""Summary of a study for its parent run: a table of all cells and a plot of accuracy against memory."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evalq.errors import RecordError
from evalq.records import read_record
from evalq.tracking.content import KV_TOKENS, WEIGHTS_AND_KV, metrics_of, verdict_beside
from evalq.tracking.manifest import Manifest

COLUMNS = {  # heading -> metric, format
    "word perplexity": ("quality/wikitext_word_perplexity", ".3f"),
    "hellaswag acc_norm": ("quality/hellaswag_acc_norm", ".3f"),
    "truthfulqa mc2": ("quality/truthfulqa_mc2_acc", ".3f"),
    "weights GiB": ("memory/weight_gib", ".3f"),
    "KV bytes/token": ("memory/kv_bytes_per_token", ",.0f"),
    "output tokens/s": ("load/output_tokens_per_second", ",.0f"),
}
QUALITY = "quality/wikitext_word_perplexity"
MEMORY = "memory/weight_gib"
INCREASE = "quality/perplexity_increase_percent"
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0}
AXIS_LABELS = ("weights, GiB", f"weights and KV cache of {KV_TOKENS:,} tokens, GiB")


@dataclass(frozen=True)
class Row:
    """One cell of the summary."""

    cell: str
    is_baseline: bool
    status: str
    verdict: str
    record_id: str
    metrics: dict[str, float]


def rows_of(manifest: Manifest, records: Path) -> list[Row]:
    """Baseline first, the others by their weights, largest first. A record that cannot be read is left out."""
    rows = []
    for cell in manifest.cells:
        folder = records / cell.folder
        try:
            record, verdict = read_record(folder), verdict_beside(folder)
        except RecordError:
            continue
        word = "baseline" if record.cell.is_baseline else verdict.status if verdict else "none"
        metrics = metrics_of(record, verdict).values
        rows.append(Row(record.cell.quant, record.cell.is_baseline, record.status, word, record.record_id, metrics))
    return sorted(rows, key=lambda row: (not row.is_baseline, -row.metrics.get(MEMORY, math.inf), row.cell))


def counts(rows: list[Row]) -> dict[str, float]:
    """How many cells came to which end."""
    candidates = [row for row in rows if not row.is_baseline]
    ends = ("PASS", "FAIL", "INCONCLUSIVE", "INVALID", "SUSPECT")
    return {
        "cells": float(len(rows)),
        **{f"{end.lower()}_cells": float(sum(row.verdict == end for row in candidates)) for end in ends},
        "unfinished_cells": float(sum(row.status != "complete" for row in rows)),
    }


def markdown(rows: list[Row]) -> str:
    """The verdicts in one line (all that MLflow shows of a description at first), then the table of all cells."""
    verdicts = [f"**{row.cell}** {row.verdict}" for row in rows if not row.is_baseline]
    head = ["cell", "verdict", "perplexity increase % [interval]", *COLUMNS]
    lines = [" · ".join(verdicts) or "No candidate yet.", "", _line(head), _line(["---"] * len(head))]
    for row in rows:
        verdict = row.verdict if row.status == "complete" else f"{row.verdict} ({row.status})"
        figures = [_figure(row.metrics.get(metric), form) for metric, form in COLUMNS.values()]
        lines.append(_line([row.cell, verdict, _increase(row.metrics), *figures]))
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _increase(metrics: dict[str, float]) -> str:
    if INCREASE not in metrics:
        return "–"
    low, high = metrics.get(f"{INCREASE}_low"), metrics.get(f"{INCREASE}_high")
    return f"{metrics[INCREASE]:+.2f} [{_figure(low, '+.2f')}, {_figure(high, '+.2f')}]"


def write(folder: Path, study: str, rows: list[Row]) -> None:
    """summary.md, summary.json and, where there is something to draw, accuracy_against_memory.png."""
    (folder / "summary.md").write_text(f"# {study}\n\n{markdown(rows)}", encoding="utf-8")
    data = {"study": study, "cells": [asdict(row) for row in rows]}
    (folder / "summary.json").write_text(json.dumps(data, indent=1, allow_nan=False), encoding="utf-8")
    drawn = [row for row in rows if QUALITY in row.metrics and MEMORY in row.metrics]
    if drawn:
        _plot(folder / "accuracy_against_memory.png", study, drawn)


def _plot(file: Path, study: str, rows: list[Row]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, metric, label in zip(panels, (MEMORY, WEIGHTS_AND_KV), AXIS_LABELS, strict=True):
        _panel(axes, metric, [row for row in rows if metric in row.metrics])
        axes.set_xlabel(label)
    panels[0].set_ylabel("word perplexity, wikitext\n(bars: interval of the paired increase)")
    figure.suptitle(study)
    figure.savefig(file)


def _panel(axes: Any, memory: str, rows: list[Row]) -> None:
    baseline = next((row.metrics[QUALITY] for row in rows if row.is_baseline), None)
    middle = (min(row.metrics[memory] for row in rows) + max(row.metrics[memory] for row in rows)) / 2 if rows else 0.0
    for row in rows:
        x, y = row.metrics[memory], row.metrics[QUALITY]
        axes.errorbar(x, y, yerr=_bars(row, baseline), fmt="s" if row.is_baseline else "o", capsize=4)
        label = row.cell if row.is_baseline else f"{row.cell}: {row.verdict}"
        side = (-8, "right") if x > middle else (8, "left")  # labels point inwards and are never cut off
        axes.annotate(
            label, (x, y), xytext=(side[0], 6), textcoords="offset points", fontsize=10, ha=side[1], bbox=LABEL_BOX
        )
    front = pareto([(row.metrics[memory], row.metrics[QUALITY]) for row in rows])
    if front:
        axes.plot(*zip(*front, strict=True), linestyle=":", color="grey", zorder=0, label="no cell is better in both")
        axes.legend(fontsize=8)
    axes.margins(0.15)
    axes.grid(alpha=0.3)


def _bars(row: Row, baseline: float | None) -> Any:
    """Distances below and above a point, from the paired interval applied to the baseline. None without one."""
    low, high = row.metrics.get(f"{INCREASE}_low"), row.metrics.get(f"{INCREASE}_high")
    if baseline is None or low is None or high is None:
        return None
    y = row.metrics[QUALITY]
    return [[max(y - baseline * (1 + low / 100), 0.0)], [max(baseline * (1 + high / 100) - y, 0.0)]]


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other point beats in both coordinates (smaller is better), by the first coordinate."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points)):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front
