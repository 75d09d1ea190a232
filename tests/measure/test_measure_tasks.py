"""lm-eval on an engine that can be computed by hand: windows, BOS, truncation, repeated pairs, sums and answers."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lm_eval")
from fake_engine import FakeEngine, logprob

from evalq.errors import ConfigError, MeasurementError
from evalq.measure import data, tasks
from evalq.measure.data import find_sources, task_overrides
from evalq.measure.tables import document_rows, item_tables, merge_metrics, token_table
from evalq.measure.tasks import EngineLM, _cut_to_window, load_tasks, metric_values, run_tasks, sample_rows
from evalq.measure.texts import kept_texts

BOS, EOS = 0, 1


def request(*arguments: Any, task: str = "task", doc_id: int = 0) -> Any:
    return SimpleNamespace(args=arguments, task_name=task, doc_id=doc_id)


def lm(engine: FakeEngine | None = None, bos: str = "always", window: int = 32, **settings: Any) -> EngineLM:
    return EngineLM(engine or FakeEngine(), bos, window, settings.pop("choice_window", window), **settings)


def words(count: int, start: int = 0) -> str:
    return " ".join(f"w{(start + i) % 500}" for i in range(count))


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 400), window=st.integers(3, 70), bos=st.sampled_from(["always", "never"]))
def test_windows_cover_every_token_once(length: int, window: int, bos: str) -> None:
    """1 token of context and window - 1 scored ones; only the last window has more context; the first starts with BOS."""
    engine = FakeEngine()
    model = lm(engine, bos, window)
    ids = model.tok_encode(words(length))
    (total,) = model.loglikelihood_rolling([request(words(length))])
    windows = engine.sequences
    assert [i for w in windows for i in w.ids[w.first :]] == ids
    assert all(len(w.ids) <= window for w in windows)
    assert all(w.first == 1 and len(w.ids) == window for w in windows[:-1])
    assert len(windows) == math.ceil(length / (window - 1))
    assert windows[0].ids[0] == BOS
    assert all(BOS not in w.ids[1:] for w in windows)
    parts = model.documents["task", 0]
    assert [w.start for w in parts] == [i * (window - 1) for i in range(len(parts))]
    expected = math.fsum(logprob(w.ids, p) for w in windows for p in range(w.first, len(w.ids)))
    assert total == pytest.approx(expected, rel=1e-6)


def test_windows_of_several_documents_go_in_one_batch() -> None:
    engine = FakeEngine()
    model = lm(engine)
    requests = [request(words(n), doc_id=i) for i, n in enumerate((70, 5, 31))]
    sums = model.loglikelihood_rolling(requests)
    assert len(engine.batches) == 1
    alone = [lm(FakeEngine()).loglikelihood_rolling([request(words(n))])[0] for n in (70, 5, 31)]
    assert sums == alone
    assert model.tallies["task"].scored_tokens == 106


def test_empty_document_scores_nothing() -> None:
    assert lm().loglikelihood_rolling([request("")]) == [0.0]


@pytest.mark.parametrize("bos", ["always", "never"])
@pytest.mark.parametrize("context", ["w1 w2", "<s> w1 w2", "", "<s>"])
def test_bos_exactly_once_where_the_model_wants_it(bos: str, context: str) -> None:
    """a7: never missing and never twice, whatever the prompt starts with."""
    engine = FakeEngine()
    lm(engine, bos).loglikelihood([request(context, " w9")])
    (scored,) = engine.sequences
    count = sum(i == BOS for i in scored.ids)
    wanted = 1 if bos == "always" or context in ("", "<s>") or context.startswith("<s>") else 0
    assert count == wanted
    assert (scored.ids[0] == BOS) == bool(wanted)
    assert scored.ids[scored.first :] == engine.tokenizer.encode("w9", add_special_tokens=False)


def test_tokenizer_that_adds_bos_by_itself_does_not_add_a_second() -> None:
    from tokenizers.processors import TemplateProcessing

    engine = FakeEngine()
    before = engine.tokenizer.backend_tokenizer.post_processor
    engine.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    try:
        assert engine.tokenizer.encode("w1")[0] == BOS
        model = lm(engine)
        model.loglikelihood([request("w1", " w2")])
        model.loglikelihood_rolling([request("w1 w2")])
    finally:
        engine.tokenizer.backend_tokenizer.post_processor = before
    assert all(sum(i == BOS for i in r.ids) == 1 for r in engine.sequences)


def test_tokenizer_without_bos_starts_windows_with_eos() -> None:
    engine = FakeEngine(with_bos=False)
    model = lm(engine, "never")
    model.loglikelihood_rolling([request("w1 w2")])
    assert engine.sequences[0].ids[0] == EOS == model.prefix_token_id


@settings(max_examples=200, deadline=None)
@given(context=st.integers(1, 60), continuation=st.integers(1, 60), window=st.integers(3, 40), keep_bos=st.booleans())
def test_cut_to_window(context: int, continuation: int, window: int, keep_bos: bool) -> None:
    """The oldest context goes first, BOS and one context token stay, of a long continuation its end is scored."""
    before = [BOS, *range(100, 99 + context)]
    after = list(range(1000, 1000 + continuation))
    kept, scored = _cut_to_window(before, after, window, keep_bos)
    assert len(kept) + len(scored) == min(window, len(before) + len(after))
    assert len(kept) >= 1
    assert scored == after[-len(scored) :]
    assert len(scored) == min(continuation, window - 1)
    if keep_bos:
        assert kept[0] == BOS
        assert kept[1:] == before[1:][len(before[1:]) - len(kept[1:]) :]
    else:
        assert kept == before[-len(kept) :]


def test_truncations_are_counted() -> None:
    """a10."""
    engine = FakeEngine()
    model = lm(engine, window=10)
    model.loglikelihood(
        [request(words(5), " w7"), request(words(30), " w8"), request(words(8), " w9 w10", task="other")]
    )
    assert model.tallies["task"].truncated == 1
    assert model.tallies["other"].truncated == 1
    assert all(len(r.ids) <= 10 and r.ids[0] == BOS for r in engine.sequences)


def test_prompt_that_just_fits_is_not_truncated() -> None:
    model = lm(window=10)
    model.loglikelihood([request(words(8), " w7")])
    assert model.tallies["task"].truncated == 0


def test_equal_pairs_are_scored_once_and_counted_every_time() -> None:
    engine = FakeEngine()
    model = lm(engine)
    first = model.loglikelihood([request("w1 w2", " w3"), request("w1 w2", " w4"), request("w1 w2", " w3", task="mc2")])
    assert len(engine.sequences) == 2
    again = model.loglikelihood([request("w1 w2", " w4", task="mc2")])
    assert len(engine.sequences) == 2
    assert first[0] == first[2] != first[1] == again[0]
    assert model.tallies["mc2"].requests == 2
    assert model.tallies["task"].scored_tokens == 2


def test_same_ids_with_another_boundary_are_another_pair() -> None:
    engine = FakeEngine()
    lm(engine).loglikelihood([request("w1", " w2 w3"), request("w1 w2", " w3")])
    assert sorted(r.first for r in engine.sequences) == [2, 3]


def test_loglikelihood_is_the_sum_over_the_continuation_and_greedy_says_so() -> None:
    model = lm()
    ((value, greedy),) = model.loglikelihood([request("w1", " w2 w3")])
    ids = [BOS, *model.tok_encode("w1 w2 w3")]
    parts = [logprob(ids, 2), logprob(ids, 3)]
    assert value == pytest.approx(math.fsum(parts), rel=1e-6)
    assert greedy is all(part > -5 for part in parts)


def test_ids_hash_follows_every_request_and_the_boundary() -> None:
    def digest(*pairs: tuple[str, str], window: int = 32) -> str:
        model = lm(window=window)
        model.loglikelihood([request(*pair) for pair in pairs])
        return str(model.tallies["task"].ids_hash.hexdigest())

    a, b = ("w1 w2", " w3"), ("w1", " w2 w3")
    assert digest(a) == digest(a)
    assert len({digest(a), digest(b), digest(a, a), digest(a, b), digest(b, a)}) == 5
    long = (words(40), " w3")
    assert digest(long, window=16) != digest(long, window=32)


def test_neighbours_in_the_batch_share_their_beginnings() -> None:
    engine = FakeEngine()
    pairs = [("w1 w2", " w3"), ("w7 w8", " w3"), ("w1 w2", " w4"), ("w7 w8", " w4")]
    lm(engine, share_prefixes=True).loglikelihood([request(*pair) for pair in pairs])
    assert [r.ids[1] for r in engine.sequences] == sorted(r.ids[1] for r in engine.sequences)
    assert engine.shared == [True]


def test_perplexity_never_shares_prefixes() -> None:
    engine = FakeEngine()
    lm(engine, share_prefixes=True).loglikelihood_rolling([request("w1 w2")])
    assert engine.shared == [False]


def test_generation_is_cut_at_the_stop_and_its_prompt_to_the_window() -> None:
    engine = FakeEngine()
    engine.text = "w5 Q: more"
    model = lm(engine, window=40)
    answers = model.generate_until(
        [
            request(words(60), {"until": ["Q:", "\n"], "max_gen_toks": 10}),
            request("<s> w1", {"until": "w5", "max_gen_toks": 10}),
        ]
    )
    assert answers == ["w5 ", ""]
    assert len(engine.prompts[0]) <= 30
    assert model.tallies["task"].truncated == 1
    assert engine.prompts[1] == [BOS, *model.tok_encode("w1")]


def test_generation_prompt_that_is_cut_keeps_its_bos() -> None:
    engine = FakeEngine()
    lm(engine, window=40).generate_until([request(words(60), {"max_gen_toks": 10})])
    assert engine.prompts[0][0] == BOS
    assert len(engine.prompts[0]) == 30


# --- with lm-eval's own tasks and the embedded data


@pytest.fixture(scope="module")
def embedded() -> dict[str, Any]:
    """The stock tasks on the embedded data."""
    from evalq.config import RunConfig

    sources = find_sources(RunConfig())
    return load_tasks({name: task_overrides(source, RunConfig().data) for name, source in sources.items()})


def evaluate(
    embedded: dict[str, Any], names: list[str], limit: int, **settings: Any
) -> tuple[EngineLM, dict[str, Any]]:
    model = lm(window=64, choice_window=512, **settings)
    results, seconds = run_tasks(model, {name: embedded[name] for name in names}, limit)
    assert seconds > 0
    return model, results


def test_document_rows_give_lm_evals_own_perplexities(embedded: dict[str, Any]) -> None:
    model, results = evaluate(embedded, ["wikitext"], 5)
    rows = document_rows("wikitext", results["samples"]["wikitext"], model.documents)
    metrics, reasons = merge_metrics(metric_values(results["results"]["wikitext"]), rows)
    assert len(rows) == 5
    assert reasons == {}
    nll = math.fsum(row["nll_nats"] for row in rows)
    for metric, unit in (("word_perplexity", "words"), ("byte_perplexity", "bytes"), ("token_perplexity", "tokens")):
        assert metrics[metric] == pytest.approx(math.exp(nll / sum(row[unit] for row in rows)), rel=1e-9)
    pages = [row["page"] for row in data.read_rows(find_sources_of("wikitext"))[:5]]
    assert [row["bytes"] for row in rows] == [len(page.encode()) for page in pages]
    assert [row["tokens"] for row in rows] == [len(model.tok_encode(text)) for text in lm_texts(embedded, 5)]


def find_sources_of(task: str) -> Any:
    from evalq.config import RunConfig

    return find_sources(RunConfig())[task]


def lm_texts(embedded: dict[str, Any], count: int) -> list[str]:
    """What lm-eval itself asks to be scored."""
    task = embedded["wikitext"]
    return [task.doc_to_target(doc) for doc in list(task.eval_docs)[:count]]


def test_document_sums_are_those_of_lm_evals_loop_token_by_token(embedded: dict[str, Any]) -> None:
    """An independent loop: BOS, then blocks of window - 1 tokens, each after the token before it."""
    model, results = evaluate(embedded, ["wikitext"], 4)
    for sample, text in zip(results["samples"]["wikitext"], lm_texts(embedded, 4), strict=True):
        ids = model.tok_encode(text)
        total = 0.0
        for start in range(0, len(ids), 63):
            stop = min(start + 63, len(ids))
            before = [BOS] if start == 0 else ids[max(0, stop - 64) : start]
            window = [*before, *ids[start:stop]]
            total += math.fsum(logprob(window, p) for p in range(len(before), len(window)))
        assert sample["word_perplexity"][0] == pytest.approx(total, rel=1e-6)


def test_token_table_adds_up_to_the_documents(embedded: dict[str, Any]) -> None:
    model, results = evaluate(embedded, ["wikitext"], 3, topk=2)
    rows = document_rows("wikitext", results["samples"]["wikitext"], model.documents)
    table = token_table(model.documents)
    sums: dict[int, list[float]] = defaultdict(list)
    for doc_id, value in zip(table["doc_id"].to_pylist(), table["logprob"].to_pylist(), strict=True):
        sums[doc_id].append(value)
    for row in rows:
        assert len(sums[row["doc_id"]]) == row["tokens"]
        assert -math.fsum(sums[row["doc_id"]]) == pytest.approx(row["nll_nats"], rel=1e-9)
    first = [p for d, p in zip(table["doc_id"].to_pylist(), table["position"].to_pylist(), strict=True) if d == 0]
    assert first == list(range(rows[0]["tokens"]))
    assert table["window_position"].to_pylist()[:64] == [*range(1, 64), 1]
    assert table["topk_ids"].to_pylist()[0] == [0, 1]


@pytest.mark.parametrize(
    ("name", "metrics"), [("hellaswag", ["acc", "acc_norm"]), ("truthfulqa_mc1", ["acc"]), ("truthfulqa_mc2", ["acc"])]
)
def test_item_rows_average_to_lm_evals_figures(embedded: dict[str, Any], name: str, metrics: list[str]) -> None:
    _, results = evaluate(embedded, [name], 12)
    rows = sample_rows(name, results["samples"][name])
    found = metric_values(results["results"][name])
    for metric in metrics:
        values = [row["value"] for row in rows if row["metric"] == metric]
        assert len(values) == 12
        assert found[metric] == pytest.approx(float(np.mean(values)))
    assert {row["metric"] for row in rows} == set(metrics)
    assert set(item_tables([], {name: results["samples"][name]})) == {"items"}


def test_texts_are_the_items_own(embedded: dict[str, Any]) -> None:
    """From lm-eval's real samples: prompt, every answer, the beginning of a document."""
    names = ["wikitext", "hellaswag", "truthfulqa_mc2"]
    _, results = evaluate(embedded, names, 3)
    table = kept_texts({name: results["samples"][name] for name in names}, None, None)["texts"]
    rows = {(row["task"], row["id"]): row for row in table.to_pylist()}
    item = data.read_rows(find_sources_of("hellaswag"))[1]
    assert (rows["hellaswag", 1]["prompt"], rows["hellaswag", 1]["choices"]) == (item["query"], item["choices"])
    question = data.read_rows(find_sources_of("truthfulqa_mc2"))[0]
    assert question["question"] in rows["truthfulqa_mc2", 0]["prompt"]
    assert rows["truthfulqa_mc2", 0]["choices"] == question["mc2_targets"]["choices"]
    page = data.read_rows(find_sources_of("wikitext"))[2]["page"]
    assert rows["wikitext", 2]["prompt"][:50] == page[:50]
    assert {row["response"] for row in rows.values()} == {None}


@pytest.mark.parametrize("name", ["hellaswag", "truthfulqa_mc1"])
def test_answer_is_right_exactly_where_the_item_counts_as_right(embedded: dict[str, Any], name: str) -> None:
    _, results = evaluate(embedded, [name], 25)
    for row in sample_rows(name, results["samples"][name]):
        assert (row["answer"] == row["gold"]) == (row["value"] == 1.0), row
        assert len(row["choice_logprobs"]) >= 2


def test_mc1_and_mc2_share_their_answers(embedded: dict[str, Any]) -> None:
    """Scored together they need little more than mc2 alone."""
    engines = {}
    for names in (["truthfulqa_mc1"], ["truthfulqa_mc2"], ["truthfulqa_mc1", "truthfulqa_mc2"]):
        model, _ = evaluate(embedded, names, 10)
        engines[tuple(names)] = len(model.engine.sequences)
    mc1, mc2, both = engines.values()
    assert both < mc1 + mc2


def test_limit_leaves_the_rest_out(embedded: dict[str, Any]) -> None:
    _, results = evaluate(embedded, ["hellaswag"], 3)
    assert [sample["doc_id"] for sample in results["samples"]["hellaswag"]] == [0, 1, 2]
    assert tasks.dataset_hash(results["samples"]["hellaswag"]) != tasks.dataset_hash(
        results["samples"]["hellaswag"][:2]
    )


def test_any_task_of_lm_eval_is_found_and_an_unknown_one_names_the_nearest() -> None:
    assert tasks._definition_file("arc_easy").name == "arc_easy.yaml"
    with pytest.raises(
        ConfigError,
        match=r"tasks.extra names 'arc_eazy', which is not one of lm-eval's single tasks; did you mean .*arc_easy",
    ):
        load_tasks({"arc_eazy": {}})


def test_data_that_does_not_fit_the_task_is_one_sentence() -> None:
    def broken(**_: Any) -> Any:
        raise ValueError("column missing\nsecond line")

    with pytest.raises(
        MeasurementError, match=r"the data for task wikitext does not fit the task .column missing"
    ) as caught:
        load_tasks({"wikitext": {"custom_dataset": broken}})
    assert caught.value.kind == "data"
    assert "second line" not in str(caught.value)


def test_metrics_that_are_no_numbers_have_a_reason() -> None:
    values = metric_values({"acc,none": float("nan"), "acc_stderr,none": 0.1, "em,strict": 0.5, "alias": "x", "n": 3})
    assert values == {"acc": None, "em_strict": 0.5}
    merged, reasons = merge_metrics(values, [{"nll_nats": 1e9, "tokens": 1}])
    assert merged["token_perplexity"] is None
    assert reasons == {"acc": "not a finite number", "token_perplexity": "not a finite number"}
