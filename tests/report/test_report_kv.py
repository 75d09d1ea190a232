"""KV tables and the heat map."""

from __future__ import annotations

from xml.etree import ElementTree

from evalq.kvrecord import Sensitivity
from evalq.report.kv import heat_map, markdown_table, needle_table, sensitivity_lines

ANSWER = Sensitivity(
    "only across chunks", "yes", "scales", "fp8_e4m3", "FLASHINFER", "0.26", 766,
    {"one step, scales x 1000": 0.0, "chunks, scales x 1000": 2.5, "one token per step, scales x 1000": 3.0},
    1e-5, 0.01, {}, "f", "t",
)  # fmt: skip
GRIDS = [("baseline", {(512, 0): (4, 4), (512, 50): (3, 4)}), ("a<b", {(512, 0): (0, 4)})]


def test_answers_and_how_far_scores_moved() -> None:
    lines = sensitivity_lines([("fp8-kv", "vLLM 0.26, h200", ANSWER)])
    assert (
        "| fp8-kv | vLLM 0.26, h200 | FLASHINFER | fp8_e4m3 | scales | only across chunks | yes | yes | 1.0e-05 |"
        in lines
    )
    assert "| fp8-kv | vLLM 0.26, h200 | chunks, scales x 1000 | 2.5000 |" in lines


def test_heat_map_is_xml_with_every_cell() -> None:
    root = ElementTree.fromstring(heat_map(GRIDS))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    for wanted in ("4/4", "3/4", "0/4", "-", "a<b", "512 tokens", "50 %"):
        assert wanted in texts


def test_needle_table_has_all_schemes_in_a_cell() -> None:
    lines = needle_table(GRIDS)
    assert "| 0 % | 4 of 4 / 0 of 4 |" in lines
    assert "| 50 % | 3 of 4 / 0 of 0 |" in lines


def test_table_lines() -> None:
    assert markdown_table(["a", "b"], [["x", "1"]]) == ["| a | b |", "|---|---:|", "| x | 1 |", ""]
