"""Arguments and settings of the engine, and its scoring loop on a stand-in for vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evalq.errors import EvalqError, InfeasibleError, MeasurementError
from evalq.measure import engine as module
from evalq.measure.engine import MARGIN_TOKENS, Engine, ScoreRequest, engine_arguments, prepare_environment
from evalq.measure.hidden import sequence_key
from evalq.measure.saved import SavedScores
from evalq.preparation import prepare


def test_nothing_that_could_differ_is_left_to_the_engine(cell_config: Any) -> None:
    config = cell_config("fp8-kv", "engine=cpu")
    arguments = engine_arguments(config, Path("/checkpoint"), 2048, is_cpu=True)
    assert arguments["kv_cache_dtype"] == "fp8_e4m3"
    assert arguments["max_model_len"] == 2048 + MARGIN_TOKENS  # b2: longer than any window, by construction
    for name in (
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "enforce_eager",
        "seed",
    ):
        assert arguments[name] == getattr(config.engine, name)
    assert arguments["block_size"] == 32
    assert arguments["trust_remote_code"] is False
    assert "auto" not in (arguments["kv_cache_dtype"], arguments["dtype"])
    assert "quantization" not in arguments, "a checkpoint says itself how it is quantised"
    assert "gpu_memory_utilization" not in arguments


def test_arguments_on_a_gpu_and_online(cell_config: Any) -> None:
    overrides = ("quant.origin=engine", "quant.engine_quantization=fp8", "engine=default", "engine.extra.swap=1")
    arguments = engine_arguments(cell_config("baseline", *overrides), Path("/c"), 512, is_cpu=False)
    assert arguments["quantization"] == "fp8"
    assert arguments["gpu_memory_utilization"] == 0.9
    assert "block_size" not in arguments
    assert arguments["swap"] == 1


@pytest.mark.parametrize("value", [True, False])
def test_flags_reach_the_engine_as_booleans(cell_config: Any, value: bool) -> None:
    """a13."""
    text = str(value).lower()
    config = cell_config("baseline", f"engine.enforce_eager={text}", f"engine.enable_chunked_prefill={text}")
    arguments = engine_arguments(config, Path("/c"), 512, is_cpu=True)
    assert arguments["enforce_eager"] is value
    assert arguments["enable_chunked_prefill"] is value


def test_environment_is_set_before_the_engine_is_imported(cell_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    prepare_environment(cell_config("baseline", "gpu.cpu_kv_cache_gib=3", "engine.env.SOME_FLAG=1"), is_cpu=True)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-2"
    assert os.environ["SOME_FLAG"] == "1"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3})
    prepare_environment(cell_config("baseline"), is_cpu=True)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "1,3"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["engine.max_model_len=2048"], "tasks.perplexity_window needs 2049 tokens and the engine's length is 2048"),
        (["engine.max_model_len=1024"], "set engine.max_model_len=2049 or more"),
        (["load.input_tokens=3000"], "load.input_tokens + load.output_tokens needs 3016 tokens"),
        (["tasks.perplexity_window=8192"], "exceeds 8192 positions"),
    ],
)
def test_sequence_that_does_not_fit_is_refused_before_anything_starts(
    cell_config: Any, no_checkpoint: Path, overrides: list[str], words: str
) -> None:
    """b2."""
    with pytest.raises(EvalqError) as caught:
        prepare(cell_config("fp8-kv", *overrides))
    assert words in str(caught.value)
    assert caught.value.exit_code in (2, 4)


def test_window_just_below_the_length_is_taken(cell_config: Any, no_checkpoint: Path) -> None:
    prepare(cell_config("fp8-kv", "engine.max_model_len=2049"))
    prepare(cell_config("fp8-kv", "load.input_tokens=3000", "load=off"))


class Core:
    """vLLM's llm_engine: finishes requests in any order, a few per step."""

    def __init__(self, fail_at: int = -1) -> None:
        self.waiting: list[tuple[str, Any, Any]] = []
        self.fail_at = fail_at
        self.steps = self.added = 0
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(skip_tokenizer_init=True), cache_config=SimpleNamespace(block_size=4)
        )

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        self.added += 1
        self.waiting.append((name, prompt["prompt_token_ids"], params))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        name, ids, _ = self.waiting.pop()
        return [
            SimpleNamespace(request_id=name, finished=True, ids=ids),
            SimpleNamespace(request_id="x", finished=False),
        ]


class Llm:
    """vllm.LLM for the hook scorer: scores a sequence's position p as -p; drops cached requests on demand."""

    def __init__(self, core: Core, drop_shared: set[int] | None = None) -> None:
        self.llm_engine = core
        self.drop_shared = drop_shared or set()
        self.fed: list[Any] = []
        self.topk: list[int] = []

    def reset_prefix_cache(self) -> None: ...

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        assert name == "evalq_take_scores"
        if self.fed == [] and not self.llm_engine.steps:
            self.topk.append(args[0])
        answer = self._scores()
        self.fed = []
        return [answer, {}]

    def _scores(self) -> dict[str, np.ndarray]:
        owners: list[int] = []
        positions: list[int] = []
        for params, ids in self.fed:
            owner, first = params.extra_args["evalq"]
            if owner in self.drop_shared and not params.skip_reading_prefix_cache:
                first += 1
            positions += range(first, len(ids))
            owners += [owner] * (len(ids) - first)
        if not owners:
            return {}
        at = np.asarray(positions)
        return {"owner": np.asarray(owners), "position": at, "logprob": -at.astype(np.float32),
                "top1_id": at.astype(np.int32), "top1_logprob": -at.astype(np.float32)}  # fmt: skip


def engine_on(llm: Llm, monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(llm, "hook", "", 0.0)

    def params(self: Engine, **settings: Any) -> Any:
        return SimpleNamespace(**settings)

    real = llm.llm_engine.add_request

    def add(name: str, prompt: dict[str, Any], one: Any) -> None:
        llm.fed.append((one, prompt["prompt_token_ids"]))
        real(name, prompt, one)

    monkeypatch.setattr(Engine, "_params", params)
    llm.llm_engine.add_request = add  # type: ignore[method-assign]
    return engine


REQUESTS = [ScoreRequest([5, 6, 7], 1), ScoreRequest([5, 6, 7, 8], 2), ScoreRequest([9, 9], 1)]
EXPECTED = [[-1.0, -2.0], [-2.0, -3.0], [-1.0]]


@pytest.mark.parametrize("reverse", [False, True])
def test_results_come_in_the_order_of_the_requests(monkeypatch: pytest.MonkeyPatch, reverse: bool) -> None:
    told: list[tuple[int, int]] = []
    llm = Llm(Core())
    results = engine_on(llm, monkeypatch).score(
        REQUESTS, progress=lambda done, total, unit: told.append((done, total)), reverse=reverse
    )
    assert [result.logprobs.tolist() for result in results] == EXPECTED
    assert told[-1] == (3, 3)


def test_request_whose_rows_came_from_the_cache_is_scored_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(Llm(Core(), drop_shared={1}), monkeypatch)
    results = engine.score(REQUESTS, share_prefixes=True)
    assert [result.logprobs.tolist() for result in results] == EXPECTED


def test_waves_run_together_and_read_only_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two endings that begin alike for a block of 4: one run, with salts that no later call repeats."""
    core = Core()
    engine = engine_on(Llm(core), monkeypatch)
    fed: list[dict[str, Any]] = []
    add = core.add_request
    core.add_request = lambda name, prompt, params: (fed.append(prompt), add(name, prompt, params))  # type: ignore[method-assign,func-returns-value,assignment]
    alike = [ScoreRequest([1, 2, 3, 4, last], 1) for last in (5, 6, 6)]
    engine.score(alike, share_prefixes=True)
    first = [prompt["cache_salt"] for prompt in fed]
    assert len(set(first)) == 3
    engine.score([*alike[:1], ScoreRequest([9, 9], 1)], share_prefixes=True)
    second = [prompt["cache_salt"] for prompt in fed[3:]]
    assert second[0] == second[1]
    assert not set(first) & set(second)
    engine.score(alike)
    assert all("cache_salt" not in prompt for prompt in fed[5:]), "nothing is shared, so nothing is kept apart"


def test_scores_that_stay_away_are_an_error_not_a_short_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = Llm(Core())
    monkeypatch.setattr(Llm, "_scores", lambda self: {})
    with pytest.raises(MeasurementError, match="scores for 0 of 3 sequences"):
        engine_on(llm, monkeypatch).score(REQUESTS)


def test_a_score_that_is_no_number_is_an_error_and_minus_infinity_is_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's argmax takes NaN for the largest: a model that overflows would answer questions."""
    for value, fails in ((np.nan, True), (-np.inf, False)):
        llm = Llm(Core())
        real = llm._scores

        def scores(value: float = value, real: Any = real) -> dict[str, np.ndarray]:
            rows = real()
            if rows:
                rows["logprob"][-1] = value
            return rows

        llm._scores = scores  # type: ignore[method-assign]
        engine = engine_on(llm, monkeypatch)
        if not fails:
            assert sum(np.isinf(r.logprobs).sum() for r in engine.score(REQUESTS)) == 1
            continue
        with pytest.raises(MeasurementError, match=r"not numbers \(NaN\) in 1 of 3 sequences") as caught:
            engine.score(REQUESTS)
        assert caught.value.kind == "engine"


def test_a_refused_request_takes_those_before_it_out_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core()
    engine = engine_on(Llm(core), monkeypatch)
    add, aborted = core.add_request, []

    def refusing(name: str, prompt: dict[str, Any], params: Any) -> None:
        if prompt["prompt_token_ids"] == REQUESTS[1].ids:
            raise ValueError("too long")
        add(name, prompt, params)

    core.add_request = refusing  # type: ignore[method-assign]
    core.abort_request = aborted.extend  # type: ignore[attr-defined]
    with pytest.raises(MeasurementError, match="too long"):
        engine.score(REQUESTS)
    assert len(aborted) == 1


def test_baseline_states_are_compared_with_one_head_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a head split over two ranks, one of which differs, both read the baseline's."""
    llm = Llm(Core())
    engine = engine_on(llm, monkeypatch)
    asked: list[Any] = []

    def answer(name: str, args: tuple[Any, ...] = ()) -> list[str]:
        asked.append((name, args))
        return ["a", "c"] if name == "evalq_head_hash" else ["", ""]

    llm.collective_rpc = answer  # type: ignore[method-assign,assignment]
    use = SimpleNamespace(folder="f", layout="l")
    assert engine.compare_hidden(use, ["a", "b"], None) == ""  # type: ignore[arg-type]
    assert engine.compare_hidden(use, ["a", "c"], None) == ""  # type: ignore[arg-type]
    assert [args[2] for name, args in asked if name == "evalq_compare_hidden"] == [False, True]


def test_engine_that_runs_out_of_memory_while_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """b1."""
    with pytest.raises(MeasurementError) as caught:
        engine_on(Llm(Core(fail_at=2)), monkeypatch).score(REQUESTS)
    assert caught.value.kind == "oom"
    assert "max_num_batched_tokens" in str(caught.value)


def test_finished_portions_are_kept_and_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine dies in its second step, within the second portion: the first is on disk, the next run computes the others."""
    saved = SavedScores(tmp_path / "partial", "key")
    assert len(saved) == 0, "nothing kept yet must not read as nothing asked for"
    engine = engine_on(Llm(Core(fail_at=2)), monkeypatch)
    engine.portion_tokens = 4
    with pytest.raises(EvalqError):
        engine.score(REQUESTS, saved=saved)
    again = SavedScores(tmp_path / "partial", "key")
    assert len(again) == 1
    llm = Llm(Core())
    engine = engine_on(llm, monkeypatch)
    engine.portion_tokens = 4
    results = engine.score(REQUESTS, saved=again)
    assert [r.logprobs.tolist() for r in results] == EXPECTED
    assert llm.llm_engine.added == 2


def test_a_portion_that_is_not_whole_on_disk_is_computed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches would be others without the sequences that were finished."""
    saved = SavedScores(tmp_path / "partial", "key")
    first = REQUESTS[0]
    rows = {"logprob": np.float32([-1, -2]), "top1_id": np.int32([1, 2]), "top1_logprob": np.float32([-1, -2])}
    saved.keep({sequence_key(first.ids, first.first): rows})
    llm = Llm(Core())
    results = engine_on(llm, monkeypatch).score(REQUESTS, saved=saved)
    assert [r.logprobs.tolist() for r in results] == EXPECTED
    assert llm.llm_engine.added == len(REQUESTS)


def test_a_sequence_asked_for_twice_is_scored_once_where_scores_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = Llm(Core())
    engine = engine_on(llm, monkeypatch)
    engine.portion_tokens = 4
    doubled = [*REQUESTS, REQUESTS[0]]
    results = engine.score(doubled, saved=SavedScores(tmp_path / "partial", "key"))
    assert [r.logprobs.tolist() for r in results] == [*EXPECTED, EXPECTED[0]]
    assert llm.llm_engine.added == len(REQUESTS)


def test_a_request_with_nothing_to_score_has_no_scores_alone_in_its_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(Llm(Core()), monkeypatch)
    engine.portion_tokens = 3
    results = engine.score([ScoreRequest([5, 6, 7], 3), REQUESTS[0]])
    assert [r.logprobs.tolist() for r in results] == [[], EXPECTED[0]]


def test_no_requests_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_on(Llm(Core()), monkeypatch).score([]) == []


def test_missing_engine_names_the_extra(cell_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(module, "prepare_environment", lambda *_: None)
    with pytest.raises(Exception, match=r"pip install 'evalq\[cpu\]'") as caught:
        Engine.start(cell_config("baseline"), Path("/c"), 512, is_cpu=True)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    assert not isinstance(caught.value, InfeasibleError)
