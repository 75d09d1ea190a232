"""Fidelity from stored top-k log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalq.errors import RecordError
from evalq.judge.fidelity import fidelity, mean_estimate, partition_kld, quantile_estimate, token_pairs
from evalq.records import token_schema

VOCABULARY = 50


def distributions(tokens: int, shift: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of two models over a whole small vocabulary; (tokens, vocabulary) each."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (tokens, VOCABULARY))
    both = [logits, logits + rng.normal(0, shift, logits.shape)]
    first, second = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in both)
    return first, second


def table(logs: np.ndarray, k: int, targets: np.ndarray, exact: np.ndarray | None = None) -> pa.Table:
    """tokens.parquet rows of one model; k=0 keeps no list."""
    n = len(logs)
    order = np.argsort(-logs, axis=1)
    lists = [order[i, :k].tolist() for i in range(n)]
    return pa.table(
        {
            "task": ["wikitext"] * n,
            "doc_id": [8 * i // n for i in range(n)],
            "position": list(range(n)),
            "window_position": [i + 1 for i in range(n)],
            "token_id": targets.tolist(),
            "logprob": logs[np.arange(n), targets].tolist(),
            "top1_id": order[:, 0].tolist(),
            "top1_logprob": logs[np.arange(n), order[:, 0]].tolist(),
            "entropy_nats": [None] * n,
            "topk_ids": lists if k else [None] * n,
            "topk_logprobs": [logs[i, lists[i]].tolist() for i in range(n)] if k else [None] * n,
            "exact_kld_nats": [None] * n if exact is None else exact.tolist(),
            "exact_reverse_kld_nats": [None] * n,
            "base_entropy_nats": [None] * n,
        },
        schema=token_schema(),
    )


def both(tokens: int = 400, shift: float = 0.3, k: int = 10) -> tuple[pa.Table, pa.Table, np.ndarray]:
    first, second = distributions(tokens, shift)
    targets = np.random.default_rng(1).integers(0, VOCABULARY, tokens)
    exact = (np.exp(first) * (first - second)).sum(axis=1)
    return table(first, k, targets), table(second, k, targets), exact


def test_divergence_by_hand() -> None:
    # p = 0.5, 0.3 and a tail of 0.2; q = 0.4, 0.4 and a tail of 0.2.
    p, q = np.log([[0.5, 0.3]]), np.log([[0.4, 0.4]])
    ids = np.array([[7, 9]])
    kld, mass = partition_kld(ids, p, ids, q)
    assert kld[0] == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4))
    assert mass[0] == pytest.approx(0.8)


def test_tokens_known_on_one_side_go_to_the_tail() -> None:
    # Only id 7 is shared: tails 0.5 and 0.6.
    kld, mass = partition_kld(np.array([[7, 9]]), np.log([[0.5, 0.3]]), np.array([[7, 4]]), np.log([[0.4, 0.4]]))
    assert kld[0] == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6))
    assert mass[0] == pytest.approx(0.5)


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_it_is_a_lower_bound_that_rises_with_k(k: int) -> None:
    first, second, exact = both(k=k)
    found = token_pairs(first, second)
    assert (found.kld <= exact + 1e-5).all()
    assert not found.exact
    less = token_pairs(*both(k=max(k - 1, 0))[:2])
    assert found.kld.mean() >= less.kld.mean() - 1e-9


def test_all_of_the_vocabulary_is_exact() -> None:
    first, second, exact = both(k=VOCABULARY)
    assert token_pairs(first, second).kld == pytest.approx(exact, abs=2e-5)


@settings(deadline=None, max_examples=25)
@given(st.floats(0.0, 3.0), st.integers(0, 15), st.integers(0, 100))
def test_never_negative_and_never_above_the_truth(shift: float, k: int, seed: int) -> None:
    first, second = distributions(40, shift, seed)
    targets = np.argmax(first, axis=1)
    found = token_pairs(table(first, k, targets), table(second, k, targets))
    exact = (np.exp(first) * (first - second)).sum(axis=1)
    assert (found.kld >= 0).all()
    assert (found.kld <= exact + 1e-4).all()


def test_stored_exact_values_are_used() -> None:
    logs, _ = distributions(80, 0.0)
    targets = np.zeros(80, int)
    exact = np.linspace(0, 1, 80)
    found = token_pairs(table(logs, 5, targets), table(logs, 5, targets, exact))
    assert found.exact
    result = fidelity(found)
    assert result.mass_covered == 1.0
    assert result.estimates[0].note == "exact"


def test_other_tokens_are_refused() -> None:
    first, second, _ = both()
    moved = second.set_column(4, "token_id", pa.array([1] * len(second), pa.int32()))
    with pytest.raises(RecordError, match="token_id"):
        token_pairs(first, moved)


def test_every_figure_has_an_interval_or_says_why_not() -> None:
    result = fidelity(token_pairs(*both()[:2]))
    names = {estimate.name for estimate in result.estimates}
    wanted = {"mean_kld_nats", "same_top1", "mean_correct_probability_change", "rms_correct_probability_change"}
    wanted |= {f"kld_nats_p{q}" for q in ("50", "90", "95", "99", "99.9")} | {"kld_nats_max"}
    assert wanted <= names
    for estimate in result.estimates:
        if estimate.low is None:
            assert "no interval" in estimate.note
        else:
            assert estimate.low <= (estimate.value or 0.0) <= (estimate.high or 0.0)
    assert any(name.startswith("context") for name in result.buckets)
    assert any(name.startswith("baseline confidence") for name in result.buckets)


def test_one_document_has_no_interval() -> None:
    first, second, _ = both(8)
    one = [side.slice(0, 8).set_column(1, "doc_id", pa.array([0] * 8, pa.int32())) for side in (first, second)]
    with pytest.raises(RecordError, match="2 or more"):
        fidelity(token_pairs(*one))


def test_intervals_cover_the_truth() -> None:
    """Clustered values: a document effect plus token noise; 95 % intervals of the mean and of the median."""
    rng = np.random.default_rng(5)
    documents = np.repeat(np.arange(40), 30)
    inside = np.zeros(2)
    for _ in range(400):
        values = np.repeat(rng.normal(0, 1, 40), 30) + rng.normal(0, 1, 1200)
        for place, found in enumerate(
            (mean_estimate("m", values, documents, 0.95), quantile_estimate("q", values, documents, 0.5, 0.95))
        ):
            inside[place] += (found.low or 0.0) <= 0.0 <= (found.high or 0.0)
    assert (abs(inside / 400 - 0.95) <= 3 * (0.95 * 0.05 / 400) ** 0.5).all()


def test_even_sample_of_exact_values_is_named_and_used_alone() -> None:
    """Every other token measured: the mean is over those, the rest of the figures over all."""
    logs, _ = distributions(80, 0.0)
    targets = np.zeros(80, dtype=np.int64)
    exact = [float(i) if i % 2 else None for i in range(80)]
    second = table(logs, 0, targets)
    at = second.schema.get_field_index("exact_kld_nats")
    second = second.set_column(at, second.schema.field(at), pa.array(exact, pa.float32()))
    result = fidelity(token_pairs(table(logs, 0, targets), second))
    first = result.estimates[0]
    assert (first.name, first.value, first.n) == ("mean_kld_nats", 40.0, 40)
    assert first.note == "exact, an even sample of 40 of 80 tokens"
    assert next(e for e in result.estimates if e.name == "same_top1").n == 80
    assert next(e for e in result.estimates if e.name == "kld_nats_max").value == 79.0


def test_exact_values_against_another_baseline_are_not_read() -> None:
    logs, _ = distributions(80, 0.0)
    targets = np.zeros(80, dtype=np.int64)
    second = table(logs, 5, targets, np.full(80, 7.0))
    found = token_pairs(table(logs, 5, targets), second, exact=False)
    assert not found.exact
    assert found.kld.max() < 1e-4


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("doc_id", None, "empty values in doc_id"),
        ("window_position", None, "empty values in window_position"),
        ("logprob", 5.0, "logprob above 0"),
        ("exact_kld_nats", -5.0, "below 0, which no divergence is"),
        ("exact_reverse_kld_nats", None, "mean_reverse_kld_nats is not known for every token"),
        ("entropy_nats", None, "mean_entropy_change_nats is not known for every token"),
    ],
)
def test_damaged_token_rows_are_refused(name: str, value: float | None, words: str) -> None:
    def change(whole: pa.Table, column: str, values: list[float | None]) -> pa.Table:
        place = whole.schema.names.index(column)
        return whole.set_column(place, column, pa.array(values, whole.schema.field(column).type))

    first, second, exact = both()
    for column in ("exact_kld_nats", "exact_reverse_kld_nats", "entropy_nats", "base_entropy_nats"):
        second = change(second, column, exact.tolist())
    assert fidelity(token_pairs(first, second)).exact
    sides = [change(side, name, [value, *side.column(name).to_pylist()[1:]]) for side in (first, second)]
    with pytest.raises(RecordError, match=words):
        fidelity(token_pairs(*sides))


def test_tokens_that_are_there_twice_are_refused() -> None:
    first, second, _ = both()
    with pytest.raises(RecordError, match="some tokens twice"):
        token_pairs(*(pa.concat_tables([side, side]) for side in (first, second)))
