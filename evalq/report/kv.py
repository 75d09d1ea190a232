"""Tables and a heat map of KV measurements, as Markdown and SVG. Figures come in as they were estimated."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from evalq.kvrecord import Sensitivity

CELL_WIDTH, CELL_HEIGHT, LEFT, TOP = 84, 30, 70, 46


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of one table; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def sensitivity_lines(found: Sequence[tuple[str, str, Sensitivity]]) -> list[str]:
    """(scheme, where, answer) as a table of answers and one of how far scores moved."""
    answers = [
        [name, where, s.attention_backend, s.kv_dtype, s.method, s.prefill, _chunks(s), s.decode, f"{s.noise_nats:.1e}"]
        for name, where, s in found
    ]
    lines = markdown_table(
        [
            "scheme",
            "engine",
            "backend",
            "KV dtype",
            "how",
            "prefill in one step",
            "prefill in chunks",
            "decode",
            "noise",
        ],
        answers,
    )
    moved = [[name, where, path, f"{value:.4f}"] for name, where, s in found for path, value in s.moved_nats.items()]
    return [*lines, *markdown_table(["scheme", "engine", "state", "moved, nats per token"], moved)]


def _chunks(answer: Sensitivity) -> str:
    values = [value for name, value in answer.moved_nats.items() if name.startswith("chunks, ")]
    return "yes" if max(values, default=0.0) > answer.threshold_nats else "no"


Grid = dict[tuple[int, int], tuple[int, int]]  # (length, depth) -> (found, asked)


def heat_map(grids: Sequence[tuple[str, Grid]]) -> str:
    """Needle retrieval as SVG, one panel per scheme side by side: depth down, length across, share found in each cell."""
    lengths = sorted({length for _, grid in grids for length, _ in grid})
    depths = sorted({depth for _, grid in grids for _, depth in grid})
    panel = LEFT + CELL_WIDTH * len(lengths) + 20
    width, height = panel * len(grids), TOP + CELL_HEIGHT * len(depths) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (name, grid) in enumerate(grids):
        parts += _panel(name, grid, lengths, depths, number * panel)
    return "\n".join([*parts, "</svg>", ""])


def _panel(name: str, grid: Grid, lengths: list[int], depths: list[int], left: int) -> list[str]:
    middle = left + LEFT + CELL_WIDTH * len(lengths) / 2
    parts = [f'<text x="{middle}" y="16" text-anchor="middle" font-weight="bold">{escape(name)}</text>']
    for column, length in enumerate(lengths):
        x = left + LEFT + CELL_WIDTH * (column + 0.5)
        parts.append(f'<text x="{x}" y="{TOP - 8}" text-anchor="middle">{length} tokens</text>')
    for row, depth in enumerate(depths):
        y = TOP + CELL_HEIGHT * row
        parts.append(f'<text x="{left + LEFT - 8}" y="{y + 20}" text-anchor="end">{depth} %</text>')
        for column, length in enumerate(lengths):
            found, asked = grid.get((length, depth), (0, 0))
            parts += _cell(left + LEFT + CELL_WIDTH * column, y, found, asked)
    return parts


def _cell(x: int, y: int, found: int, asked: int) -> list[str]:
    share = found / asked if asked else 0.0
    colour = (
        f"rgb({round(215 - 180 * share)},{round(60 + 110 * share)},{round(60 + 50 * share)})" if asked else "#dddddd"
    )
    text = f"{found}/{asked}" if asked else "-"
    return [
        f'<rect x="{x}" y="{y}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" fill="{colour}"/>',
        f'<text x="{x + CELL_WIDTH / 2 - 1}" y="{y + 19}" text-anchor="middle" fill="white">{text}</text>',
    ]


def needle_table(grids: Sequence[tuple[str, Grid]]) -> list[str]:
    """The same grid as a table: found of asked, schemes in one cell, in the order given."""
    lengths = sorted({length for _, grid in grids for length, _ in grid})
    depths = sorted({depth for _, grid in grids for _, depth in grid})
    rows = []
    for depth in depths:
        cells = [
            " / ".join(
                f"{found} of {asked}" for found, asked in (grid.get((length, depth), (0, 0)) for _, grid in grids)
            )
            for length in lengths
        ]
        rows.append([f"{depth} %", *cells])
    names = " / ".join(name for name, _ in grids)
    return markdown_table([f"depth ({names})", *(f"{length} tokens" for length in lengths)], rows)
