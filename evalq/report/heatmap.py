"""A heat map as one SVG: layers down, modules across, a logarithmic scale of one hue, every value readable as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

CELL_WIDTH, CELL_HEIGHT, LEFT, TOP = 150, 18, 60, 64
LIGHT, DARK = (247, 251, 255), (8, 48, 107)


def heat_map_svg(
    title: str, layers: Sequence[int], kinds: Sequence[str], values: Sequence[Sequence[float | None]]
) -> str:
    """values: (layers, kinds), positive numbers of one unit or None. Layer -1 is what lies outside the layers."""
    known = [value for row in values for value in row if value is not None and value > 0]
    low, high = (math.log(min(known)), math.log(max(known))) if known else (0.0, 1.0)
    width, height = LEFT + CELL_WIDTH * len(kinds) + 10, TOP + CELL_HEIGHT * len(layers) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<text x="6" y="18" font-size="13" font-weight="bold">{escape(title)}</text>',
    ]
    for column, kind in enumerate(kinds):
        x = LEFT + column * CELL_WIDTH + CELL_WIDTH / 2
        parts.append(f'<text x="{x:g}" y="{TOP - 8}" font-size="10" text-anchor="middle">{escape(_short(kind))}</text>')
    for row, layer in enumerate(layers):
        y = TOP + row * CELL_HEIGHT
        name = "outside" if layer < 0 else str(layer)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 13}" font-size="11" text-anchor="end">{name}</text>')
        for column, value in enumerate(values[row]):
            parts.append(_cell(LEFT + column * CELL_WIDTH, y, value, low, high))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cell(x: float, y: float, value: float | None, low: float, high: float) -> str:
    if value is None:
        share, text = 0.0, "-"
    else:
        share = 0.0 if value <= 0 else (math.log(value) - low) / (high - low) if high > low else 1.0
        text = f"{value:.1e}"
    colour = "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(LIGHT, DARK, strict=True))
    ink = "#ffffff" if share > 0.5 else "#000000"
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="{colour}" stroke="#ffffff"/>'
        f'<text x="{x + CELL_WIDTH / 2:g}" y="{y + 13:g}" font-size="10" text-anchor="middle" fill="{ink}">{text}</text>'
    )


def _short(kind: str) -> str:
    return kind.replace("_proj", "")
