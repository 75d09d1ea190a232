"""Plots of a study for its parent run: accuracy against memory with the Pareto front, and the latency ladder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from evalq.records import Record
from evalq.tracking.content import KV_TOKENS, WEIGHTS_AND_KV

QUALITY = "quality/wikitext_word_perplexity"
MEMORY = "memory/weight_gib"
INCREASE = "quality/perplexity_increase_percent"
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0}
AXIS_LABELS = ("weights, GiB", f"weights and KV cache of {KV_TOKENS:,} tokens, GiB")


@dataclass(frozen=True)
class Step:
    """One concurrency of a load test; low and high are the extreme repeats, None where they were not kept."""

    load: str
    concurrency: int
    latency_p99_seconds: float | None
    output_tokens_per_second: float | None
    rate_low: float | None
    rate_high: float | None


class Drawn(Protocol):
    """What is drawn of a cell (`evalq.tracking.summary.Row`)."""

    @property
    def cell(self) -> str: ...
    @property
    def is_baseline(self) -> bool: ...
    @property
    def verdict(self) -> str: ...
    @property
    def metrics(self) -> dict[str, float]: ...
    @property
    def steps(self) -> list[Step]: ...


def steps_of(record: Record) -> list[Step]:
    """The valid load figures of a record by concurrency."""
    found = [
        Step(
            load.name,
            load.concurrency,
            load.request_latency_p99_seconds,
            load.output_tokens_per_second,
            load.output_tokens_per_second_low,
            load.output_tokens_per_second_high,
        )
        for load in record.loads.values()
        if load.valid
    ]
    return sorted(found, key=lambda step: step.concurrency)


def pareto_names(rows: Sequence[Drawn]) -> list[str]:
    """Cells that no other cell beats in weights and perplexity at once."""
    points = {
        row.cell: (row.metrics[MEMORY], row.metrics[QUALITY]) for row in rows if {MEMORY, QUALITY} <= set(row.metrics)
    }
    front = set(pareto(list(points.values())))
    return [name for name, point in points.items() if point in front] if len(points) > 1 else []


def latency_ladder(file: Path, study: str, rows: Sequence[Drawn]) -> None:
    """p99 latency and output rate over concurrency, one line per cell; bars span the repeats."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=110, layout="constrained")
    latency, rate = figure.subplots(1, 2)
    for row in rows:
        style = {"marker": "s" if row.is_baseline else "o", "label": row.cell}
        slow = [
            (step.concurrency, step.latency_p99_seconds) for step in row.steps if step.latency_p99_seconds is not None
        ]
        latency.plot([x for x, _ in slow], [y for _, y in slow], **style)
        fast = [step for step in row.steps if step.output_tokens_per_second is not None]
        rate.errorbar(
            [step.concurrency for step in fast],
            [step.output_tokens_per_second for step in fast],
            yerr=_spans(fast),
            capsize=3,
            **style,
        )
    for axes, label in (
        (latency, "p99 of request latency, seconds"),
        (rate, "output tokens per second\n(bars: repeats)"),
    ):
        axes.set(xlabel="requests at a time", ylabel=label, xscale="log", ylim=(0, None))
        axes.grid(alpha=0.3)
    latency.legend(fontsize=8)
    figure.suptitle(f"{study}: latency ladder")
    figure.savefig(file)


def _spans(steps: Sequence[Step]) -> Any:
    """Distances of the extreme repeats below and above each rate."""
    below, above = [], []
    for step in steps:
        rate = step.output_tokens_per_second or 0.0
        below.append(max(rate - (rate if step.rate_low is None else step.rate_low), 0.0))
        above.append(max((rate if step.rate_high is None else step.rate_high) - rate, 0.0))
    return [below, above]


def accuracy_against_memory(file: Path, study: str, rows: Sequence[Drawn]) -> None:
    """Perplexity over weights, and over weights with a KV cache; dotted: the Pareto front."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, metric, label in zip(panels, (MEMORY, WEIGHTS_AND_KV), AXIS_LABELS, strict=True):
        _panel(axes, metric, [row for row in rows if metric in row.metrics])
        axes.set_xlabel(label)
    panels[0].set_ylabel("word perplexity, wikitext\n(bars: interval of the paired increase)")
    figure.suptitle(study)
    figure.savefig(file)


def _panel(axes: Any, memory: str, rows: Sequence[Drawn]) -> None:
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


def _bars(row: Drawn, baseline: float | None) -> Any:
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
