"""What changed most between two records, for the terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from evalq.report.page import blocks
from evalq.report.page.cause import cause_blocks
from evalq.report.page.markup import clean
from evalq.report.page.view import Causes

WIDTH = 110


def causes_text(title: str, causes: Causes, colour: bool = False, width: int = WIDTH) -> str:
    """Everything in the order of the report's section; texts of records are printed as they are, never as markup."""
    console = Console(width=width, force_terminal=colour, no_color=not colour, highlight=False, markup=False)
    shown = [_block(block) for block in cause_blocks(causes)]
    with console.capture() as capture:
        console.print(Text(clean(title), style="bold"))
        console.print(Group(*shown) if shown else Text("Nothing changed, or nothing was kept that could show it."))
    return capture.get()


def _block(block: blocks.Block) -> RenderableType:
    match block:
        case blocks.Table():
            return _table(block)
        case blocks.Item():
            return _item(block)
        case blocks.Passage():
            return _passage(block)
        case blocks.Text():
            return Text(clean(block.text), style="dim")
        case _:
            return Text("")


def _table(block: blocks.Table) -> Table:
    table = Table(title=clean(block.caption), title_justify="left")
    for index, name in enumerate(block.columns):
        table.add_column(name, justify="right" if index in block.numeric else "left")
    for row in block.rows:
        table.add_row(*(Text(clean(value.text if isinstance(value, blocks.Word) else value)) for value in row))
    return table


def _item(block: blocks.Item) -> RenderableType:
    styles = {True: "green", False: "red", None: ""}
    lines = [Text(f"  {clean(block.question)}")]
    for answer in block.answers:
        mark = {True: "right ", False: "wrong ", None: ""}[answer.right]
        line = Text(f"  {answer.label}: ")
        lines.append(line.append(mark, style=styles[answer.right]).append(clean(answer.text)))
    note = [Text(f"  {block.note}", style="dim")] if block.note else []
    return Padding(Group(Text(clean(block.title), style="bold"), *lines, *note), (1, 0, 0, 0))


def _passage(block: blocks.Passage) -> RenderableType:
    """The token stands in brackets, so that it is seen without colour too."""
    text = Text(f"  …{clean(block.before)}").append(f"⟦{clean(block.token)}⟧", style="bold reverse")
    notes = [Text(f"  {clean(note)}", style="dim") for note in block.notes]
    return Padding(Group(Text(clean(block.title), style="bold"), text, *notes), (1, 0, 0, 0))
