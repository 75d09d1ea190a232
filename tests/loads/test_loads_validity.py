"""When figures count and when two may be compared: e1 to e7 where no engine is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from load_builder import level, repeat, request, result

from evalq.loads.build import joined, wrong_lengths
from evalq.loads.compare import compare_loads
from evalq.loads.health import without_sensors
from evalq.loads.validity import are_interleaved, device_problems, level_problems, unlike

GOOD = [repeat(100.0), repeat(101.0), repeat(99.0)]


def test_three_repeats_after_a_warm_up_count() -> None:
    assert level_problems(GOOD, 4) == []


@pytest.mark.parametrize(
    ("repeats", "warmup", "words"),
    [
        (GOOD[:2], 4, "2 repeats; at least 3"),
        (GOOD, 0, "no warm-up outside the window"),
        ([repeat(50.0), *GOOD[1:]], 4, "the first repeat ran at 50% of the others: warm-up was not over"),
        ([*GOOD[:2], repeat(100.0, prefix_hit_share=0.5)], 4, "50.0% of the prompt tokens came from the prefix cache"),
        ([*GOOD[:2], repeat(100.0, requests_failed=4)], 4, "4 of 300 requests failed"),
        ([*GOOD[:2], repeat(100.0, wrong_lengths=1)], 4, "1 of 300 answers have another length"),
    ],
)
def test_each_rule_has_its_reason(repeats: list[Any], warmup: int, words: str) -> None:
    """e1 (a warm prefix cache), e2 (a damaged model stops early), e3 (slow first seconds)."""
    problems = level_problems(repeats, warmup)
    assert len(problems) == 1
    assert words in problems[0]


def test_a_few_errors_and_hits_are_no_reason() -> None:
    assert level_problems([*GOOD[:2], repeat(100.0, requests_failed=3, prefix_hit_share=0.009)], 4) == []


def test_e1_second_run_of_the_same_load_is_within_noise() -> None:
    first, second = result(level(100, 103, 98)), result(level(101, 99, 102, minute=1))
    rows = {row.figure: row for row in compare_loads(first, second)}
    assert not rows["output_tokens_per_second"].differs


def test_e2_early_stop_is_counted() -> None:
    assert wrong_lengths([request(), request(output_tokens=7), request(output_tokens=7, ok=False)]) == 1


def test_e4_unequal_scheduler_limits_are_no_comparison() -> None:
    other = result(level(100, 101, 99), scheduler={"max_num_seqs": 128, "max_num_batched_tokens": 8192})
    assert unlike(result(), other) == [
        "max_num_seqs is 256 in one cell and 128 in the other; set engine.max_num_seqs alike"
    ]
    rows = compare_loads(result(level(100, 101, 99)), other)
    assert not rows[0].valid
    assert "max_num_seqs" in rows[0].reasons[0]


def test_e6_slower_candidate_is_a_result_and_the_ladder_shows_where_it_turns() -> None:
    few, many = {"label": "concurrency 5"}, {"label": "concurrency 500"}
    baseline = result(level(100, 101, 99, **few), level(1000, 1010, 990, **many))
    candidate = result(level(80, 81, 79, minute=1, **few), level(1500, 1510, 1490, minute=1, **many))
    rows = [row for row in compare_loads(baseline, candidate) if row.figure == "output_tokens_per_second"]
    assert [(row.level, round(row.share, 2)) for row in rows] == [("concurrency 5", 0.8), ("concurrency 500", 1.5)]
    assert all(row.valid and row.differs for row in rows)


def test_e7_other_board_of_the_same_chip_is_refused() -> None:
    first = result(level(100, 101, 99), device="NVIDIA H100 PCIe")
    second = result(level(100, 101, 99, minute=1), device="NVIDIA H100 NVL")
    rows = compare_loads(first, second)
    assert all(not row.valid for row in rows)
    assert "which are not one device" in rows[0].reasons[0]


def test_cells_one_after_the_other_are_not_interleaved() -> None:
    first, after = level(100, 101, 99), level(100, 101, 99, minute=10)
    assert not are_interleaved(first, after)
    (row, *_) = compare_loads(result(first), result(after))
    assert not row.valid
    assert "load.rounds=2" in row.reasons[-1]


def test_a_b_b_a_is_interleaved_after_two_rounds() -> None:
    """A at 0, B at 10 and 20, A at 30."""
    a = joined(result(level(100, 101, 99)), result(level(90, 91, 89, minute=30)), 1).levels[0]
    b = joined(result(level(100, 101, 99, minute=10)), result(level(95, 96, 94, minute=20)), 1).levels[0]
    assert are_interleaved(a, b)
    assert len(a.repeats) == 6
    assert a.figures["output_tokens_per_second"].value == 95.0
    assert a.figures["output_tokens_per_second"].low == 89.0


def test_round_without_a_level_is_said() -> None:
    found = joined(result(level(100, 101, 99)), result(), 1)
    assert found.levels[0].reasons == ["the later round has no such level"]


def test_other_lengths_are_another_load() -> None:
    changed = dataclasses.replace(level(100, 101, 99, minute=1), input_tokens=400.0)
    rows = compare_loads(result(level(100, 101, 99)), result(changed))
    assert "input_tokens is 500.0 in one cell and 400.0 in the other" in rows[0].reasons


def test_throttling_and_company_make_figures_invalid_and_a_power_cap_does_not() -> None:
    health = without_sensors("")
    assert device_problems(None) == device_problems(health) == []
    assert device_problems(dataclasses.replace(health, throttling=["power cap: the power limit of the device"])) == []
    hot = device_problems(dataclasses.replace(health, throttling=["thermal slowdown by the hardware"]))
    assert "lowered its clocks" in hot[0]
    shared = device_problems(dataclasses.replace(health, foreign_processes=[77]))
    assert "process 77 appeared" in shared[0]
