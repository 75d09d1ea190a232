"""The trade-off of a sweep for people and programs: a table, JSON, and a figure in plotly's own words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evalq.report.tradeoff import Placed, Point, Recommendation, Workload
from evalq.report.words import ABSENT, COLOURS, interval, size

if TYPE_CHECKING:
    from rich.console import RenderableType

PLACES = {"front": "worth having", "dominated": "dominated", "unplaced": "not placed"}
MARKS = {"front": "circle", "dominated": "x", "unplaced": "circle-open"}


def place_word(item: Placed) -> str:
    """ "dominated by w4a16", "worth having, tied with fp8-kv"."""
    word = PLACES[item.place]
    if item.by:
        word += f" by {', '.join(item.by)}"
    if item.tied:
        word += f", tied with {', '.join(item.tied)}"
    return f"{word} ({item.reason})" if item.reason else word


def pareto_table(placed: Sequence[Placed], advice: Sequence[Recommendation], workload: Workload) -> RenderableType:
    """All cells with their place, and one sentence of advice per model and GPU."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    caption = f"Memory: weights and the KV cache of {workload.concurrency} requests of {workload.context:,} tokens."
    table = Table(
        title="quality against memory against speed", title_justify="left", caption=caption, caption_justify="left"
    )
    several = len({(item.point.model, item.point.gpu) for item in placed}) > 1
    table.add_column("cell")
    for name in ("perplexity increase [95 %]", "memory", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    table.add_column("place")
    for item in placed:
        point = item.point
        name = f"{point.model} {point.gpu} {point.name}" if several else point.name
        style = "dim" if item.place == "dominated" else ""
        status = Text(point.status, style=COLOURS.get(point.status, "dim"))
        figures = (_increase(point), size(point.memory_bytes), _speed(point))
        table.add_row(Text(name, style=style), *figures, status, Text(place_word(item), style=style))
    return Group(table, *(Text(item.text, style="bold") for item in advice))


def _increase(point: Point) -> str:
    return "0 (the yardstick)" if point.is_baseline else interval(point.increase)


def _speed(point: Point) -> str:
    return ABSENT if point.speed is None else f"{point.speed:,.1f}"


def pareto_data(placed: Sequence[Placed], advice: Sequence[Recommendation], workload: Workload) -> dict[str, Any]:
    """Plain data for JSON; shares as fractions, bytes, tokens per second."""
    return {
        "workload": dataclasses.asdict(workload),
        "cells": [dataclasses.asdict(item) for item in placed],
        "recommendations": [dataclasses.asdict(item) for item in advice],
    }


def pareto_figure(placed: Sequence[Placed], workload: Workload) -> dict[str, Any]:
    """A plotly figure (data and layout): memory against quality, the size of a mark is the speed, a cross is dominated."""
    shown = [item for item in placed if item.point.memory_bytes is not None and _share(item.point) is not None]
    fastest = max((item.point.speed or 0.0 for item in shown), default=0.0) or 1.0
    traces = []
    for model, gpu in dict.fromkeys((item.point.model, item.point.gpu) for item in shown):
        items = [item for item in shown if (item.point.model, item.point.gpu) == (model, gpu)]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": f"{model} on {gpu}",
                "x": [(item.point.memory_bytes or 0) / 1024**3 for item in items],
                "y": [100 * (_share(item.point) or 0.0) for item in items],
                "error_y": _errors(items),
                "text": [item.point.name for item in items],
                "textposition": "top center",
                "customdata": [[item.point.speed, item.point.status, place_word(item)] for item in items],
                "hovertemplate": "%{text}: %{y:.2f} %, %{x:.2f} GiB, %{customdata[0]} tokens/s, %{customdata[1]}, "
                "%{customdata[2]}<extra></extra>",
                "marker": {
                    "symbol": [MARKS[item.place] for item in items],
                    "size": [8 + 16 * (item.point.speed or 0.0) / fastest for item in items],
                },
            }
        )
    memory = f"memory for {workload.concurrency} requests of {workload.context:,} tokens, GiB"
    return {
        "data": traces,
        "layout": {"xaxis": {"title": {"text": memory}}, "yaxis": {"title": {"text": "perplexity increase, %"}}},
    }


def _share(point: Point) -> float | None:
    return 0.0 if point.is_baseline else point.increase.value if point.increase else None


def _errors(items: Sequence[Placed]) -> dict[str, Any]:
    above, below = [], []
    for item in items:
        found, value = item.point.increase, _share(item.point) or 0.0
        above.append(100 * (found.high - value) if found and found.high is not None else 0.0)
        below.append(100 * (value - found.low) if found and found.low is not None else 0.0)
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
