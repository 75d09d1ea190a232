"""Summary of a study for its parent run: a table of all cells and a plot of accuracy against memory."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from evalq.errors import RecordError
from evalq.records import read_record
from evalq.tracking.content import estimates_beside, metrics_of, verdict_beside
from evalq.tracking.manifest import Manifest
from evalq.tracking.plots import (
    INCREASE,
    MEMORY,
    QUALITY,
    Step,
    accuracy_against_memory,
    latency_ladder,
    pareto_names,
    steps_of,
)

COLUMNS = {  # heading -> metric, format
    "word perplexity": ("quality/wikitext_word_perplexity", ".3f"),
    "hellaswag acc_norm": ("quality/hellaswag_acc_norm", ".3f"),
    "truthfulqa mc2": ("quality/truthfulqa_mc2_acc", ".3f"),
    "weights GiB": ("memory/weight_gib", ".3f"),
    "KV bytes/token": ("memory/kv_bytes_per_token", ",.0f"),
    "output tokens/s": ("load/output_tokens_per_second", ",.0f"),
}


@dataclass(frozen=True)
class Row:
    """One cell of the summary."""

    cell: str
    is_baseline: bool
    status: str
    verdict: str
    record_id: str
    metrics: dict[str, float]
    steps: list[Step]


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
        metrics = metrics_of(record, verdict, estimates_beside(folder, verdict)).values
        names = (record.cell.quant, record.cell.is_baseline, record.status, word, record.record_id)
        rows.append(Row(*names, metrics, steps_of(record)))
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
    front = pareto_names(rows)
    if front:
        lines += [
            "",
            f"No cell needs less memory and is better at once than: {', '.join(front)} (weights against perplexity).",
        ]
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
    """summary.md, summary.json and, where there is something to draw, the plots."""
    (folder / "summary.md").write_text(f"# {study}\n\n{markdown(rows)}", encoding="utf-8")
    data = {"study": study, "cells": [asdict(row) for row in rows]}
    (folder / "summary.json").write_text(json.dumps(data, indent=1, allow_nan=False), encoding="utf-8")
    drawn = [row for row in rows if QUALITY in row.metrics and MEMORY in row.metrics]
    if drawn:
        accuracy_against_memory(folder / "accuracy_against_memory.png", study, drawn)
    climbed = [row for row in rows if len({step.concurrency for step in row.steps}) > 1]
    if climbed:
        latency_ladder(folder / "latency_ladder.png", study, climbed)
