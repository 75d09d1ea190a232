"""Vega-Lite specifications. Data are values and names from records; fields, scales and expressions are fixed here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from evalq.report.page.blocks import Spec

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name, never fetched
COLOURS = tuple(f"var(--c{i})" for i in range(1, 8))
GREY = "var(--c8)"
PHONE = 500  # a plot narrower than this leaves out what the table says anyway
Rows = Sequence[dict[str, Any]]
Draw = Callable[[int], Spec]


def colour_of(names: Sequence[str], grey: Sequence[str] = ()) -> dict[str, Any]:
    """A colour scale that gives each name the same colour in every chart of a page."""
    coloured = [name for name in names if name not in grey]
    known = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(coloured)}
    return {"domain": list(names), "range": [known.get(name, GREY) for name in names]}


def whole(width: int, body: Spec, rows: Rows) -> Spec:
    """A specification with its data and width."""
    return {"$schema": SCHEMA, "width": width, "data": {"values": list(rows)}, **body}


TICKS = (-500, -100, -50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def wide_spread(values: Sequence[float]) -> bool:
    """Whether a linear axis would press the small values together."""
    sizes = sorted(abs(value) for value in values if value)
    return len(sizes) > 1 and sizes[-1] > 15 * max(sizes[0], 0.2)


def compressed(values: Sequence[float]) -> dict[str, Any]:
    """Scale and axis that are linear below 1 and logarithmic above, for values that span orders of magnitude."""
    low, high = min(0.0, *values), max(1.0, *values)
    inside = [tick for tick in TICKS if low <= tick <= high]
    scale = {"type": "symlog", "constant": 1, "domain": [low, high * 1.08], "nice": False}
    return {"scale": scale, "axis": {"values": inside, "labelOverlap": False}}


def interval_rows(
    rows: Rows,
    axis: str,
    lines: Sequence[tuple[float, str]] = (),
    band: tuple[float, float] | None = None,
    facet: str | None = None,
    bend: bool = True,
) -> Draw:
    """Points with intervals, one row per name: fields name, value, low, high, label, ink (colour)."""
    ends = [row[key] for row in rows for key in ("low", "high")] + [value for value, _ in lines]
    plain: dict[str, Any] = {"scale": {"zero": True}, "axis": {"tickCount": 6}}
    spread = bend and facet is None and wide_spread([row["value"] for row in rows])
    scaled = compressed(ends) if spread else plain

    def draw(width: int) -> Spec:
        x = {"field": "low", "type": "quantitative", "title": axis, **scaled}
        ink = {"field": "ink", "type": "nominal", "scale": None}
        layers: list[Spec] = [*_band(band), *_lines(lines, alone=facet is None)]
        layers += [
            {"mark": {"type": "rule", "strokeWidth": 3}, "encoding": {"x": x, "x2": {"field": "high"}, "color": ink}},
            {
                "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
                "encoding": {"x": {**x, "field": "value"}, "color": ink},
            },
        ]
        if width >= PHONE:
            layers.append(
                {
                    "mark": {"type": "text", "align": "left", "dx": 9, "color": "var(--ink)"},
                    "encoding": {"x": {**x, "field": "high"}, "text": {"field": "label"}},
                }
            )
        shared = {"y": _row_axis(width)}
        if facet:
            return _facets(width, rows, layers, shared, facet)
        return whole(width, {"height": {"step": 32}, "layer": layers, "encoding": shared}, rows)

    return draw


def _row_axis(width: int) -> dict[str, Any]:
    limit = 220 if width >= PHONE else 110
    return {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": limit}}


def _facets(width: int, rows: Rows, layers: list[Spec], shared: dict[str, Any], facet: str) -> Spec:
    # Lines with data of their own cannot be faceted; a rule at a fixed datum can.
    body = {"width": width, "height": {"step": 22}, "layer": layers, "encoding": shared}
    split = {"field": facet, "type": "nominal", "sort": None, "title": None, "header": {"labelAnchor": "start"}}
    return {
        "$schema": SCHEMA,
        "data": {"values": list(rows)},
        "facet": split,
        "columns": 1,
        "spec": body,
        "resolve": {"scale": {"x": "shared"}},
    }


ONCE: Spec = {"data": {"values": [{}]}}  # a layer that is drawn once, not for every row


def _lines(lines: Sequence[tuple[float, str]], alone: bool = True) -> list[Spec]:
    """Vertical rules at fixed values, each named at its top. In facets layers cannot have data of their own (`alone`)."""
    own = ONCE if alone else {}
    found: list[Spec] = []
    for value, name in lines:
        found.append(
            {
                **own,
                "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5, "color": "var(--line)"},
                "encoding": {"x": {"datum": value}, "y": {"value": 0}, "y2": {"value": "height"}},
            }
        )
        if name:
            found.append(
                {
                    **own,
                    "mark": {"type": "text", "align": "left", "baseline": "bottom", "dx": 3, "color": "var(--ink-2)"},
                    "encoding": {"x": {"datum": value}, "y": {"value": -3}, "text": {"value": name}},
                }
            )
    return found


def _band(band: tuple[float, float] | None) -> list[Spec]:
    if band is None:
        return []
    ends = {"x": {"datum": band[0]}, "x2": {"datum": band[1]}, "y": {"value": 0}, "y2": {"value": "height"}}
    return [{**ONCE, "mark": {"type": "rect", "color": "var(--soft)", "opacity": 0.45}, "encoding": ends}]


def stacked_bars(rows: Rows, axis: str, parts: dict[str, str], totals: Rows) -> Draw:
    """Bars per name, stacked by part (name -> colour): fields name, part, rank, value; `totals`: name, value, label."""

    def draw(width: int) -> Spec:
        colours = {"domain": list(parts), "range": list(parts.values())}
        legend = {"title": None, "columns": 3 if width >= PHONE else 1}
        bars = {
            "mark": {"type": "bar", "stroke": "var(--paper)", "strokeWidth": 1},
            "encoding": {
                "x": {"field": "value", "type": "quantitative", "title": axis, "axis": {"tickCount": 6}},
                "color": {"field": "part", "type": "nominal", "scale": colours, "legend": legend},
                "order": {"field": "rank"},
            },
        }
        ends = {
            "data": {"values": list(totals)},
            "mark": {"type": "text", "align": "left", "dx": 5, "color": "var(--ink)"},
            "encoding": {"x": {"field": "value", "type": "quantitative"}, "text": {"field": "label"}},
        }
        layers = [bars, ends] if width >= PHONE else [bars]
        return whole(width, {"height": {"step": 30}, "layer": layers, "encoding": {"y": _row_axis(width)}}, rows)

    return draw


def lines_by(rows: Rows, x_title: str, y_title: str, names: dict[str, Any], ordinal: bool, log_y: bool = True) -> Draw:
    """One line per name with intervals: fields name, x, y, low, high. `ordinal`: x are names in their own order."""

    def draw(width: int) -> Spec:
        x: dict[str, Any] = {"field": "x", "title": x_title, "sort": None, "axis": {"labelAngle": 0}}
        x |= {"type": "ordinal"} if ordinal else {"type": "quantitative", "scale": {"type": "log"}}
        if not ordinal:
            x["axis"] = {"values": sorted({row["x"] for row in rows}), "format": "~s"}
        if ordinal and width < PHONE:
            x["axis"] = {"labelAngle": -40}
        y: dict[str, Any] = {"field": "y", "type": "quantitative", "title": y_title}
        y["scale"] = {"type": "log"} if log_y else {"zero": True}
        y["axis"] = {"tickCount": 5}
        legend = {"title": None, "columns": 4 if width >= PHONE else 2}
        colour = {"field": "name", "type": "nominal", "scale": names, "legend": legend}
        layers = [
            {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"y": y}},
            {"mark": {"type": "point", "filled": True, "size": 50, "opacity": 1}, "encoding": {"y": y}},
        ]
        if all(row.get("low") is not None for row in rows):
            ends = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
            layers.append({"mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.7}, "encoding": ends})
        body = {"height": 260, "layer": layers, "encoding": {"x": x, "color": colour}}
        return whole(width, body, rows)

    return draw


PLACES = {"worth having": "circle", "dominated": "cross", "not placed": "diamond"}


def scatter(rows: Rows, x_title: str, y_title: str, names: dict[str, Any]) -> Draw:
    """Points with vertical intervals, by place (one of PLACES): fields name, x, y, low, high, label, place."""
    ends = [row[key] for row in rows for key in ("low", "high")]
    spread = wide_spread([row["y"] for row in rows])
    height = 320

    def draw(width: int) -> Spec:
        x = {"field": "x", "type": "quantitative", "title": x_title, "scale": {"zero": False, "padding": 30}}
        x["axis"] = {"tickCount": 6}
        y: dict[str, Any] = {"field": "y", "type": "quantitative", "title": y_title}
        y |= compressed(ends) if spread else {"scale": {"zero": True}}
        legend = {"title": None, "columns": 2} if width < PHONE else None
        colour = {"field": "name", "type": "nominal", "scale": names, "legend": legend}
        known = [place for place in PLACES if any(row["place"] == place for row in rows)]
        shapes = {"domain": known, "range": [PLACES[place] for place in known]}
        shape = {
            "field": "place",
            "type": "nominal",
            "scale": shapes,
            "legend": {"title": None, "symbolFillColor": "var(--ink-2)"},
        }
        bars = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour}
        layers = [
            {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": bars},
            {
                "mark": {"type": "point", "filled": True, "size": 120, "opacity": 1},
                "encoding": {"x": x, "y": y, "color": colour, "shape": shape},
            },
        ]
        if width >= PHONE:
            layers.append(_labels(x, y))
        return whole(width, {"height": height, "layer": layers}, apart(rows, height, spread))

    return draw


LABEL_PIXELS = 15


def apart(rows: Rows, height: int, spread: bool) -> list[dict[str, Any]]:
    """The rows with `side` and `label_y`: labels point inwards, and those of one side keep a line's distance."""
    bend = (lambda v: math.copysign(math.log1p(abs(v)), v)) if spread else (lambda v: v)
    unbend = (lambda v: math.copysign(math.expm1(abs(v)), v)) if spread else (lambda v: v)
    values = [bend(row[key]) for row in rows for key in ("low", "high")] or [0.0]
    step = (max(values) - min(min(values), 0.0)) / height * LABEL_PIXELS
    middle = (min(row["x"] for row in rows) + max(row["x"] for row in rows)) / 2
    placed: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: row["y"]):
        side = "right" if row["x"] > middle else "left"
        at = bend(row["y"]) + 0.6 * step
        for other in placed:
            if other["side"] == side and at - bend(other["label_y"]) < step:
                at = bend(other["label_y"]) + step
        placed.append({**row, "side": side, "label_y": unbend(at)})
    return placed


def _labels(x: dict[str, Any], y: dict[str, Any]) -> Spec:
    """Names beside the points, to the left of those in the right half so that none is cut off."""
    text = {"x": x, "y": {**y, "field": "label_y"}, "text": {"field": "label"}}
    return {
        "layer": [
            {
                "transform": [{"filter": {"field": "side", "equal": side}}],
                "mark": {"type": "text", "align": side, "dx": dx, "color": "var(--ink)"},
                "encoding": text,
            }
            for side, dx in (("right", -10), ("left", 10))
        ]
    }


def strips(rows: Rows, axis: str) -> Draw:
    """Every value as a small mark, one row per name: fields name, value, ink."""

    def draw(width: int) -> Spec:
        x = {"field": "value", "type": "quantitative", "title": axis, "axis": {"tickCount": 6}}
        marks = {
            "mark": {"type": "tick", "thickness": 2, "opacity": 0.65, "bandSize": 18},
            "encoding": {"x": x, "color": {"field": "ink", "type": "nominal", "scale": None}},
        }
        body = {"height": {"step": 30}, "layer": [*_lines([(0, "")]), marks], "encoding": {"y": _row_axis(width)}}
        return whole(width, body, rows)

    return draw


def heat_map(rows: Rows, x_title: str, y_title: str) -> Draw:
    """Shares as squares, one grid per name: fields name, x, y, value (0 to 1), label. The stronger the colour, the more."""

    def draw(width: int) -> Spec:
        columns = 2 if width >= PHONE else 1
        shared = {
            "x": {"field": "x", "type": "ordinal", "title": x_title, "sort": None, "axis": {"labelAngle": 0}},
            "y": {"field": "y", "type": "ordinal", "title": y_title},
        }
        scale = {"domain": [0, 1], "range": [0.06, 0.55]}
        strength = {"field": "value", "type": "quantitative", "legend": None, "scale": scale}
        square = {"mark": {"type": "rect", "color": "var(--c1)"}, "encoding": {"opacity": strength}}
        words = {"mark": {"type": "text", "color": "var(--ink)"}, "encoding": {"text": {"field": "label"}}}
        inner = {
            "width": (width - 60) // columns - 40,
            "height": {"step": 28},
            "layer": [square, words],
            "encoding": shared,
        }
        split = {"field": "name", "type": "nominal", "sort": None, "title": None, "header": {"labelAnchor": "start"}}
        return {"$schema": SCHEMA, "data": {"values": list(rows)}, "facet": split, "columns": columns, "spec": inner}

    return draw
