"""The truth table: failures that people judging quantised models really hit, each with the right answer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import record_builder as rb

from evalq.cli import gate as gate_verb
from evalq.config import GateConfig
from evalq.errors import ConfigError
from evalq.judge.gate import judge
from evalq.records import RECORD_FILE, Record, TaskScores, Verdict, read_record, read_verdict

Change = Callable[[Record], Record]


def verdict_of(
    tmp_path: Path,
    increase: float = 0.003,
    baseline: Change = lambda r: r,
    candidate: Change = lambda r: r,
    policy: GateConfig | None = None,
    **how: Any,
) -> Verdict:
    """Judge a good candidate, after `baseline` and `candidate` have changed their records."""
    rows = rb.baseline_rows()
    worse = rb.damaged(rows, increase, **how)
    first = rb.write(tmp_path / "b", baseline(rb.record("baseline", rows)), rows)
    second = rb.write(tmp_path / "c", candidate(rb.record("cand", worse)), worse)
    return judge(first, tmp_path / "b", second, tmp_path / "c", policy or GateConfig())


def fingerprint(**fields: Any) -> Change:
    named = {name.replace("__", "."): value for name, value in fields.items()}
    return lambda record: dataclasses.replace(record, fingerprint={**record.fingerprint, **named})


def metrics(
    task: str, change: Callable[[dict[str, float | None]], dict[str, float | None]], reason: str = ""
) -> Change:
    def apply(record: Record) -> Record:
        scores: TaskScores = record.tasks[task]
        reasons = dict.fromkeys(scores.metrics, reason) if reason else {}
        new = dataclasses.replace(scores, metrics=change(dict(scores.metrics)), metric_reasons=reasons)
        return dataclasses.replace(record, tasks={**record.tasks, task: new})

    return apply


def only(name: str) -> Change:
    return metrics("wikitext", lambda found: {name: found[name]})


def without(task: str) -> Change:
    return lambda record: dataclasses.replace(
        record, tasks={name: scores for name, scores in record.tasks.items() if name != task}
    )


def broken(kind: str) -> Change:
    return lambda record: rb.failed("cand", rb.baseline_rows(), kind)


NAN = metrics("wikitext", lambda found: {**found, "word_perplexity": None}, "the sum was NaN")
ZERO = metrics("wikitext", lambda found: {**found, "word_perplexity": 0.0})

CASES = {
    "good candidate": ({}, "PASS", 0, ["within the target"]),
    "a6 harness version": (
        {"candidate": fingerprint(harness_version="0.4.9")},
        "INVALID",
        5,
        ["harness_version", "0.4.13", "0.4.9"],
    ),
    "a7 BOS twice": ({"candidate": fingerprint(bos="never")}, "INVALID", 5, ["bos", "always", "never"]),
    "a7 other first ids": (
        {"candidate": fingerprint(first_ids_hash__wikitext="0" * 64)},
        "INVALID",
        5,
        ["first_ids_hash.wikitext"],
    ),
    "a8 window": (
        {"candidate": fingerprint(window_tokens__wikitext=4096)},
        "INVALID",
        5,
        ["window_tokens.wikitext", "2048", "4096"],
    ),
    "a9 no common metric": (
        {"baseline": only("byte_perplexity"), "candidate": only("word_perplexity")},
        "INVALID",
        5,
        ["metric missing", "baseline has no word_perplexity"],
    ),
    "a9 the other way": (
        {"baseline": only("word_perplexity"), "candidate": only("byte_perplexity")},
        "INVALID",
        5,
        ["metric missing", "candidate has no word_perplexity"],
    ),
    "a10 truncation": (
        {"candidate": fingerprint(truncated__wikitext=3)},
        "INVALID",
        5,
        ["truncated.wikitext", "0", "3"],
    ),
    "a16 engine version": (
        {"candidate": fingerprint(engine_version="0.33.0")},
        "INVALID",
        5,
        ["engine_version", "0.32.0", "0.33.0"],
    ),
    "e7 PCIe against NVL": (
        {"baseline": fingerprint(gpu="NVIDIA H100 PCIe"), "candidate": fingerprint(gpu="NVIDIA H100 NVL")},
        "INVALID",
        5,
        ["gpu", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"],
    ),
    "d1 metric not a number": ({"candidate": NAN}, "INVALID", 5, ["not a finite number", "the sum was NaN"]),
    "f1 other model": ({"baseline": fingerprint(model_id="other/model")}, "INVALID", 5, ["model_id", "other/model"]),
    "f1 metric 0.0": ({"baseline": ZERO}, "INVALID", 5, ["0.0", "at least 1"]),
    "f1 empty baseline": (
        {"baseline": lambda r: dataclasses.replace(r, tasks={})},
        "INVALID",
        5,
        ["baseline has no task wikitext"],
    ),
    "f4 baseline not a number": ({"baseline": NAN}, "INVALID", 5, ["baseline is not a finite number"]),
    "f5 40 % better": ({"increase": -0.4}, "SUSPECT", 3, ["better than the baseline"]),
    "f6 task missing": (
        {"candidate": without("truthfulqa_mc2")},
        "INVALID",
        5,
        ["candidate has no task truthfulqa_mc2"],
    ),
    "f7 out of memory": ({"candidate": broken("oom")}, "INVALID", 5, ["oom", "candidate failed while measuring"]),
    "f7 engine died": ({"candidate": broken("engine")}, "INVALID", 5, ["engine died"]),
    "a2 scheme not applied": (
        {
            "candidate": lambda r: dataclasses.replace(
                r, applied=dataclasses.replace(rb.APPLIED, ok=False, problems=["KV pool holds bfloat16"])
            )
        },
        "INVALID",
        5,
        ["was not applied", "KV pool holds bfloat16"],
    ),
    "random weights": (
        {"baseline": fingerprint(load_format="dummy"), "candidate": fingerprint(load_format="dummy")},
        "INVALID",
        5,
        ["random weights"],
    ),
    "plainly worse": ({"increase": 0.03}, "FAIL", 1, ["above the limit"]),
    "at the limit": ({"increase": 0.0149}, "INCONCLUSIVE", 3, ["more documents"]),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, tmp_path: Path) -> None:
    how, status, code, words = CASES[name]
    verdict = verdict_of(tmp_path, **how)
    assert (verdict.status, verdict.exit_code) == (status, code), verdict.summary
    text = " ".join([verdict.summary, *verdict.reasons])
    for word in words:
        assert word in text


def run(tmp_path: Path, *arguments: str) -> tuple[int, Verdict]:
    code = gate_verb.main([*arguments, "--out", str(tmp_path / "out"), "--records", str(tmp_path / "records")])
    return code, read_verdict(tmp_path / "out")


def good_pair(tmp_path: Path) -> tuple[str, str]:
    verdict_of(tmp_path)
    return str(tmp_path / "b"), str(tmp_path / "c")


def test_f1_missing_baseline(tmp_path: Path) -> None:
    _, candidate = good_pair(tmp_path)
    code, verdict = run(tmp_path, "--baseline", str(tmp_path / "nothing"), "--candidate", candidate)
    assert (code, verdict.status) == (5, "INVALID")
    assert "no baseline" in verdict.summary


def test_f1_empty_baseline_file(tmp_path: Path) -> None:
    baseline, candidate = good_pair(tmp_path)
    (Path(baseline) / RECORD_FILE).write_text("")
    code, verdict = run(tmp_path, "--baseline", baseline, "--candidate", candidate)
    assert (code, verdict.status) == (5, "INVALID")


def test_f2_the_next_step_reads_the_verdict_file(tmp_path: Path) -> None:
    """Behind `| tee` the exit code is lost; the file says it again, and an old PASS never survives a new failure."""
    baseline, candidate = good_pair(tmp_path)
    assert run(tmp_path, "--baseline", baseline, "--candidate", candidate)[0] == 0
    assert gate_verb.main(["--verdict", str(tmp_path / "out")]) == 0
    assert run(tmp_path, "--baseline", str(tmp_path / "nothing"), "--candidate", candidate)[0] == 5
    assert gate_verb.main(["--verdict", str(tmp_path / "out")]) == 5
    assert gate_verb.main(["--verdict", str(tmp_path / "empty")]) == 5


def test_f2_a_doctored_verdict_file_does_not_release(tmp_path: Path) -> None:
    _, candidate = good_pair(tmp_path)
    run(tmp_path, "--baseline", str(tmp_path / "nothing"), "--candidate", candidate)
    file = tmp_path / "out" / "verdict.json"
    file.write_text(file.read_text().replace('"exit_code": 5', '"exit_code": 0'))
    assert gate_verb.main(["--verdict", str(tmp_path / "out")]) != 0


def test_f3_noise_around_the_limit_is_inconclusive(tmp_path: Path) -> None:
    """A difference whose spread is as large as the room to the limit is neither passed nor failed."""
    verdict = verdict_of(tmp_path, increase=0.013, noise=0.02)
    assert verdict.status == "INCONCLUSIVE"


@pytest.mark.parametrize("threshold", ["nan", "-0.01", "inf", "", "1.5", "1,5%", "abc", "-1%", "1e999%"])
@pytest.mark.parametrize("key", ["target", "limit", "suspect_improvement"])
def test_f4_bad_threshold_is_a_config_error(tmp_path: Path, key: str, threshold: str) -> None:
    with pytest.raises(ConfigError):
        verdict_of(tmp_path, policy=dataclasses.replace(GateConfig(), **{key: threshold}))


def test_f4_bad_threshold_on_the_command_line(tmp_path: Path) -> None:
    baseline, candidate = good_pair(tmp_path)
    policy = tmp_path / "policy.yaml"
    policy.write_text("limit: 1.5\n")
    code, verdict = run(tmp_path, "--baseline", baseline, "--candidate", candidate, "--policy", str(policy))
    assert (code, verdict.status, verdict.exit_code) == (2, "INVALID", 2)
    assert '"1.5%"' in verdict.summary


def test_d1_not_a_number_in_a_table(tmp_path: Path) -> None:
    rows = rb.baseline_rows()
    worse = rb.damaged(rows, 0.003)
    made = rb.record("cand", worse)
    worse.nll[3] = math.nan
    first = rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    second = rb.write(tmp_path / "c", made, worse)
    verdict = judge(first, tmp_path / "b", second, tmp_path / "c", GateConfig())
    assert (verdict.status, verdict.exit_code) == ("INVALID", 5)
    assert "not finite" in verdict.summary or "nan" in verdict.summary


def test_d1_not_a_number_in_record_json(tmp_path: Path) -> None:
    baseline, candidate = good_pair(tmp_path)
    file = Path(candidate) / RECORD_FILE
    value = read_record(candidate).tasks["wikitext"].metrics["word_perplexity"]
    file.write_text(file.read_text().replace(repr(value), "NaN"))
    assert run(tmp_path, "--baseline", baseline, "--candidate", candidate)[0] == 5


def test_a_tampered_aggregate_is_found(tmp_path: Path) -> None:
    better = metrics("wikitext", lambda found: {**found, "word_perplexity": 20.0})
    verdict = verdict_of(tmp_path, candidate=better)
    assert verdict.status == "INVALID"
    assert "20.0 in record.json" in verdict.summary


def test_a_tampered_table_is_found(tmp_path: Path) -> None:
    baseline, candidate = good_pair(tmp_path)
    other = rb.damaged(rb.baseline_rows(), 0.0)
    rb.write(tmp_path / "x", rb.record("x", other), other)
    (Path(candidate) / "documents.parquet").write_bytes((tmp_path / "x" / "documents.parquet").read_bytes())
    code, verdict = run(tmp_path, "--baseline", baseline, "--candidate", candidate)
    assert (code, verdict.status) == (5, "INVALID")


def test_a1_a_candidate_that_was_never_loaded(tmp_path: Path) -> None:
    rows = rb.baseline_rows()
    first = rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    never = dataclasses.replace(rb.record("cand", rows), applied=rb.APPLIED)
    second = rb.write(tmp_path / "c", never, rows)
    verdict = judge(first, tmp_path / "b", second, tmp_path / "c", GateConfig())
    assert (verdict.status, verdict.exit_code) == ("INVALID", 5)
    assert "probably never loaded" in verdict.summary


def test_a1_identical_values_of_another_scheme_are_suspect(tmp_path: Path) -> None:
    rows = rb.baseline_rows()
    first = rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    second = rb.write(tmp_path / "c", rb.record("cand", rows), rows)
    verdict = judge(first, tmp_path / "b", second, tmp_path / "c", GateConfig())
    assert (verdict.status, verdict.exit_code) == ("SUSPECT", 3)
    assert "exactly the value" in verdict.summary


def test_a3_one_config_under_two_names(tmp_path: Path) -> None:
    same = "c" * 64
    verdict = verdict_of(
        tmp_path,
        baseline=lambda r: dataclasses.replace(r, config_hash=same),
        candidate=lambda r: dataclasses.replace(r, config_hash=same),
    )
    assert verdict.status == "INVALID"
    assert "duplicate" in verdict.summary


def test_other_documents_on_one_side(tmp_path: Path) -> None:
    rows = rb.baseline_rows()
    fewer = rb.Rows(rows.nll[:-1], rows.words[:-1], rows.items)
    first = rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    second = rb.write(tmp_path / "c", rb.record("cand", fewer), fewer)
    verdict = judge(first, tmp_path / "b", second, tmp_path / "c", GateConfig())
    assert verdict.status == "INVALID"
    assert "baseline 62, candidate 61" in verdict.summary


def test_other_words_in_one_document(tmp_path: Path) -> None:
    rows = rb.baseline_rows()
    words = rows.words.copy()
    words[5] += 1
    other = rb.Rows(rows.nll * 1.001, words, rows.items)
    first = rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    second = rb.write(tmp_path / "c", rb.record("cand", other), other)
    verdict = judge(first, tmp_path / "b", second, tmp_path / "c", GateConfig())
    assert verdict.status == "INVALID"
    assert "document 5 of wikitext" in verdict.summary
    assert np.all(rows.words != 0)
