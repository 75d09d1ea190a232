"""No input whatever makes a PASS when a required metric is missing, not finite or worse than the limit."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path

import numpy as np
import record_builder as rb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evalq.config import GateConfig
from evalq.judge.gate import judge
from evalq.records import Record, Verdict

ANY = st.floats(allow_nan=True, allow_infinity=True)
SLOW = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
BASE = rb.baseline_rows(12, 10)


def judged(rows: rb.Rows, candidate: Record | None = None) -> Verdict:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = rb.write(folder / "b", rb.record("baseline", BASE), BASE)
        second = rb.write(folder / "c", candidate or rb.record("cand", rows), rows)
        return judge(first, folder / "b", second, folder / "c", GateConfig())


def scored(rows: rb.Rows) -> Record:
    """A record of the rows whose aggregates are finite whatever the rows are."""
    made = rb.record("cand", BASE)
    tasks = dict(made.tasks)
    with np.errstate(all="ignore"):
        values = {
            "word_perplexity": float(np.exp(rows.nll.sum() / rows.words.sum())),
            "byte_perplexity": float(np.exp(rows.nll.sum() / rows.bytes.sum())),
            "token_perplexity": float(np.exp(rows.nll.sum() / rows.tokens.sum())),
        }
    finite = {name: value if math.isfinite(value) else 1.0 for name, value in values.items()}
    tasks["wikitext"] = dataclasses.replace(tasks["wikitext"], metrics=finite)
    return dataclasses.replace(made, tasks=tasks)


@SLOW
@given(st.lists(ANY, min_size=12, max_size=12))
def test_any_losses(values: list[float]) -> None:
    rows = rb.Rows(np.array(values), BASE.words, BASE.items)
    verdict = judged(rows, scored(rows))
    if verdict.status == "PASS":
        assert np.isfinite(values).all()
        assert math.log1p(0.015) >= (rows.nll.sum() - BASE.nll.sum()) / BASE.words.sum()


@SLOW
@given(st.lists(st.floats(-0.1, 0.1), min_size=12, max_size=12))
def test_losses_near_the_baseline(shifts: list[float]) -> None:
    rows = rb.Rows(BASE.nll + np.array(shifts) * BASE.words, BASE.words, BASE.items)
    verdict = judged(rows)
    increase = (rows.nll.sum() - BASE.nll.sum()) / BASE.words.sum()
    if increase > math.log1p(0.015):
        assert verdict.status != "PASS"
        assert verdict.exit_code != 0
    assert (verdict.exit_code == 0) == (verdict.status == "PASS")


@SLOW
@given(st.sampled_from(["wikitext", "hellaswag", "truthfulqa_mc1", "truthfulqa_mc2"]), st.booleans())
def test_a_missing_or_empty_metric(task: str, keep_task: bool) -> None:
    rows = rb.damaged(BASE, 0.001)
    made = rb.record("cand", rows)
    tasks = dict(made.tasks)
    if keep_task:
        tasks[task] = dataclasses.replace(tasks[task], metrics=dict.fromkeys(tasks[task].metrics))
    else:
        del tasks[task]
    verdict = judged(rows, dataclasses.replace(made, tasks=tasks))
    assert verdict.status == "INVALID"
    assert task in " ".join(verdict.reasons)


@SLOW
@given(st.sampled_from(list(BASE.items)), st.integers(0, 9), ANY)
def test_any_item_value(key: tuple[str, str], place: int, value: float) -> None:
    rows = rb.damaged(BASE, 0.001)
    rows.items[key][place] = value
    made = rb.record("cand", rb.damaged(BASE, 0.001))
    verdict = judged(rows, made if not math.isfinite(value) else rb.record("cand", rows))
    if not math.isfinite(value):
        assert verdict.status == "INVALID"
