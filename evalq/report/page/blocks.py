"""What a page is made of. Text in blocks is plain text: the renderers escape it, nothing here is markup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Spec = dict[str, Any]  # a Vega-Lite specification without size


@dataclass(frozen=True)
class Word:
    """A verdict's word or another state, shown as a badge. `kind`: pass, warn, fail, open, none."""

    text: str
    kind: str = "none"


Value = str | Word


@dataclass(frozen=True)
class Text:
    """A paragraph. `kind`: plain, lead (the answer), note (how to read it), warning."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class Table:
    """Rows of values; the first column names the row. `numeric` columns are aligned to the right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    numeric: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Chart:
    """A picture with the table behind it. `spec` takes the width in pixels that the plot may have."""

    title: str
    description: str  # what a person who cannot see it needs to know
    spec: Callable[[int], Spec]
    table: Table


@dataclass(frozen=True)
class Fold:
    """Something to open: closed at first, open in print."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Answer:
    """One answer to a question: whose it is, what it says, and whether it is right (None = cannot be said)."""

    label: str
    text: str
    right: bool | None


@dataclass(frozen=True)
class Item:
    """A question with the answers of both models."""

    title: str
    question: str
    answers: Sequence[Answer]
    note: str = ""


@dataclass(frozen=True)
class Passage:
    """A token in its context: text before it, the token, and what is to be said about it."""

    title: str
    before: str
    token: str
    notes: Sequence[str]


@dataclass(frozen=True)
class Section:
    """A heading with an anchor and what stands under it."""

    anchor: str
    title: str
    blocks: Sequence[Block]


Block = Text | Table | Chart | Fold | Item | Passage


@dataclass(frozen=True)
class Page:
    """A whole report. `lead` stands above everything, `facts` are name and value pairs under the title."""

    title: str
    lead: Sequence[Block]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    foot: str = field(default="")
