"""Levels of a load's config, and traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalq.config import LoadConfig
from evalq.errors import ConfigError
from evalq.loads.schedule import levels_of, read_trace

LADDER = LoadConfig("l", kind="ladder", start="serving", requests=10, waves=2, concurrencies=[1, 10], peak_requests=7)
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_ladder_has_waves_for_every_slot_and_a_peak() -> None:
    levels = levels_of(LADDER)
    assert [(plan.label, plan.requests, plan.concurrency) for plan in levels] == [
        ("concurrency 1", 10, 1),
        ("concurrency 10", 20, 10),
        ("all at once", 7, None),
    ]


def test_rates_keep_the_number_of_requests() -> None:
    levels = levels_of(LoadConfig("r", kind="rate", start="serving", rates=[0.5, 4.0], requests=5))
    assert [(plan.label, plan.rate_per_second, plan.requests) for plan in levels] == [
        ("0.5 requests/s", 0.5, 5),
        ("4 requests/s", 4.0, 5),
    ]


def test_offline_is_one_level() -> None:
    (plan,) = levels_of(LoadConfig("o", requests=3, input_tokens=5, output_tokens=2))
    assert (plan.input_lengths, plan.output_lengths, plan.arrivals) == ([5, 5, 5], [2, 2, 2], None)


def test_trace_is_scaled_in_time_and_length(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        HEAD + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9805900,396,109\n", encoding="utf-8"
    )
    rows = read_trace(file, 10)
    assert [(round(r.arrival, 3), r.input_tokens, r.output_tokens) for r in rows] == [(0.0, 374, 44), (4.3, 396, 109)]
    load = LoadConfig(
        "t", kind="trace", trace_speed=2.0, trace_length_scale=0.1, requests=9, input_tokens=38, output_tokens=20
    )
    (plan,) = levels_of(load, rows)
    assert plan.input_lengths == [37, 38]
    assert plan.output_lengths == [4, 11]
    assert plan.arrivals == pytest.approx([0.0, 2.15])


def test_seconds_are_read_too_and_no_length_becomes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(HEAD + "10,1,0\n12.5,3,1\n14,3,1\n", encoding="utf-8")
    rows = read_trace(file, 2)
    assert [r.arrival for r in rows] == [0.0, 2.5]
    (plan,) = levels_of(LoadConfig("t", kind="trace", trace_length_scale=0.01, requests=2), rows)
    assert plan.input_lengths == plan.output_lengths == [1, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TIMESTAMP,ContextTokens\n1,2\n", "lacks the columns GeneratedTokens"),
        (HEAD, "has no rows"),
        (HEAD + "1,x,2\n", "line 2 of the trace"),
        (HEAD + "1,-1,2\n", "negative"),
        (HEAD + "5,1,2\n4,1,2\n", "not in order"),
        (HEAD + "soon,1,2\n", "line 2"),
    ],
)
def test_damaged_traces_name_the_place(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_trace(file, 10)


def test_missing_trace_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv", 1)
