"""A page as one HTML file: no script, nothing fetched, a policy in its head that forbids both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evalq.report.page.blocks import Answer, Block, Chart, Fold, Item, Page, Passage, Section, Table, Text, Value, Word
from evalq.report.page.draw import INSTALL, can_draw, svg_of
from evalq.report.page.markup import Safe, escape, tag

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
WIDE, NARROW = 760, 260  # pixels of a plot on a screen and on a phone
LONG = 36  # characters


def page_html(page: Page) -> str:
    """The whole file."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", page.title),
        tag("link", rel="icon", href="data:,"),
        Safe(f"<style>{style}</style>"),
    )
    skip = tag("a", "To the results", class_="skip", href="#main")
    top = tag("header", tag("h1", page.title), _facts(page), *_blocks(page.lead), _contents(page))
    main = tag("main", *map(_section, page.sections), id="main", tabindex="-1")
    body = tag("body", skip, top, main, tag("footer", tag("p", page.foot)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _facts(page: Page) -> Safe:
    pairs = (tag("div", tag("dt", name), tag("dd", value)) for name, value in page.facts)
    return tag("dl", *pairs, class_="facts") if page.facts else Safe("")


def _contents(page: Page) -> Safe:
    links = (tag("li", tag("a", section.title, href=f"#{section.anchor}")) for section in page.sections)
    return tag("nav", tag("ol", *links), aria_label="Contents")


def _section(section: Section) -> Safe:
    heading = f"{section.anchor}-title"
    return tag(
        "section",
        tag("h2", section.title, id=heading),
        *_blocks(section.blocks),
        id=section.anchor,
        aria_labelledby=heading,
    )


def _blocks(blocks: Sequence[Block]) -> list[Safe]:
    return [_block(block) for block in blocks]


def _block(block: Block) -> Safe:
    match block:
        case Text():
            return tag("p", block.text, class_=None if block.kind == "plain" else block.kind)
        case Table():
            return _table(block)
        case Chart():
            return _chart(block)
        case Fold():
            return tag(
                "details", tag("summary", block.summary), tag("div", *map(_block, block.blocks), class_="inside")
            )
        case Item():
            return _item(block)
        case Passage():
            return _passage(block)


def _table(table: Table) -> Safe:
    """Wide tables scroll by themselves, by keyboard too."""
    head = tag("tr", *(tag("th", name, scope="col", class_=_number(table, i)) for i, name in enumerate(table.columns)))
    rows = [tag("tr", *(_cell(table, i, value) for i, value in enumerate(row))) for row in table.rows]
    whole = tag("table", tag("caption", table.caption), tag("thead", head), tag("tbody", *rows))
    return tag("div", whole, class_="scroll", role="region", tabindex="0", aria_label=table.caption)


def _number(table: Table, column: int) -> str | None:
    return "num" if column in table.numeric else None


def _cell(table: Table, column: int, value: Value) -> Safe:
    """A cell; long text keeps a width that can be read on a phone."""
    shown = tag("span", value.text, class_=f"word {value.kind}") if isinstance(value, Word) else escape(value)
    long = isinstance(value, str) and len(value) > LONG and column not in table.numeric
    if column == 0:
        return tag("th", shown, scope="row", class_="long" if long else None)
    return tag("td", shown, class_="long" if long else _number(table, column))


def _chart(chart: Chart) -> Safe:
    title = tag("p", chart.title, class_="title")
    behind = tag("details", tag("summary", f"Figures of this chart: {chart.title}"), _table(chart.table))
    if not can_draw():
        missing = tag("p", f"The picture needs the drawing library: {INSTALL}.", class_="note")
        return tag("figure", title, missing, _table(chart.table))
    pictures = [
        tag("div", Safe(svg_of(chart.spec(width), chart.description)), class_=name)
        for name, width in (("wide", WIDE), ("narrow", NARROW))
    ]
    return tag("figure", title, *pictures, behind)


def _item(item: Item) -> Safe:
    answers = (tag("li", *_answer(answer)) for answer in item.answers)
    note = [tag("p", item.note, class_="note")] if item.note else []
    question = tag("p", item.question, class_="said", dir="auto")
    return tag("div", tag("p", item.title, class_="title"), question, tag("ul", *answers), *note, class_="item")


def _answer(answer: Answer) -> list[Safe]:
    word = {True: Word("right", "pass"), False: Word("wrong", "fail"), None: None}[answer.right]
    badge = [] if word is None else [tag("span", word.text, class_=f"word {word.kind}"), Safe(" ")]
    return [tag("span", f"{answer.label}:", class_="who"), Safe(" "), *badge, tag("bdi", answer.text)]


def _passage(passage: Passage) -> Safe:
    text = tag("p", passage.before, tag("mark", passage.token or "(nothing)"), class_="said", dir="auto")
    notes = tag("ul", *(tag("li", tag("bdi", note)) for note in passage.notes))
    return tag("div", tag("p", passage.title, class_="title"), text, notes, class_="item")
