"""Which cells another one beats, what is recommended, and what the articles' claims get."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import record_builder as build
import study_builder

from evalq.config import GateConfig
from evalq.judge.gate import no_verdict
from evalq.records import Check, Estimate, Ledger, Verdict, read_record, to_json, write_text
from evalq.report.page.view import KV_TOKENS, Candidate, Causes, Group
from evalq.study.build import build_study
from evalq.study.claims import claims_of
from evalq.study.gather import record_folders
from evalq.study.tradeoff import recommendation

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


def test_cells_are_placed_by_their_own_pairs(tmp_path: Path) -> None:
    """fp8-kv is the least damaged and the smallest, so it beats the others; the baseline stays for its quality."""
    view = build_study(record_folders(study_builder.write_study(tmp_path)))
    places = {item.point.name: (item.place, item.by) for item in view.groups[0].placed}
    assert places["baseline"] == ("front", [])
    assert places["fp8-kv"] == ("front", [])
    assert places["fp8-weights"] == ("dominated", ["fp8-kv"])
    assert places["w4a16"] == ("dominated", ["fp8-kv", "fp8-weights"])
    memory = {item.point.name: item.point.memory_bytes for item in view.groups[0].placed}
    assert memory["fp8-kv"] == 600 + 48 * KV_TOKENS
    assert memory["w4a16"] == 600 + 96 * KV_TOKENS


def test_without_speed_quality_and_memory_decide(tmp_path: Path) -> None:
    study = study_builder.write_study(tmp_path, verdicts=False)
    for folder in record_folders(study):
        write_text(folder / "record.json", to_json(dataclasses.replace(read_record(folder), loads={})))
    group = build_study(record_folders(study)).groups[0]
    assert {item.point.name: item.place for item in group.placed}["w4a16"] == "dominated"
    assert {item.point.speed for item in group.placed} == {None}
    assert {item.reason for item in group.placed} == {"speed was not measured"}
    assert group.recommendation.startswith("tiny on h200: ship fp8-kv.")


def test_what_is_said_of_records_that_judge_nothing() -> None:
    assert "no scheme to judge" in recommendation([], [])
    assert "memory and speed only" in recommendation([candidate("a", 1, 1, None)], [])
    assert "nothing can be advised" in recommendation([candidate("a", 1, 1, verdict("FAIL", 0.2, 0.1))], [])


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
