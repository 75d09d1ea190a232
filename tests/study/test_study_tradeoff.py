"""Which cells another one beats, what is recommended, and what the articles' claims get."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import record_builder as build

from evalq.config import GateConfig
from evalq.judge.gate import no_verdict
from evalq.records import Check, Estimate, Ledger, Verdict
from evalq.report.page.view import Candidate, Causes, Group
from evalq.study.claims import claims_of
from evalq.study.tradeoff import KV_TOKENS, recommendation, tradeoff_of

ROWS = build.baseline_rows(3, 4)


def verdict(status: str, value: float, half: float, warning: bool = False) -> Verdict:
    estimate = Estimate("word_perplexity_increase", value, value - half, value + half, 0.95, 62, "test")
    check = Check("word_perplexity", True, status, estimate, 0.01, 0.015, "reason")
    code = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}[status]
    blank = no_verdict(["reason"], GateConfig())
    return dataclasses.replace(blank, status=status, exit_code=code, warning=warning, checks=[check])


def candidate(
    name: str, weights: int, kv: int, given: Verdict | None, dtype: str = "int8", kv_dtype: str = "bfloat16"
) -> Candidate:
    ledger = Ledger(weights, {dtype: weights}, weights, kv, 1, kv, kv_dtype, 1, "resident set")
    record = build.record(name, ROWS, quant=name, ledger=ledger)
    assert record.applied is not None
    applied = dataclasses.replace(record.applied, kv_dtype_effective=kv_dtype)
    return Candidate(dataclasses.replace(record, applied=applied), Path(name), given, Causes())


def group(*candidates: Candidate) -> Group:
    ledger = Ledger(1000, {"bfloat16": 1000}, 1000, 2, 1, 2, "bfloat16", 1, "resident set")
    return Group("tiny", "h200", "default", build.record("baseline", ROWS, ledger=ledger), list(candidates))


def test_dominated_tied_and_front() -> None:
    """small is 500 bytes at +2 +-0.1 %; worse is 600 bytes at +5 %; near is 600 bytes at +1.9 +-0.2 %; bytes of KV equal."""
    cells = tradeoff_of(
        group(
            candidate("small", 500, 2, verdict("FAIL", 0.02, 0.001)),
            candidate("worse", 600, 2, verdict("FAIL", 0.05, 0.001)),
            candidate("near", 600, 2, verdict("FAIL", 0.019, 0.002)),
            candidate("unknown", 400, 2, None),
        )
    )
    standing = {one.name: one.standing for one in cells}
    assert standing == {"small": "front", "worse": "dominated", "near": "tied", "unknown": "open", "baseline": "front"}
    assert cells[0].name == "unknown"
    assert cells[0].total_bytes == 400 + 2 * KV_TOKENS


def test_recommends_the_smallest_that_passes() -> None:
    cells = group(
        candidate("big", 800, 2, verdict("PASS", 0.001, 0.001)),
        candidate("small", 500, 1, verdict("PASS", 0.012, 0.001, warning=True)),
        candidate("smallest", 100, 1, verdict("FAIL", 0.2, 0.001)),
    )
    said = recommendation(cells, tradeoff_of(cells))
    share = 1 - (500 + KV_TOKENS) / (1000 + 2 * KV_TOKENS)
    assert said.startswith(f"Ship small, which takes {share:.0%} less memory than 16 bit")
    assert "passes with a warning" in said
    assert "1 other scheme passed" in said


def test_recommends_nothing_where_nothing_passes() -> None:
    cells = group(
        candidate("a", 1, 1, verdict("FAIL", 0.2, 0.01)), candidate("b", 1, 1, verdict("INCONCLUSIVE", 0.015, 0.01))
    )
    assert recommendation(cells, tradeoff_of(cells)) == (
        "Ship none of these schemes: the 16-bit baseline is what stays within the budget. b cannot be decided by these data."
    )
    assert "no scheme to judge" in recommendation(group(), [])
    speed = group(candidate("a", 1, 1, None))
    assert "memory and speed only" in recommendation(speed, tradeoff_of(speed))


def test_claims_by_hand() -> None:
    cells = group(
        candidate("fp8-kv", 1000, 1, verdict("PASS", 0.010, 0.004), "bfloat16", "fp8_e4m3 (uint8)"),
        candidate("fp8-weights-kv", 500, 1, verdict("FAIL", 0.03, 0.001), "float8_e4m3fn", "fp8_e4m3 (uint8)"),
        candidate("mixed-4-8", 600, 2, verdict("FAIL", 0.2, 0.001)),
    )
    answers = {claim.number: (claim.answer, claim.measured) for claim in claims_of(cells)}
    assert answers[1] == ("agrees", "fp8-kv: 1 of 2 bytes per token; fp8-weights-kv: 1 of 2 bytes per token")
    assert answers[2][0] == "differs"
    assert answers[3][0] == "differs"  # +3 % lies outside 0.5 to 1.5 %
    assert answers[4] == ("open", "40.0% less weight memory")
    assert {number for number, (answer, _) in answers.items() if answer == "open"} == {4, 5, 6, 7, 8}


def test_claims_stay_open_without_cells() -> None:
    assert {claim.answer for claim in claims_of(group())} == {"open"}
