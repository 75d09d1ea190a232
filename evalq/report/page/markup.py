"""HTML that cannot be broken by what stands in it: text is escaped unless it was made here."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

# Control characters (line breaks and tabs stay), and the marks that turn the direction of the text around them.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff\ufffe\uffff]")
_VOID = frozenset({"meta", "link", "br", "hr"})


class Safe(str):
    """HTML made by this module."""

    __slots__ = ()


def clean(text: str) -> str:
    """Text without characters that are not seen or that turn others around; each becomes U+FFFD."""
    return _UNSEEN.sub("\ufffd", text).encode("utf-8", "replace").decode("utf-8")


def escape(text: str) -> Safe:
    """Text as HTML."""
    return text if isinstance(text, Safe) else Safe(html.escape(clean(text), quote=True))


def join(parts: Iterable[str]) -> Safe:
    """Parts side by side, each escaped unless it is Safe."""
    return Safe("".join(escape(part) for part in parts))


def tag(element: str, /, *children: str, **attributes: str | None) -> Safe:
    """An element. `class_` is class, `aria_label` is aria-label; an attribute of None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(clean(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if element in _VOID:
        return Safe(f"<{element}{given}>")
    return Safe(f"<{element}{given}>{join(children)}</{element}>")
