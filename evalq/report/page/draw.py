"""Vega-Lite to SVG without a browser and without a network. Colours are CSS variables, so one picture serves light and dark."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from evalq.report.page.blocks import Spec
from evalq.report.page.markup import clean

_ASTRAL = re.compile(
    "[\U00010000-\U0010ffff]"
)  # cut in two where a long label is shortened, which the library cannot read
TEXT_LIMIT = 160  # characters of one text in a picture
INSTALL = "pip install 'evalq[report]'"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
CONFIG: dict[str, Any] = {
    "aria": False,  # the figure around it has one description and a table; a tree of graphics marks says less
    "background": "transparent",
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--ink-2)",
        "titleColor": "var(--ink-2)",
        "titleFontWeight": "normal",
        "gridColor": "var(--grid)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titlePadding": 10,
        "labelLimit": 240,
    },
    "legend": {
        "labelColor": "var(--ink-2)",
        "titleColor": "var(--ink-2)",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "orient": "top",
        "symbolOpacity": 1,
        "labelLimit": 260,
        "columnPadding": 34,
    },
    "header": {"labelColor": "var(--ink)", "titleColor": "var(--ink)", "labelFontSize": 12, "titleFontSize": 12},
    "title": {"color": "var(--ink)"},
    "text": {"color": "var(--ink)", "fontSize": 12},
}


def can_draw() -> bool:
    """Whether the drawing library is installed."""
    return importlib.util.find_spec("vl_convert") is not None


def svg_of(spec: Spec, description: str) -> str:
    """The picture as one <svg role="img">. Errors: ValueError for a specification that cannot be drawn."""
    import vl_convert

    whole = {**spec, "config": {**CONFIG, **spec.get("config", {})}}
    drawn = vl_convert.vegalite_to_svg(drawable(whole), allowed_base_urls=[])
    return _as_image(drawn, description)


def drawable(value: Any) -> Any:
    """A specification whose texts the library survives: a character that XML lacks ends the whole process there."""
    if isinstance(value, str):
        flat = _ASTRAL.sub("\ufffd", clean(value)).replace("\n", " ").replace("\t", " ")
        return flat if len(flat) <= TEXT_LIMIT else flat[: TEXT_LIMIT - 1] + "…"
    if isinstance(value, dict):
        return {key: drawable(item) for key, item in value.items()}
    return [drawable(item) for item in value] if isinstance(value, list | tuple) else value


def _as_image(svg: str, description: str) -> str:
    """The root element made anew: one label, scales with the page, and room for fonts wider than the one drawn with."""
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    left, right = (28, 48) if width > 600 else (18, 14)
    label = clean(description).replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    body = re.sub(r"<\w[^>]*>", _lighter, re.sub(r"^<svg[^>]*>", "", svg))
    wide = width + left + right
    box = f'viewBox="{-left} 0 {wide:g} {height:g}" style="width:{wide:g}px;max-width:100%"'
    return f'<svg role="img" aria-label="{label}" {box}>{body}'


def _lighter(element: re.Match[str]) -> str:
    """An element's opening without roles, its coordinates with two decimals; text between elements stays as it is."""
    plain = re.sub(r' (?:role|aria-\w+)="[^"]*"', "", element[0])
    return re.sub(r"(\d+\.\d{2})\d+", r"\1", plain)
