"""A verdict in every format."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from evalq.records import Check, Estimate, Verdict
from evalq.report.comparison import comparison_markdown, comparison_text
from evalq.report.junit import verdict_junit
from evalq.report.markdown import verdict_markdown
from evalq.report.tables import SweepRow, sweep_table, verdict_json, verdict_text
from evalq.report.words import percent, size

INCREASE = Estimate("word_perplexity_increase", 0.0164, 0.0151, 0.0177, 0.95, 62, "ratio estimator")


def verdict(status: str = "FAIL", code: int = 1, warning: bool = False, reason: str = "above the limit") -> Verdict:
    checks = [
        Check("word_perplexity", True, status, INCREASE, 0.01, 0.015, reason),
        Check("hellaswag acc", False, "FAIL", None, None, 0.01, "advice only"),
    ]
    return Verdict(
        1,
        status,
        code,
        warning,
        f"{status}: mixed-4-8 against baseline: {reason}.",
        [reason, "second reason"],
        checks,
        "b-id",
        "c-id",
        {"target": "1.0%"},
        [],
        "0.1.0",
        "2026-01-01T00:00:00+00:00",
    )


def text_of(renderable: object) -> str:
    from rich.console import Console

    console = Console(width=140, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_text_shows_figures_limits_and_exit_code() -> None:
    text = verdict_text(verdict())
    for part in ("+1.64 % [+1.51, +1.77]", "target 1 %, limit 1.5 %", "second reason", "FAIL, exit code 1"):
        assert part in text
    assert "\x1b" not in text


def test_a_warning_is_said_aloud() -> None:
    assert "PASS (warning), exit code 0" in verdict_text(verdict("PASS", 0, True))


def test_json_is_one_line_that_parses() -> None:
    line = verdict_json(verdict())
    assert "\n" not in line
    assert json.loads(line)["exit_code"] == 1


@pytest.mark.parametrize(
    ("status", "failures", "errors"), [("PASS", 0, 0), ("FAIL", 2, 0), ("INVALID", 0, 2), ("INCONCLUSIVE", 0, 2)]
)
def test_junit_counts(status: str, failures: int, errors: int) -> None:
    suite = ET.fromstring(verdict_junit(verdict(status, 0 if status == "PASS" else 1)))  # advice never counts
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", str(failures), str(errors))
    assert len(suite.findall("testcase/failure")) == failures
    assert len(suite.findall("testcase/error")) == errors


def test_junit_survives_what_xml_does_not_allow() -> None:
    nasty = 'a\x00<b> & "quoted" \x1b[31m'
    suite = ET.fromstring(verdict_junit(verdict(reason=nasty)))
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert '<b> & "quoted"' in str(failure.get("message"))


def test_markdown_has_a_row_per_check_and_cannot_be_broken_by_names() -> None:
    text = verdict_markdown(verdict(reason="a | b <script> `x`\nnew"))
    assert text.count("\n| ") == 3  # head and two checks; the ruler starts with |-
    assert "<script" not in text.replace("\\<script", "")
    assert "a \\| b" in text


def test_sweep_table_has_every_column() -> None:
    rows = [
        SweepRow("fp8-kv", INCREASE, 2_000_000_000, 11_520, 1234.5, verdict(), p_holm=0.001),
        SweepRow("w4a16", None, None, None, None, None, failure="failed (oom)"),
        SweepRow("int8", INCREASE, 1024, 96, 10.0, verdict("PASS", 0, True), floor=INCREASE, p_holm=0.9),
    ]
    text = text_of(sweep_table(rows))
    for part in ("+1.64 % [+1.51, +1.77]", "1.86 GiB", "11.25 KiB", "1,234.5", "failed (oom)", "PASS (warning)", "A/A"):
        assert part in text
    assert "Holm" in text
    assert "every FAIL stands" in text


def test_a_fail_that_does_not_stand_after_holm_is_named() -> None:
    rows = [SweepRow(name, INCREASE, 1, 1, 1.0, verdict(), p_holm=p) for name, p in (("a", 0.04), ("b", 0.001))]
    assert "not after it: a" in " ".join(text_of(sweep_table(rows)).split())


class Two:
    first_id = "a"
    second_id = "b"
    estimates = [INCREASE, Estimate("mean_kld_nats", 0.012, 0.011, 0.013, 0.95, 9, "m", note="lower bound")]  # noqa: RUF012
    figures = {"weight_bytes": (1000.0, 600.0), "offline output_tokens_per_second": (None, 5.0)}  # noqa: RUF012
    notes = ["a note"]  # noqa: RUF012


@pytest.mark.parametrize("show", [comparison_text, comparison_markdown])
def test_comparison(show: object) -> None:
    text = show(Two())  # type: ignore[operator]
    for part in ("+1.640 % [+1.510, +1.770]", "0.012 [0.011, 0.013] nats", "lower bound", "60.0%", "a note"):
        assert part in text


def test_units_are_written_for_people() -> None:
    assert size(1024**3) == "1.00 GiB"
    assert size(96) == "96 B"
    assert size(None) == "-"
    assert percent(-0.0012) == "-0.12 %"
