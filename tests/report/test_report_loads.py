"""Load tests in a report: a line for each scheme over concurrency, every level in the table, what does not stand said aloud."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import record_builder as build

sys.path.insert(0, str(Path(__file__).parents[1] / "loads"))
import load_builder

from evalq.loads.results import Health, HealthCheck
from evalq.records import Record
from evalq.report.page.blocks import Chart, Table, Text, Word
from evalq.report.page.loads import has_loads, load_section

ROWS = build.baseline_rows(3, 4)


def cell(name: str, rates: dict[int, float], **changes: object) -> tuple[str, Record]:
    """A ladder with three repeats a level: `rates` are output tokens per second by requests at once."""
    levels = [
        dataclasses.replace(load_builder.level(rate, 1.02 * rate, 0.99 * rate, label=f"concurrency {n}"), concurrency=n)
        for n, rate in rates.items()
    ]
    result = load_builder.result(*levels, **changes)
    return name, dataclasses.replace(build.record(name, ROWS), load_results={"ladder": result})


def test_a_ladder_is_drawn_over_concurrency() -> None:
    cells = [cell("baseline", {1: 50.0, 10: 400.0}), cell("fp8-weights", {1: 80.0, 10: 700.0})]
    blocks = load_section(cells)
    charts = {block.title: block for block in blocks if isinstance(block, Chart)}
    assert set(charts) == {"Latency ladder: 99th percentile of a request (ladder)", "Throughput ladder (ladder)"}
    data = charts["Throughput ladder (ladder)"].spec(760)["data"]["values"]
    assert [(row["name"], row["x"], row["y"]) for row in data] == [
        ("baseline", 1, 50.0),
        ("fp8-weights", 1, 80.0),
        ("baseline", 10, 400.0),
        ("fp8-weights", 10, 700.0),
    ]
    assert (data[0]["low"], data[0]["high"]) == (49.5, 51.0)
    table = next(block for block in blocks if isinstance(block, Table))
    assert len(table.rows) == 4
    assert all(row[1] == "3" and len(row) == len(table.columns) for row in table.rows)


def test_what_does_not_stand_is_said_and_not_drawn() -> None:
    good, bad = cell("baseline", {1: 50.0, 10: 400.0}), cell("w4a16", {1: 60.0, 10: 90.0}, failure="the server died")
    result = bad[1].load_results["ladder"]
    broken = dataclasses.replace(result.levels[1], valid=False, reasons=["prefix cache was warm"])
    spoilt = dataclasses.replace(result, levels=[result.levels[0], broken])
    record = dataclasses.replace(bad[1], load_results={"ladder": spoilt}, loads_missing=["long"])
    blocks = load_section([good, ("w4a16", record)])
    said = [block.text for block in blocks if isinstance(block, Text)]
    assert "Does not stand: w4a16, ladder, concurrency 10: prefix cache was warm" in said
    assert "Does not stand: w4a16, ladder: the server died" in said
    assert "w4a16: long was asked for and not measured" in said
    chart = next(block for block in blocks if isinstance(block, Chart))
    drawn = chart.spec(760)["data"]["values"]
    assert ("w4a16", 10) not in {(row["name"], row["x"]) for row in drawn}


def test_health_has_its_limits_and_words() -> None:
    check = HealthCheck("compute busy", 0.52, 0.7, "warning", "below 70 %; raise concurrency")
    health = Health("nvml", "", [check], [], [], [], {}, 100)
    blocks = load_section([cell("baseline", {1: 50.0}, health=health)])
    table = next(block for block in blocks if isinstance(block, Table) and block.caption.startswith("Health"))
    assert table.rows[0] == (
        "baseline, ladder: compute busy",
        "52.0%",
        "70%",
        Word("warning", "warn"),
        "below 70 %; raise concurrency",
    )


def test_records_without_the_new_loads_keep_the_old_section() -> None:
    assert not has_loads([("baseline", build.record("baseline", ROWS))])
    assert has_loads([cell("baseline", {1: 50.0})])
