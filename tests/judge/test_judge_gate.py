"""Statuses, warnings, margins, conditions, the A/A floor, looks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import record_builder as rb

from evalq.config import GateConfig
from evalq.errors import ConfigError, RecordError
from evalq.judge.compare import compare
from evalq.judge.floor import aa_floor, floor_width, read_floor, write_floor
from evalq.judge.gate import judge
from evalq.judge.multiplicity import holm, holm_fails
from evalq.records import Estimate, Record, Verdict, to_json


@dataclasses.dataclass
class Pair:
    first: Record
    first_folder: Path
    second: Record
    second_folder: Path

    def judge(self, allow: tuple[str, ...] = (), floor: Estimate | None = None, **policy: Any) -> Verdict:
        gate = dataclasses.replace(GateConfig(), **policy)
        return judge(self.first, self.first_folder, self.second, self.second_folder, gate, allow, floor)


def pair(tmp_path: Path, increase: float, noise: float = 0.002, flips: int = 0, **changes: Any) -> Pair:
    rows = rb.baseline_rows()
    worse = rb.damaged(rows, increase, noise, flips)
    first = rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    second = rb.write(tmp_path / "c", rb.record("cand", worse, **changes), worse)
    return Pair(first, tmp_path / "b", second, tmp_path / "c")


@pytest.mark.parametrize(
    ("increase", "status", "warning"),
    [
        (0.0, "PASS", False),
        (0.008, "PASS", False),
        (0.012, "PASS", True),
        (0.015, "INCONCLUSIVE", False),
        (0.02, "FAIL", False),
    ],
)
def test_status_by_increase(tmp_path: Path, increase: float, status: str, warning: bool) -> None:
    verdict = pair(tmp_path, increase).judge()
    assert (verdict.status, verdict.warning) == (status, warning)
    estimate = verdict.checks[0].estimate
    assert estimate is not None
    assert estimate.value == pytest.approx(increase, abs=1e-12)
    to_json(verdict)


@pytest.mark.parametrize("metric", ["word_perplexity", "byte_perplexity", "token_perplexity"])
def test_each_perplexity_is_an_increase_of_its_own(tmp_path: Path, metric: str) -> None:
    verdict = pair(tmp_path, 0.012).judge(metric=metric)
    per_word = {"word_perplexity": 1, "byte_perplexity": 6, "token_perplexity": 2}[metric]
    estimate = verdict.checks[0].estimate
    assert estimate is not None
    assert estimate.value == pytest.approx(1.012 ** (1 / per_word) - 1, abs=1e-12)


def test_strict_turns_a_warning_into_a_failure(tmp_path: Path) -> None:
    verdict = pair(tmp_path, 0.012).judge(strict=True)
    assert (verdict.status, verdict.exit_code) == ("FAIL", 1)
    assert "strict" in " ".join(verdict.reasons)


def test_nothing_is_rounded_before_comparing(tmp_path: Path) -> None:
    high = pair(tmp_path, 0.008).judge().checks[0].estimate
    assert high is not None
    assert high.high is not None
    just_inside, just_outside = repr(high.high * (1 + 1e-9)), repr(high.high * (1 - 1e-9))
    assert not pair(tmp_path, 0.008).judge(target=just_inside).warning
    assert pair(tmp_path, 0.008).judge(target=just_outside).warning


def test_few_documents_are_inconclusive(tmp_path: Path) -> None:
    verdict = pair(tmp_path, 0.0).judge(min_documents=80)
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 3)
    assert "18 more" in verdict.summary


def test_accuracy_advises_unless_its_margin_is_required(tmp_path: Path) -> None:
    worse = pair(tmp_path, 0.0, flips=40)
    assert worse.judge(task_margins={"hellaswag": "2%"}).status == "PASS"
    verdict = worse.judge(task_margins={"hellaswag": "2%"}, required_margins=["hellaswag"])
    assert (verdict.status, verdict.exit_code) == ("FAIL", 1)
    assert "hellaswag" in verdict.summary
    assert "40 items flipped" in verdict.summary


def test_a_required_margin_that_the_items_cannot_carry_is_inconclusive(tmp_path: Path) -> None:
    verdict = pair(tmp_path, 0.0, flips=2).judge(task_margins={"hellaswag": "1%"}, required_margins=["hellaswag"])
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 3)


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        ("weight_bytes <= 70%", "PASS"),
        ("weight_bytes <= 60%", "PASS"),
        ("weight_bytes <= 59.9%", "FAIL"),
        ("kv_bytes_per_token <= 50%", "FAIL"),
        ("output_tokens_per_second@offline >= 95%", "PASS"),
        ("output_tokens_per_second@100 >= 100%", "INCONCLUSIVE"),
        ("output_tokens_per_second@100 >= 110%", "FAIL"),
        ("output_tokens_per_second@500 >= 90%", "INVALID"),
    ],
)
def test_conditions_on_memory_and_speed(tmp_path: Path, condition: str, status: str) -> None:
    verdict = pair(tmp_path, 0.0).judge(conditions=[condition])
    assert verdict.status == status
    assert condition in " ".join(verdict.reasons)


def test_a_condition_on_what_was_not_measured_is_invalid(tmp_path: Path) -> None:
    verdict = pair(tmp_path, 0.0, ledger=None).judge(conditions=["weight_bytes <= 70%"])
    assert (verdict.status, verdict.exit_code) == ("INVALID", 5)
    assert "candidate has no weight_bytes" in verdict.summary


def test_a_difference_may_be_allowed_and_is_then_named(tmp_path: Path) -> None:
    other = pair(tmp_path, 0.0, fingerprint={"attention_backend": "FLASHINFER"})
    assert other.judge().status == "INVALID"
    verdict = other.judge(allow=("attention_backend",))
    assert verdict.status == "PASS"
    assert verdict.allowed_differences == ["attention_backend: baseline 'FLASH_ATTN', candidate 'FLASHINFER'"]


def test_a_policy_may_allow_a_difference(tmp_path: Path) -> None:
    found = pair(tmp_path, 0.0, fingerprint={"attention_backend": "FLASHINFER"})
    gate = dataclasses.replace(GateConfig(), allow=["attention_backend", "never_seen"])
    verdict = judge(found.first, found.first_folder, found.second, found.second_folder, gate)
    assert verdict.status == "PASS"
    assert len(verdict.allowed_differences) == 1


def test_allowing_an_unknown_field_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean attention_backend"):
        pair(tmp_path, 0.0).judge(allow=("attention_backnd",))


def test_swapped_arguments_are_refused(tmp_path: Path) -> None:
    found = pair(tmp_path, 0.03)
    verdict = judge(found.second, found.second_folder, found.first, found.first_folder, GateConfig())
    assert (verdict.status, verdict.exit_code) == ("INVALID", 5)
    assert "swapped arguments?" in verdict.summary


def test_what_was_left_out_is_said(tmp_path: Path) -> None:
    found = pair(tmp_path, 0.0)
    sides = []
    for record in (found.first, found.second):
        scores = dataclasses.replace(record.tasks["wikitext"], left_out=3)
        sides.append(dataclasses.replace(record, tasks={**record.tasks, "wikitext": scores}))
    verdict = judge(sides[0], found.first_folder, sides[1], found.second_folder, GateConfig())
    assert verdict.status == "PASS"
    assert "note: 3 of 65 of wikitext left out on both sides" in verdict.reasons
    uneven = judge(found.first, found.first_folder, sides[1], found.second_folder, GateConfig())
    assert "left_out of wikitext: baseline 0, candidate 3" in uneven.summary


def test_random_weights_are_never_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="random weights"):
        pair(tmp_path, 0.0).judge(allow=("load_format",))
    found = pair(tmp_path / "policy", 0.0)
    gate = dataclasses.replace(GateConfig(), allow=["load_format"])
    with pytest.raises(ConfigError, match=r"gate\.allow names load_format, which is never excused"):
        judge(found.first, found.first_folder, found.second, found.second_folder, gate)


def test_a_field_on_one_side_only_is_a_difference(tmp_path: Path) -> None:
    verdict = pair(tmp_path, 0.0, fingerprint={"seed": "DROP"}).judge()
    assert verdict.status == "INVALID"
    assert "seed: baseline 0, candidate '(absent)'" in verdict.summary


def test_looks_widen_the_interval_and_name_the_next(tmp_path: Path) -> None:
    found = pair(tmp_path, 0.0145)
    one, several = found.judge(), found.judge(looks=[20, 62, 200], extend=True)
    width = [v.checks[0].estimate.high - v.checks[0].estimate.low for v in (one, several)]  # type: ignore[union-attr,operator]
    assert width[1] > width[0]
    assert several.status == "INCONCLUSIVE"
    assert "next planned look is at 200" in several.summary


def test_more_documents_than_planned_looks_is_invalid(tmp_path: Path) -> None:
    verdict = pair(tmp_path, 0.0).judge(looks=[20, 40])
    assert verdict.status == "INVALID"
    assert "end gate.looks at 62" in verdict.summary


def aa_pair(tmp_path: Path) -> Pair:
    rows = rb.baseline_rows()
    again = rb.damaged(rows, 0.0, noise=0.0002)
    first = rb.write(tmp_path / "a1", rb.record("baseline", rows), rows)
    fields = {"max_num_seqs": 16}
    second = rb.write(tmp_path / "a2", rb.record("again", again, quant="baseline", fingerprint=fields), again)
    return Pair(first, tmp_path / "a1", second, tmp_path / "a2")


def test_a_difference_inside_the_floor_is_called_noise(tmp_path: Path) -> None:
    same = aa_pair(tmp_path)
    floor = aa_floor(same.first, same.first_folder, same.second, same.second_folder)
    write_floor(tmp_path / "records", same.first, floor)
    kept = read_floor(tmp_path / "records", same.first)
    assert kept == floor
    assert 0 < (floor_width(kept) or 0) < 0.001
    small = pair(tmp_path, 0.00001, noise=0.0001).judge(floor=kept)
    assert "that is noise" in " ".join(small.reasons)
    large = pair(tmp_path, 0.005).judge(floor=kept)
    assert "A/A floor" in " ".join(large.reasons)
    assert "that is noise" not in " ".join(large.reasons)


def test_a_floor_may_be_required(tmp_path: Path) -> None:
    assert pair(tmp_path, 0.0).judge(aa_floor=True).status == "INVALID"


def test_a_floor_needs_one_configuration(tmp_path: Path) -> None:
    found = pair(tmp_path, 0.0)
    with pytest.raises(RecordError, match="not an A/A pair"):
        aa_floor(found.first, found.first_folder, found.second, found.second_folder)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_holm_over_a_sweep_leaves_unjudged_cells_out(tmp_path: Path) -> None:
    failing, passing = pair(tmp_path, 0.03).judge(), pair(tmp_path, 0.0).judge()
    found = holm_fails([failing, None, passing])
    assert found[0] is not None
    assert found[0] < 0.001
    assert found[1] is None
    assert found[2] == pytest.approx(1.0)


def test_compare_gives_every_estimate(tmp_path: Path) -> None:
    found = pair(tmp_path, 0.02, flips=3)
    result = compare(found.first, found.first_folder, found.second, found.second_folder)
    names = {estimate.name for estimate in result.estimates}
    assert {"word_perplexity_increase", "byte_perplexity_increase", "hellaswag_acc_norm_difference"} <= names
    assert {"hellaswag_acc_flips", "truthfulqa_mc2_acc_difference"} <= names
    assert result.figures["weight_bytes"] == (1000.0, 600.0)


def test_compare_refuses_what_is_not_comparable(tmp_path: Path) -> None:
    found = pair(tmp_path, 0.0, fingerprint={"dtype": "float16"})
    with pytest.raises(RecordError, match="dtype: baseline 'bfloat16', candidate 'float16'"):
        compare(found.first, found.first_folder, found.second, found.second_folder)
