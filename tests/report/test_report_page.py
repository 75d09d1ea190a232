"""The page: hostile texts of records stay text, nothing is fetched, every chart has its table, Markdown says the same."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import pytest
import study_builder
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evalq.report.page.blocks import Block, Chart, Fold, Page, Section, Table, Text, Word
from evalq.report.page.charts import apart, interval_rows, wide_spread
from evalq.report.page.compose import study_page
from evalq.report.page.draw import can_draw, svg_of
from evalq.report.page.html import page_html
from evalq.report.page.markdown import page_markdown, plain
from evalq.report.page.markup import clean, escape, tag
from evalq.study.build import build_study
from evalq.study.gather import record_folders

drawing = pytest.mark.skipif(not can_draw(), reason="vl-convert-python is not installed (evalq[report])")
ELEMENTS = """html head meta title link style body header h1 dl div dt dd p nav ol li a main section h2 table caption thead
    tbody tr th td span figure details summary svg g path line text rect circle bdi ul mark footer"""


class Reader(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, name: str, given: list[tuple[str, str | None]]) -> None:
        self.elements.add(name)
        self.attributes |= {(key, value or "") for key, value in given}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = study_builder.write_study(tmp_path_factory.mktemp("hostile"), study_builder.HOSTILE)
    return study_page(
        build_study(record_folders(folder), title=f"Title {study_builder.HOSTILE}", command=study_builder.HOSTILE)
    )


@pytest.fixture(scope="module")
def hostile_html(hostile: Page) -> str:
    return page_html(hostile)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = study_builder.write_study(tmp_path_factory.mktemp("plain"))
    return study_page(build_study(record_folders(folder)))


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_comes_back_as_text(text: str) -> None:
    read = Reader(tag("p", text, title=text))
    assert read.elements == {"p"}
    assert read.text.replace("\r", "\n") == clean(text).replace("\r", "\n")
    assert len(read.attributes) == 1


def test_text_that_turns_others_around_is_shown_as_unknown() -> None:
    assert escape("a\u202eb\x00c\ud800") == "a\ufffdb\ufffdc?"


@drawing
def test_hostile_records_stay_text(hostile_html: str) -> None:
    read = Reader(hostile_html)
    assert read.elements <= set(ELEMENTS.split()), read.elements
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert "alert(1)" in read.text  # it is there, as text


@drawing
@settings(max_examples=40, deadline=None)
@given(st.text(min_size=1, max_size=30))
@example("\x01")
@example("\ufffe")
@example("\ud800 half")
@example("0" * 24 + "\U00010000" * 12)
def test_any_name_can_be_drawn(name: str) -> None:
    row = {"name": name, "value": 1.0, "low": 0.5, "high": 2.0, "label": name, "ink": "var(--c1)"}
    read = Reader(svg_of(interval_rows([row], name)(760), name))
    assert read.elements <= {"svg", "g", "path", "line", "text", "rect"}


@drawing
def test_nothing_is_fetched(hostile_html: str) -> None:
    """No address but the page's own anchors and an empty icon; a policy that forbids everything else."""
    read = Reader(hostile_html)
    addresses = {value for key, value in read.attributes if key in ("src", "href", "xlink:href", "action", "srcset")}
    assert all(value.startswith("#") or value == "data:," for value in addresses), addresses
    assert "url(" not in re.sub(r"<text.*?</text>", "", hostile_html)
    policy = next(value for key, value in read.attributes if key == "content" and "default-src" in value)
    assert "default-src 'none'" in policy
    assert "script-src" not in policy


def test_markdown_of_hostile_records_has_no_html(hostile: Page) -> None:
    from markdown_it import MarkdownIt

    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(page_markdown(hostile))
    read = Reader(rendered)
    assert not read.elements & {"script", "img", "iframe", "a"}, read.elements
    assert "alert(1)" in read.text


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_markdown_text_is_text(text: str) -> None:
    from markdown_it import MarkdownIt

    table = f"| a | b |\n|---|---|\n| x | {plain(text)} |\n"
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(table)
    read = Reader(rendered)
    assert read.elements == {"table", "thead", "tbody", "tr", "th", "td"}
    assert rendered.count("<td") == 2


def test_sections_in_the_order_of_the_questions(page: Page) -> None:
    anchors = [section.anchor for section in page.sections]
    assert anchors[:3] == ["verdicts", "claims", "quality"]
    assert {"memory", "speed", "trade-off", "position", "causes", "comparability", "environment"} <= set(anchors)
    assert isinstance(page.lead[0], Text)
    assert page.lead[0].text.startswith("tiny on h200: ship fp8-kv.")
    assert "1 PASS, 1 PASS (warning), 1 FAIL" in page.lead[0].text


def blocks_of(blocks: object) -> list[Block]:
    found: list[Block] = []
    for block in blocks:  # type: ignore[attr-defined]
        found.append(block)
        if isinstance(block, Fold):
            found += blocks_of(block.blocks)
    return found


def test_every_chart_has_its_table_and_every_row_its_columns(page: Page) -> None:
    blocks = blocks_of(block for section in page.sections for block in section.blocks)
    charts = [block for block in blocks if isinstance(block, Chart)]
    assert len(charts) >= 7
    tables = [block for block in blocks if isinstance(block, Table)] + [chart.table for chart in charts]
    assert all(table.rows for table in tables)
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert all(chart.description for chart in charts)


def test_every_estimate_stands_with_its_n(page: Page) -> None:
    """A table with intervals has a column that counts, or names its n in the caption or its headings."""
    blocks = blocks_of(block for section in page.sections for block in section.blocks)
    tables = [b for b in blocks if isinstance(b, Table)] + [b.table for b in blocks if isinstance(b, Chart)]
    for table in tables:
        if any("[interval]" in name for name in table.columns):
            assert any(re.search(r"\bn\b", name) for name in table.columns), table.caption


@drawing
def test_figures_in_a_picture_are_not_cut() -> None:
    """Coordinates are shortened; a figure that is shown never is."""
    row = {
        "name": "scheme 0.12345",
        "value": 0.00123,
        "low": 0.001,
        "high": 0.00145,
        "label": "0.00123 (p=0.0456)",
        "ink": "red",
    }
    drawn = svg_of(interval_rows([row], "0.98765 of it")(760), "value 0.00123")
    for text in ("scheme 0.12345", "0.00123 (p=0.0456)", "0.98765 of it", 'aria-label="value 0.00123"'):
        assert text in drawn
    coordinates = re.findall(r"translate\(([\d.]+),", drawn)
    assert all(len(number.partition(".")[2]) <= 2 for number in coordinates)


@drawing
def test_charts_are_drawn_for_both_widths(page: Page) -> None:
    text = page_html(page)
    charts = text.count("<figure>")
    assert (
        text.count('<div class="wide"><svg role="img"') == text.count('<div class="narrow"><svg role="img"') == charts
    )
    assert "NaN" not in text
    assert len(text) < 1_000_000


def test_without_the_drawing_library_tables_stand_alone(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalq.report.page.html.can_draw", lambda: False)
    text = page_html(page)
    assert "<svg" not in text
    assert "pip install &#x27;evalq[report]&#x27;" in text
    assert text.count("<table>") >= 12


def test_markdown_holds_the_same_figures(page: Page) -> None:
    text = page_markdown(page)
    for block in page.sections[0].blocks:
        if isinstance(block, Table):
            for row in block.rows:
                assert plain(str(row[2])) in text
    assert "**FAIL**" in text


def test_labels_of_one_side_keep_their_distance() -> None:
    rows = [
        {"name": str(i), "x": 1.0 + i / 100, "y": 3.0 + i / 10, "low": 0.0, "high": 50.0, "label": str(i)}
        for i in range(4)
    ]
    placed = sorted(apart([*rows, {**rows[0], "x": 9.0}], 320, False), key=lambda row: row["label_y"])
    left = [row["label_y"] for row in placed if row["side"] == "left"]
    assert all(b - a >= 50 / 320 * 15 - 1e-9 for a, b in itertools.pairwise(left))


def test_wide_values_bend_the_axis() -> None:
    assert wide_spread([1.7, 52.0])
    assert not wide_spread([1.0, 3.0])
    assert not wide_spread([5.0])
    row = {"name": "a", "value": 1.0, "low": 0.5, "high": 80.0, "label": "", "ink": "red"}
    spec = interval_rows([row, {**row, "value": 60.0}], "x")(760)
    assert spec["layer"][0]["encoding"]["x"]["scale"]["type"] == "symlog"


def test_a_table_alone() -> None:
    page = Page(
        "t", [Text("lead", "lead")], [], [Section("s", "S", [Table("c", ("a", "b"), [("x", Word("PASS", "pass"))])])]
    )
    text = page_html(page)
    assert '<span class="word pass">PASS</span>' in text
