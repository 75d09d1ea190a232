"""A page as GitHub-flavoured Markdown: the same words and tables; a chart is its table."""

from __future__ import annotations

import re

from evalq.report.page.blocks import Block, Chart, Fold, Item, Page, Passage, Section, Table, Text, Value, Word
from evalq.report.page.markup import clean, escape

_MARKS = re.compile(r"([\\`*_{}\[\]<>#|~!&])")
_LINE_START = re.compile(r"^(\s*)([-+=]|\d+[.)])", re.MULTILINE)


def page_markdown(page: Page) -> str:
    """The whole file."""
    facts = [f"{plain(name)}: {plain(value)}" for name, value in page.facts]
    lines = [f"# {plain(page.title)}", "", *(_block(block) for block in page.lead)]
    lines += [" · ".join(facts), ""] if facts else []
    lines += [line for section in page.sections for line in _section(section)]
    return "\n".join([*lines, plain(page.foot), ""])


def plain(text: str) -> str:
    """Text on one line that is no markup."""
    return _MARKS.sub(r"\\\1", " ".join(clean(text).split()))


def paragraph(text: str) -> str:
    """Text as a paragraph of its own: its beginning makes no list and no heading."""
    return _LINE_START.sub(r"\1\\\2", plain(text))


def _section(section: Section) -> list[str]:
    return [f"## {plain(section.title)}", "", *(_block(block) for block in section.blocks)]


def _block(block: Block) -> str:
    match block:
        case Text():
            return _text(block)
        case Table():
            return _table(block)
        case Chart():
            return f"**{plain(block.title)}**\n\n{plain(block.description)}\n\n{_table(block.table)}"
        case Fold():
            inside = "\n".join(_block(part) for part in block.blocks)
            # A line that begins with a tag is HTML in Markdown, where a backslash protects nothing.
            return f"<details><summary>{escape(' '.join(block.summary.split()))}</summary>\n\n{inside}\n</details>\n"
        case Item():
            return _item(block)
        case Passage():
            return _passage(block)


def _text(text: Text) -> str:
    if text.kind == "lead":
        return f"**{plain(text.text)}**\n"
    return f"{'> ' if text.kind == 'warning' else ''}{paragraph(text.text)}\n"


def _table(table: Table) -> str:
    head = "| " + " | ".join(plain(name) for name in table.columns) + " |"
    rule = "|" + "|".join("---:" if i in table.numeric else "---" for i in range(len(table.columns))) + "|"
    rows = ["| " + " | ".join(_value(value) for value in row) + " |" for row in table.rows]
    return "\n".join([f"{plain(table.caption)}", "", head, rule, *rows, ""])


def _value(value: Value) -> str:
    return f"**{plain(value.text)}**" if isinstance(value, Word) else plain(value)


def _item(item: Item) -> str:
    lines = [f"**{plain(item.title)}**", "", f"> {plain(item.question)}", ""]
    for answer in item.answers:
        word = {True: " (right)", False: " (wrong)", None: ""}[answer.right]
        lines.append(f"- {plain(answer.label)}{word}: {plain(answer.text)}")
    return "\n".join([*lines, *(["", plain(item.note)] if item.note else []), ""])


def _passage(passage: Passage) -> str:
    lines = [f"**{plain(passage.title)}**", "", f"> {plain(passage.before)} **{plain(passage.token)}**", ""]
    return "\n".join([*lines, *(f"- {plain(note)}" for note in passage.notes), ""])
