"""The form that reviewers fill in: one HTML file that works with no network and does not say which output is whose."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

TEMPLATE = Path(__file__).with_name("review_form.html")
FACTS = (("right", "right"), ("wrong", "something is wrong"), ("unsure", "cannot tell"))
PREFERENCES = (("a", "A is better"), ("tie", "about equal"), ("b", "B is better"))


class Shown(Protocol):
    """One prompt with its two outputs, in the order shown."""

    @property
    def item(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def a(self) -> str: ...
    @property
    def b(self) -> str: ...


def review_form(review_id: str, pairs: Sequence[Shown]) -> str:
    """The whole page. Outputs of models are text in it, never markup."""
    items = "\n".join(_section(number, len(pairs), pair) for number, pair in enumerate(pairs, 1))
    page = TEMPLATE.read_text(encoding="utf-8")
    head, tail = page.split("__ITEMS__")  # not replaced in the outputs, which may hold such words themselves
    return head.replace("__REVIEW__", html.escape(review_id)) + items + tail


def _section(number: int, total: int, pair: Shown) -> str:
    name = html.escape(pair.item)
    lines = [
        f'<section data-item="{name}" aria-labelledby="{name}-title">',
        f'<h2 id="{name}-title">Prompt {number} of {total}</h2>',
        f'<div class="text">{html.escape(pair.prompt)}</div>',
        '<div class="pair">',
    ]
    for side, text in (("a", pair.a), ("b", pair.b)):
        letter = side.upper()
        lines += [
            f'<div><h3>{letter}</h3><div class="text">{html.escape(text)}</div>',
            _choice(
                name, f"coherence_{side}", f"Coherence of {letter}, 1 to 5", [(str(n), str(n)) for n in range(1, 6)]
            ),
            _choice(name, f"facts_{side}", f"Facts of {letter}", FACTS),
            "</div>",
        ]
    lines += ["</div>", _choice(name, "preference", "Which do you prefer?", PREFERENCES), "</section>"]
    return "\n".join(lines)


def _choice(item: str, question: str, legend: str, options: Sequence[tuple[str, str]]) -> str:
    inputs = "".join(
        f'<label><input type="radio" name="{item}:{question}" value="{value}"> {words}</label>'
        for value, words in options
    )
    return f"<fieldset><legend>{legend}</legend>{inputs}</fieldset>"
