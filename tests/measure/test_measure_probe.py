"""The scorer that runs inside the engine, against a log-softmax in float64, on a model runner of a few lines."""

from __future__ import annotations

import functools
import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from evalq.measure import probe, reductions  # noqa: E402 - after the skip
from evalq.measure.probe import EngineProbe  # noqa: E402
from evalq.measure.scorer import ScoreStore, score_step  # noqa: E402
from evalq.measure.scores import ScoreRequest, read_prompt_logprobs, split_scores  # noqa: E402

VOCABULARY, HIDDEN = 50, 8


HEAD = torch.from_numpy(np.random.default_rng(1).standard_normal((HIDDEN, VOCABULARY)).astype(np.float32))


class Model:
    """compute_logits is a fixed matrix; None on a rank without logits."""

    def __init__(self, holds_logits: bool = True) -> None:
        self.head = HEAD
        self.holds_logits = holds_logits
        self.asked: list[int] = []  # rows of each call

    def compute_logits(self, hidden: Any) -> Any:
        self.asked.append(len(hidden))
        return (hidden @ self.head).to(torch.bfloat16) if self.holds_logits else None


@functools.cache
def state_after(prefix: tuple[int, ...]) -> Any:
    """(hidden,): a function of the prefix only."""
    seed = int.from_bytes(hashlib.sha256(bytes(prefix)).digest()[:4], "big")
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(HIDDEN).astype(np.float32))


def hidden_of(ids: list[int]) -> Any:
    """(tokens, hidden): the state after each token."""
    return torch.stack([state_after(tuple(ids[:stop])) for stop in range(1, len(ids) + 1)])


def split(arrays: dict[str, np.ndarray], requests: list[ScoreRequest]) -> list[Any]:
    """Results of all requests, in order."""
    found = split_scores(arrays, requests, range(len(requests)))
    return [found[i] for i in range(len(requests))]


def exact(ids: list[int], first: int) -> np.ndarray:
    """Log-probabilities of ids[first:] in float64, from the same bfloat16 logits."""
    logits = Model().compute_logits(hidden_of(ids)).double().numpy()
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return np.asarray([logprobs[p - 1, ids[p]] for p in range(first, len(ids))])


class Runner:
    """What score_step reads of vLLM's model runner, and steps through prompts in any chunks."""

    def __init__(self, requests: list[ScoreRequest], asked: bool = True, model: Model | None = None) -> None:
        self.model = model or Model()
        self.model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
        self.evalq_scores = ScoreStore(topk=0)
        self.evalq_keeps = True
        self.requests: dict[str, Any] = {}
        for i, request in enumerate(requests):
            extra = {"evalq": [i, request.first]} if asked else None
            self.requests[f"r{i}"] = SimpleNamespace(
                sampling_params=SimpleNamespace(extra_args=extra), prompt_token_ids=request.ids, num_computed_tokens=0
            )

    def step(self, schedule: dict[str, int]) -> None:
        """Compute the next `schedule[name]` tokens of each request, side by side in one batch."""
        hidden, starts, names = [], [0], list(schedule)
        for name, count in schedule.items():
            request = self.requests[name]
            begin = request.num_computed_tokens
            hidden.append(hidden_of(request.prompt_token_ids)[begin : begin + count])
            starts.append(starts[-1] + count)
        self.query_start_loc = SimpleNamespace(np=np.asarray(starts))
        self.input_batch = SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(names)})
        score_step(self, torch.cat(hidden), schedule)
        for name, count in schedule.items():
            self.requests[name].num_computed_tokens += count

    def take(self) -> dict[str, np.ndarray]:
        holder = SimpleNamespace(model_runner=self)
        return EngineProbe.evalq_take_scores(holder, 0)  # type: ignore[arg-type]


ids_lists = st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=14)


@st.composite
def batches(draw: Any) -> tuple[list[ScoreRequest], list[dict[str, int]]]:
    """Requests and a schedule that computes each of them in chunks, interleaved."""
    requests = []
    for ids in draw(st.lists(ids_lists, min_size=1, max_size=4)):
        requests.append(ScoreRequest(ids, draw(st.integers(1, len(ids) - 1))))
    left = {f"r{i}": len(request.ids) for i, request in enumerate(requests)}
    schedule = []
    while left:
        names = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        step = {name: draw(st.integers(1, left[name])) for name in names}
        schedule.append(step)
        left = {name: count - step.get(name, 0) for name, count in left.items() if count > step.get(name, 0)}
    return requests, schedule


@settings(max_examples=60, deadline=None)
@given(batches())
def test_any_chunking_scores_every_row_exactly_once(batch: tuple[list[ScoreRequest], list[dict[str, int]]]) -> None:
    requests, schedule = batch
    runner = Runner(requests)
    for step in schedule:
        runner.step(step)
    arrays = runner.take()
    assert len(arrays["owner"]) == sum(len(r.ids) - r.first for r in requests)
    for request, result in zip(requests, split(arrays, requests), strict=True):
        assert result is not None
        np.testing.assert_allclose(result.logprobs, exact(request.ids, request.first), atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(batches(), st.data())
def test_preempted_request_is_computed_again_and_counted_once(
    batch: tuple[list[ScoreRequest], list[dict[str, int]]], data: Any
) -> None:
    """After a preemption the engine starts the prompt anew, so some rows come twice."""
    requests, schedule = batch
    runner = Runner(requests)
    cut = data.draw(st.integers(0, len(schedule) - 1))
    for step in schedule[:cut]:
        runner.step(step)
    again = data.draw(st.sampled_from(sorted(runner.requests)))
    runner.requests[again].num_computed_tokens = 0
    for name, request in runner.requests.items():
        missing = len(request.prompt_token_ids) - request.num_computed_tokens
        if missing:
            runner.step({name: missing})
    for request, result in zip(requests, split(runner.take(), requests), strict=True):
        assert result is not None
        np.testing.assert_allclose(result.logprobs, exact(request.ids, request.first), atol=2e-5)


def test_later_row_of_a_position_wins() -> None:
    request = ScoreRequest([1, 2, 3], 1)
    arrays = {
        "owner": np.zeros(3, dtype=np.int64),
        "position": np.asarray([1, 1, 2]),
        "logprob": np.asarray([-9.0, -1.0, -2.0], dtype=np.float32),
        "top1_id": np.asarray([7, 8, 9], dtype=np.int32),
        "top1_logprob": np.zeros(3, dtype=np.float32),
    }
    (result,) = split(arrays, [request])
    assert result is not None
    assert result.logprobs.tolist() == [-1.0, -2.0]
    assert result.top1_ids.tolist() == [8, 9]
    assert result.topk_ids is None


def test_prefix_from_the_cache_that_reaches_into_the_scored_part_is_noticed() -> None:
    """A cached prefix of 4 tokens: rows 1 to 4 were never computed, so the request has no result rather than a short one."""
    requests = [ScoreRequest([1, 2, 3, 4, 5, 6], 2), ScoreRequest([1, 2, 3, 4, 5, 6], 5)]
    runner = Runner(requests)
    for name in ("r0", "r1"):
        runner.requests[name].num_computed_tokens = 4
        runner.step({name: 2})
    first, second = split(runner.take(), requests)
    assert first is None
    assert second is not None
    np.testing.assert_allclose(second.logprobs, exact([1, 2, 3, 4, 5, 6], 5), atol=2e-5)


def test_requests_of_others_and_decode_steps_are_left_alone() -> None:
    runner = Runner([ScoreRequest([1, 2, 3], 1)], asked=False)
    runner.step({"r0": 3})
    assert runner.take() == {}
    runner = Runner([ScoreRequest([1, 2, 3], 1)])
    runner.step({"r0": 3})
    runner.requests["r0"].prompt_token_ids = [1, 2, 3]
    runner.requests["r0"].num_computed_tokens = 3
    runner.query_start_loc = SimpleNamespace(np=np.asarray([0, 1]))
    score_step(runner, hidden_of([1]), {"r0": 1})  # the first generated token
    assert len(runner.take()["owner"]) == 2


def test_taking_scores_starts_anew_with_another_k() -> None:
    runner = Runner([ScoreRequest([1, 2, 3], 1)])
    holder: Any = SimpleNamespace(model_runner=runner)
    EngineProbe.evalq_take_scores(holder, 3)
    runner.step({"r0": 3})
    arrays = EngineProbe.evalq_take_scores(holder, 0)
    assert arrays["topk_id"].shape == arrays["topk_logprob"].shape == (2, 3)
    assert (arrays["topk_id"][:, 0] == arrays["top1_id"]).all()
    np.testing.assert_array_equal(arrays["topk_logprob"][:, 0], arrays["top1_logprob"])
    assert (np.diff(arrays["topk_logprob"], axis=1) <= 0).all()
    assert EngineProbe.evalq_take_scores(holder, 0) == {}
    assert runner.evalq_scores.topk == 0


@pytest.mark.parametrize("block_bytes", [4 * VOCABULARY * 16, 4 * VOCABULARY * 100, 128 << 20])
def test_blocks_of_any_size_give_the_same(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "BLOCK_BYTES", block_bytes)
    ids = [i % VOCABULARY for i in range(0, 3 * 211, 3)]
    runner = Runner([ScoreRequest(ids, 1)])
    runner.step({"r0": len(ids)})
    np.testing.assert_allclose(torch.cat(runner.evalq_scores.logprobs).numpy(), exact(ids, 1), atol=2e-5)


def test_rank_without_logits_keeps_nothing() -> None:
    runner = Runner([ScoreRequest([1, 2, 3], 1)], model=Model(holds_logits=False))
    runner.step({"r0": 3})
    assert runner.take() == {}


def test_every_rank_computes_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a head split over ranks, two ranks that cut their rows differently would wait for each other for ever."""
    monkeypatch.setattr(reductions, "BLOCK_BYTES", 4 * VOCABULARY * 100)
    ids = [i % VOCABULARY for i in range(251)]
    cut = {}
    for holds_logits in (True, False):
        runner = Runner([ScoreRequest(ids, 1)], model=Model(holds_logits))
        runner.step({"r0": len(ids)})
        cut[holds_logits] = runner.model.asked
    assert cut[True] == cut[False] == [100, 100, 50]


@pytest.mark.parametrize(
    ("rank", "size", "keeps"), [(0, 1, True), (0, 2, True), (1, 2, False), (2, 2, True), (1, 1, True)]
)
def test_one_rank_of_a_tensor_parallel_group_keeps_scores(rank: int, size: int, keeps: bool) -> None:
    runner: Any = Runner([ScoreRequest([1, 2, 3], 1)])
    runner.query_start_loc = SimpleNamespace(np=np.asarray([0, 3]))
    runner.input_batch = SimpleNamespace(req_id_to_index={"r0": 0})
    setattr(runner, probe.HOOKED, lambda hidden, scheduled: None)
    worker = SimpleNamespace(model_runner=runner, rank=rank, parallel_config=SimpleNamespace(tensor_parallel_size=size))
    assert EngineProbe.evalq_install_scorer(worker) == ""  # type: ignore[arg-type]
    getattr(runner, probe.HOOKED)(hidden_of([1, 2, 3]), {"r0": 3})
    assert bool(runner.take()) == keeps
    assert runner.model.asked == [2]  # the logits are gathered from all ranks


def test_scorer_is_put_in_place_once_and_calls_the_engines_own() -> None:
    called = []
    runner: Any = Runner([ScoreRequest([1, 2, 3], 1)])
    runner.query_start_loc = SimpleNamespace(np=np.asarray([0, 3]))
    runner.input_batch = SimpleNamespace(req_id_to_index={"r0": 0})
    setattr(runner, probe.HOOKED, lambda hidden, scheduled: called.append(scheduled) or {"own": 1})
    holder: Any = SimpleNamespace(model_runner=runner, parallel_config=SimpleNamespace(tensor_parallel_size=1))
    assert EngineProbe.evalq_install_scorer(holder) == ""
    assert getattr(runner, probe.HOOKED)(hidden_of([1, 2, 3]), {"r0": 3}) == {"own": 1}
    assert called == [{"r0": 3}]
    assert len(runner.take()["owner"]) == 2


def test_engine_of_another_build_is_refused_with_a_reason() -> None:
    answer = EngineProbe.evalq_install_scorer(SimpleNamespace(model_runner=SimpleNamespace(requests={})))  # type: ignore[arg-type]
    assert "has no _get_prompt_logprobs_dict, input_batch, query_start_loc, model, model_config" in answer


def test_a_model_that_does_not_say_how_many_words_it_has_is_refused() -> None:
    runner: Any = Runner([ScoreRequest([1, 2, 3], 1)])
    runner.query_start_loc, runner.input_batch = None, None
    setattr(runner, probe.HOOKED, lambda hidden, scheduled: None)
    runner.model_config = SimpleNamespace(get_vocab_size=lambda: 0)
    assert "how many words" in EngineProbe.evalq_install_scorer(SimpleNamespace(model_runner=runner))  # type: ignore[arg-type]


def test_public_logprobs_are_read_by_token_and_rank() -> None:
    def entry(*pairs: tuple[int, float, int]) -> dict[int, Any]:
        return {token: SimpleNamespace(logprob=value, rank=rank) for token, value, rank in pairs}

    entries = [
        None,
        entry((5, -2.0, 3), (9, -0.1, 1)),
        entry((6, -0.2, 1)),
        entry((7, -3.0, 9), (1, -0.5, 1), (2, -0.9, 2)),
    ]
    result = read_prompt_logprobs(entries, ScoreRequest([4, 5, 6, 7], 1), 0)
    np.testing.assert_allclose(result.logprobs, [-2.0, -0.2, -3.0], atol=1e-6)
    assert result.top1_ids.tolist() == [9, 6, 1]
    assert result.topk_ids is None


def test_parameters_with_one_storage_count_once() -> None:
    model = torch.nn.Module()
    model.a = torch.nn.Linear(4, 4, bias=False)
    model.b = torch.nn.Linear(4, 4, bias=False)
    model.b.weight = torch.nn.Parameter(model.a.weight.detach())  # another parameter over the same memory
    model.c = torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    assert probe.describe_parameters(model)["bytes_by_dtype"] == {"float32": 64, "int8": 3}
    assert sorted(row[0] for row in probe.as_loaded(model)) == ["a.weight", "c"]


def test_kv_cache_is_counted_once_where_layers_share_it() -> None:
    one = torch.zeros(2, 10, dtype=torch.uint8)
    runner = SimpleNamespace(
        kv_caches=[one, one[:1], (torch.zeros(5, dtype=torch.bfloat16), None)], kv_cache_dtype="fp8"
    )
    found = probe.describe_kv_cache(runner)
    assert found["bytes"] == 20 + 10
    assert found["dtypes"] == ["bfloat16", "uint8"]


def test_kv_scales_are_those_of_the_attention_layers() -> None:
    model = torch.nn.Module()
    for name, (k, v) in {"one": (1.0, 1.0), "two": (0.5, 2.0)}.items():
        layer = torch.nn.Module()
        layer._k_scale_float, layer._v_scale_float = k, v
        layer.attn_backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
        model.add_module(name, layer)
    found = probe.describe_kv_scales(model)
    assert found == {
        "layers": 2, "k_min": 0.5, "k_max": 1.0, "v_min": 1.0, "v_max": 2.0, "attention_backends": ["CPU_ATTN"],
    }  # fmt: skip
    assert probe.describe_kv_scales(torch.nn.Module()) == {"layers": 0, "attention_backends": []}
