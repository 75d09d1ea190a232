"""Two records side by side, for the terminal and as Markdown."""

from __future__ import annotations

from typing import Protocol

from evalq.records import Estimate
from evalq.report.words import ABSENT, interval, size

Figures = dict[str, tuple[float | None, float | None]]


class Comparable(Protocol):
    """What is shown of a comparison (`evalq.judge.compare.Comparison`)."""

    @property
    def first_id(self) -> str: ...
    @property
    def second_id(self) -> str: ...
    @property
    def estimates(self) -> list[Estimate]: ...
    @property
    def figures(self) -> Figures: ...
    @property
    def notes(self) -> list[str]: ...


Row = tuple[str, str, str]


def estimate_rows(estimates: list[Estimate]) -> list[Row]:
    """Name, value with interval, how it was computed."""
    return [(e.name, _value(e), f"{e.method}, n={e.n}" + (f"; {e.note}" if e.note else "")) for e in estimates]


def _value(estimate: Estimate) -> str:
    if "nats" not in estimate.name:
        return interval(estimate, 3)
    if estimate.value is None:
        return ABSENT
    bounds = "" if estimate.low is None or estimate.high is None else f" [{estimate.low:.3g}, {estimate.high:.3g}]"
    return f"{estimate.value:.4g}{bounds} nats"


def figure_rows(figures: Figures) -> list[tuple[str, str, str, str]]:
    """Name, both values, and the second as a share of the first."""
    rows = []
    for name, (first, second) in figures.items():
        show = size if "bytes" in name else _number
        share = f"{second / first:.1%}" if first and second is not None else ABSENT
        rows.append((name, show(first), show(second), share))
    return rows


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.1f}"


def comparison_text(found: Comparable, width: int = 140) -> str:
    """Tables of differences and figures, then notes."""
    from rich.console import Console
    from rich.table import Table

    differences = Table(title=f"{found.second_id} minus {found.first_id}", title_justify="left")
    for name in ("estimate", "value [interval]", "method"):
        differences.add_column(name)
    for row in estimate_rows(found.estimates):
        differences.add_row(*row)
    figures = Table(title="memory and speed", title_justify="left")
    for name in ("figure", found.first_id, found.second_id, "share"):
        figures.add_column(name)
    for line in figure_rows(found.figures):
        figures.add_row(*line)
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(differences, figures, *(f"- {note}" for note in found.notes), sep="\n", markup=False)
    return capture.get()


def comparison_markdown(found: Comparable) -> str:
    """The same as Markdown."""
    lines = [
        f"### {found.second_id} minus {found.first_id}",
        "",
        "| estimate | value [interval] | method |",
        "|---|---:|---|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in estimate_rows(found.estimates)]
    lines += ["", f"| figure | {found.first_id} | {found.second_id} | share |", "|---|---:|---:|---:|"]
    lines += ["| " + " | ".join(row) + " |" for row in figure_rows(found.figures)]
    return "\n".join([*lines, "", *(f"- {note}" for note in found.notes), ""])
