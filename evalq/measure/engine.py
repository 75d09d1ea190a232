"""The engine: vLLM started once per cell, in this process, for scoring, generating and questions about what was loaded.

The only module that talks to vLLM's public interface; it works with vLLM 0.26 to 0.32. Differences between versions live in
`engine_arguments` and evalq.measure.engine_settings.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evalq.config import EngineConfig, RunConfig
from evalq.errors import MeasurementError, MissingExtraError
from evalq.measure.engine_settings import SCORER_VERSION, settings_of
from evalq.measure.failures import classify
from evalq.measure.hidden import sequence_key
from evalq.measure.saved import SavedScores
from evalq.measure.scores import (
    Call,
    HiddenUse,
    Rows,
    ScoreRequest,
    ScoreResult,
    from_arrays,
    portions,
    read_prompt_logprobs,
    to_arrays,
)

Progress = Callable[[int, int, str], None]  # done, total, unit
# Named, not imported: importing it imports vLLM, and vLLM reads its environment when imported.
PROBE_CLASS = "evalq.measure.probe.EngineProbe"
TAKE_SECONDS = 20.0  # how often scores leave the device while a portion is under way
MARGIN_TOKENS = 64  # room of the engine's length above the longest window


@dataclass(frozen=True)
class Generated:
    """One generated sequence; times are seconds from the start of its batch."""

    token_ids: list[int]
    finished_seconds: float
    cached_tokens: int


def prepare_environment(config: RunConfig, is_cpu: bool) -> None:
    """Set the engine's environment variables; must run before vLLM is imported in this process."""
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in this process: fewer processes to lose, and deterministic
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner that the scorer hooks into, on every version
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if is_cpu:
        fixed["VLLM_CPU_KVCACHE_SPACE"] = str(config.gpu.cpu_kv_cache_gib)
        fixed["VLLM_CPU_OMP_THREADS_BIND"] = config.gpu.cpu_threads or own_cores()
    os.environ.update(fixed)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.update(config.engine.env)


def own_cores() -> str:
    """The cores this process may run on, as the engine wants them: "0-1" or "0,2"."""
    cores = sorted(os.sched_getaffinity(0))
    if cores == list(range(cores[0], cores[-1] + 1)) and len(cores) > 1:
        return f"{cores[0]}-{cores[-1]}"
    return ",".join(map(str, cores))


def engine_arguments(config: RunConfig, checkpoint: Path, window: int, is_cpu: bool) -> dict[str, Any]:
    """Arguments of vllm.LLM for one cell. Nothing that could differ between cells is left to the engine's defaults."""
    engine = config.engine
    arguments: dict[str, Any] = {
        "model": str(checkpoint),
        "tokenizer": str(checkpoint),
        "dtype": config.model.dtype,
        "kv_cache_dtype": config.quant.kv_cache_dtype,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "max_model_len": engine.max_model_len or window + MARGIN_TOKENS,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enable_chunked_prefill": engine.enable_chunked_prefill,
        "enforce_eager": engine.enforce_eager,
        "load_format": engine.load_format,
        "seed": engine.seed,
        "trust_remote_code": config.model.trust_remote_code,
        "disable_log_stats": False,
        "worker_extension_cls": PROBE_CLASS,
    }
    if engine.load_format == "dummy":
        arguments["skip_tokenizer_init"] = True  # there are no files but config.json
    if config.quant.origin == "engine":
        arguments["quantization"] = config.quant.engine_quantization
    if not is_cpu:
        arguments["gpu_memory_utilization"] = config.gpu.memory_utilization
    if engine.block_size:
        arguments["block_size"] = engine.block_size
    if engine.attention_backend:
        arguments["attention_backend"] = engine.attention_backend
    return {**arguments, **engine.extra}


class Engine:
    """A running vLLM. `start` may take minutes; `close` gives the memory back."""

    def __init__(self, llm: Any, scorer: str, scorer_note: str, start_seconds: float) -> None:
        self._llm = llm
        self.scorer = scorer  # "hook" or "prompt_logprobs", as really used
        self.scorer_note = scorer_note
        self.start_seconds = start_seconds
        self.start_kind = "unknown"
        self.tokenizer = None if llm.llm_engine.vllm_config.model_config.skip_tokenizer_init else llm.get_tokenizer()
        self.portion_tokens = EngineConfig.portion_tokens
        self.steps = 0
        self._counter = 0
        self._thresholds = gc.get_threshold()
        self._step_tokens: int | None = None  # see paced
        self._between_steps: Callable[[], None] | None = None

    @classmethod
    def start(cls, config: RunConfig, checkpoint: Path, window: int, is_cpu: bool) -> Engine:
        """Start vLLM on `checkpoint`. Errors: MeasurementError or InfeasibleError with the engine's cause in one sentence."""
        prepare_environment(config, is_cpu)
        try:
            from vllm import LLM
        except ImportError as error:
            raise MissingExtraError("measuring", "vllm", "cpu" if is_cpu else "gpu") from error
        began = time.monotonic()
        try:
            llm = LLM(**engine_arguments(config, checkpoint, window, is_cpu))
        except Exception as error:
            raise classify(error, "start") from error
        started = time.monotonic() - began
        scorer, note = "prompt_logprobs", ""
        if config.tasks.scorer == "hook":
            refusals = [answer for answer in llm.collective_rpc("evalq_install_scorer") if answer]
            scorer, note = ("prompt_logprobs", refusals[0]) if refusals else ("hook", "")
        engine = cls(llm, scorer, note, started)
        engine.portion_tokens = config.engine.portion_tokens
        engine.start_kind = "eager" if config.engine.enforce_eager else "unknown"
        engine._thresholds = _leave_to_itself()
        return engine

    def score(
        self,
        requests: Sequence[ScoreRequest],
        topk: int = 0,
        share_prefixes: bool = False,
        progress: Progress | None = None,
        reverse: bool = False,
        hidden: HiddenUse | None = None,
        saved: SavedScores | None = None,
    ) -> list[ScoreResult]:
        """Score requests in the engine's own batches, portion by portion (see portions). Results in the order of `requests`.

        share_prefixes lets requests read each other's common prefix from the cache (only with prefix caching on); reverse
        feeds the requests from the last to the first, which must not matter. `hidden` keeps or compares hidden states (see
        keep_hidden); `saved` holds the portions of an earlier, interrupted call and takes those of this one: a portion is
        computed as a whole or not at all, so what a resumed call computes is batched as in a call that was never interrupted.
        """
        if reverse:
            return self.score(requests[::-1], topk, share_prefixes, progress, False, hidden, saved)[::-1]
        named = hidden is not None or saved is not None
        keys = [sequence_key(request.ids, request.first) for request in requests] if named else []
        once = dict(zip(keys, requests, strict=False))
        if len(once) < len(keys):  # kept by key: each sequence has one result, resumed or not
            single = self.score([*once.values()], topk, share_prefixes, progress, False, hidden, saved)
            by_key = dict(zip(once, single, strict=True))
            return [by_key[key] for key in keys]
        call = Call(topk, keys, hidden, saved)
        results: list[ScoreResult | None] = [None] * len(requests)
        done = 0
        for portion in portions(requests, self.portion_tokens, self._block_tokens if share_prefixes else None):
            part = [requests[i] for i in portion.numbers]
            counted = _counted(progress, done, len(requests))
            found = self._score_portion(part, portion.waves, counted, call.of(portion.numbers))
            for i, result in zip(portion.numbers, found, strict=True):
                results[i] = result
            done += len(part)
        complete = [result for result in results if result is not None]
        if len(complete) != len(requests):
            raise MeasurementError(
                f"the engine returned scores for {len(complete)} of {len(requests)} sequences; "
                "run again with tasks.scorer=prompt_logprobs",
                "engine",
            )
        _require_numbers(complete)
        return complete

    def _score_portion(
        self, requests: Sequence[ScoreRequest], waves: list[int] | None, progress: Progress | None, call: Call
    ) -> list[ScoreResult | None]:
        """One portion: as it was kept, or computed and kept. waves: see Portion."""
        kept = [from_arrays(call.saved.get(key)) for key in call.keys] if call.saved is not None else []
        if kept and all(result is not None for result in kept):
            return kept
        if self.scorer == "prompt_logprobs":
            results: list[ScoreResult | None] = [*self._score_by_prompt_logprobs(requests, call.topk, progress)]
        else:
            salts = None if waves is None else self._salts(waves)
            results = self._score_by_hook(requests, salts is not None, progress, call, salts)
            results = self._score_again(requests, results, call)
        if call.saved is not None:
            pairs = zip(call.keys, results, strict=True)
            call.saved.keep({key: to_arrays(result) for key, result in pairs if result is not None})
        return results

    @property
    def _block_tokens(self) -> int:
        """Tokens of one block of the prefix cache."""
        return int(self._llm.llm_engine.vllm_config.cache_config.block_size or 16)  # None: an engine that does not say

    def _salts(self, waves: list[int]) -> list[str]:
        """One salt of the prefix cache per request: what has the same salt reads each other's blocks, in this call alone."""
        return [f"evalq-{self._counter}-{wave}" for wave in waves]

    def _score_again(
        self, requests: Sequence[ScoreRequest], results: list[ScoreResult | None], call: Call
    ) -> list[ScoreResult | None]:
        """What was found in the cache all the same has no rows: score it without the cache."""
        again = [i for i, result in enumerate(results) if result is None]
        if not again:
            return results
        alone = self._score_by_hook([requests[i] for i in again], False, None, call.of(again))
        for i, result in zip(again, alone, strict=True):
            results[i] = result
        return results

    def _score_by_hook(
        self,
        requests: Sequence[ScoreRequest],
        share: bool,
        progress: Progress | None,
        call: Call,
        salts: list[str] | None = None,
    ) -> list[ScoreResult | None]:
        """Rows of the requests, None where some are missing. share: read the prefix cache; salts: see _salts."""
        if not requests:
            return []
        self._llm.collective_rpc("evalq_take_scores", args=(call.topk,))
        checked = self._params(skip_reading_prefix_cache=not share)  # the engine checks each that is made anew
        params = [copy.copy(checked) for _ in requests]
        for i, (one, request) in enumerate(zip(params, requests, strict=True)):
            one.extra_args = {"evalq": [i, request.first, *call.place(i)]}
        rows = Rows()
        every = _Every(TAKE_SECONDS, lambda: rows.add(self._take_scores(call.topk)))
        self._run([request.ids for request in requests], params, progress, after_step=every, salts=salts)
        rows.add(self._take_scores(0, durable=call.saved is not None))
        found = rows.split(requests, range(len(requests)))
        return [found[i] for i in range(len(requests))]

    def _take_scores(self, topk_next: int, durable: bool = False) -> dict[str, np.ndarray]:
        answers = [a for a in self._llm.collective_rpc("evalq_take_scores", args=(topk_next, durable)) if a]
        return answers[0] if answers else {}

    def keep_hidden(self, use: HiddenUse) -> list[str]:
        """Open the store for writing; returns the hash of the output head on each rank."""
        return list(self._llm.collective_rpc("evalq_keep_hidden", args=(str(use.folder), use.layout)))

    def compare_hidden(self, use: HiddenUse, heads: list[str], checkpoint: Path | None) -> str:
        """Open the baseline's store for comparing; returns "" or why exact divergence cannot be had."""
        own = list(self._llm.collective_rpc("evalq_head_hash"))
        # One answer for all ranks: with a head split over them, all or none compute it together.
        same = own == heads and all(own)
        arguments = (str(use.folder), use.layout, same, str(checkpoint or ""))
        return next(
            (answer for answer in self._llm.collective_rpc("evalq_compare_hidden", args=arguments) if answer), ""
        )

    def close_hidden(self) -> None:
        """Stop keeping or comparing; what was kept is on disk."""
        self._llm.collective_rpc("evalq_close_hidden")

    @property
    def hidden_size(self) -> int:
        """Width of the final hidden states."""
        return int(self._llm.llm_engine.vllm_config.model_config.get_hidden_size())

    def _score_by_prompt_logprobs(
        self, requests: Sequence[ScoreRequest], topk: int, progress: Progress | None
    ) -> list[ScoreResult]:
        params = [self._params(prompt_logprobs=max(1, topk)) for _ in requests]
        outputs = self._run([request.ids for request in requests], params, progress)
        return [
            read_prompt_logprobs(output.prompt_logprobs, request, topk)
            for output, request in zip(outputs, requests, strict=True)
        ]

    def score_paced(
        self,
        requests: Sequence[ScoreRequest],
        step_tokens: int,
        topk: int = 0,
        share_prefixes: bool = False,
        between_steps: Callable[[], None] | None = None,
    ) -> list[ScoreResult | None]:
        """As score, with at most `step_tokens` tokens of each request in one engine step; None where rows are missing.

        Needs the hook. between_steps is called after every step of the engine.
        """
        with self.paced(step_tokens, between_steps):
            return self._score_by_hook(requests, share_prefixes, None, Call(topk, [], None, None))

    @contextlib.contextmanager
    def paced(self, step_tokens: int, between_steps: Callable[[], None] | None = None) -> Iterator[None]:
        """Inside, the scheduler gives each request at most `step_tokens` tokens per step. Errors: MeasurementError."""
        scheduler = self._scheduler()
        config = scheduler.scheduler_config
        before = (scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold)
        adaptive = getattr(scheduler, "adaptive_long_prefill_threshold", None)
        self._step_tokens, self._between_steps = step_tokens, between_steps
        try:
            config.long_prefill_token_threshold = step_tokens
            if adaptive is not None:
                scheduler.adaptive_long_prefill_threshold = False
            yield
        finally:
            self._step_tokens, self._between_steps = None, None
            scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold = before
            if adaptive is not None:
                scheduler.adaptive_long_prefill_threshold = adaptive

    def _scheduler(self) -> Any:
        scheduler = self._llm.llm_engine
        for name in ("engine_core", "engine_core", "scheduler"):
            scheduler = getattr(scheduler, name, None)
        if not hasattr(scheduler, "max_num_scheduled_tokens"):
            raise MeasurementError(
                "this engine's scheduler cannot be paced, so tokens cannot be scored one per step; "
                "switch kv.decode off, or use a vLLM from 0.26 to 0.32",
                "engine",
            )
        return scheduler

    def _before_step(self, unfinished: int) -> None:
        """While paced, the budget of a step follows the requests that are left: a lone one has no threshold of its own."""
        if self._step_tokens is not None:
            scheduler = self._scheduler()
            most = scheduler.scheduler_config.max_num_batched_tokens
            scheduler.max_num_scheduled_tokens = max(1, min(most, self._step_tokens * unfinished))

    def ask_workers(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of every rank to one of the probe's methods."""
        return list(self._llm.collective_rpc(method, args=arguments))

    def compute(self, sequences: Sequence[list[int]]) -> None:
        """Run sequences into the KV cache, reading what is cached of them already; nothing is scored."""
        params = self._params(skip_reading_prefix_cache=False)
        self._run(list(sequences), [params] * len(sequences), None)

    def greedy(self, prompts: Sequence[list[int]], max_tokens: int, ignore_eos: bool = False) -> list[list[int]]:
        """Greedy continuations as token ids; no prompt reads another's cached prefix."""
        params = self._params(max_tokens=max_tokens, ignore_eos=ignore_eos, skip_reading_prefix_cache=True)
        return [list(output.outputs[0].token_ids) for output in self._run(list(prompts), [params] * len(prompts), None)]

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        ignore_eos: bool = False,
        progress: Progress | None = None,
    ) -> tuple[list[Any], list[float]]:
        """Generate from token ids; returns the engine's outputs and each one's seconds from the start, in order."""
        params = self._params(
            max_tokens=max_tokens,
            temperature=temperature,
            ignore_eos=ignore_eos,
            min_tokens=max_tokens if ignore_eos else 0,
            stop=list(stop) or None,
            detokenize=not ignore_eos,
        )
        finished: list[float] = []
        outputs = self._run(list(prompts), [params] * len(prompts), progress, finished)
        return outputs, finished

    def _params(self, **settings: Any) -> Any:
        from vllm import SamplingParams

        # skip_clone: made for one request, so the engine need not copy it deeply, a third of the cost of adding a request.
        return SamplingParams(
            **{"max_tokens": 1, "temperature": 0.0, "detokenize": False, "skip_clone": True, **settings}
        )

    def _run(
        self,
        prompts: list[list[int]],
        params: list[Any],
        progress: Progress | None,
        finished_seconds: list[float] | None = None,
        after_step: Callable[[], None] | None = None,
        salts: list[str] | None = None,
    ) -> list[Any]:
        """Feed all prompts and step the engine until every one is finished; outputs in the order of prompts.

        Prompts go in as the engine's own tokenised form, which it checks and neither tokenises nor pads.
        """
        core = self._llm.llm_engine
        order: dict[str, int] = {}
        began = time.monotonic()
        try:
            for i, (ids, one) in enumerate(zip(prompts, params, strict=True)):
                self._counter += 1
                name = f"evalq-{self._counter}"
                salt = {} if salts is None else {"cache_salt": salts[i]}
                core.add_request(name, {"type": "token", "prompt_token_ids": ids, **salt}, one)
                order[name] = i
            outputs: list[Any] = [None] * len(prompts)
            seconds = [0.0] * len(prompts)
            done = 0
            while core.has_unfinished_requests():
                self._before_step(len(prompts) - done)
                for output in core.step():
                    if output.finished:
                        index = order[output.request_id]
                        outputs[index], seconds[index] = output, time.monotonic() - began
                        done += 1
                self.steps += 1
                if after_step is not None:
                    after_step()
                if self._between_steps:
                    self._between_steps()
                if progress:
                    progress(done, len(prompts), "sequences")
        except Exception as error:
            with contextlib.suppress(Exception):  # what was added before must not run beside the next call's requests
                core.abort_request(list(order))
            raise classify(error, "run") from error
        if finished_seconds is not None:
            finished_seconds.extend(seconds)
        return outputs

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model knows."""
        return int(self._llm.llm_engine.vllm_config.model_config.get_vocab_size())

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, so that what ran before cannot speed up what runs next."""
        self._llm.reset_prefix_cache()

    def describe(self) -> list[dict[str, Any]]:
        """What each worker says was loaded (see probe.EngineProbe.evalq_describe), one entry per rank."""
        return [json.loads(answer) for answer in self._llm.collective_rpc("evalq_describe")]

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """The engine's own effective settings, read back from it."""
        config = self._llm.llm_engine.vllm_config
        return {
            **settings_of(config),
            "scorer": self.scorer,
            "scorer_version": SCORER_VERSION,
            "portion_tokens": self.portion_tokens,
        }

    def preemptions(self) -> int | None:
        """Requests preempted since the start, from the engine's metrics; None where it keeps none."""
        try:
            for metric in self._llm.get_metrics():
                if metric.name == "vllm:num_preemptions":
                    return int(metric.value)
        except (AssertionError, AttributeError):
            return None
        return None

    def close(self) -> None:
        """Shut the engine down and free its memory."""
        core = getattr(self._llm.llm_engine, "engine_core", None)
        shutdown = getattr(core, "shutdown", None)
        if shutdown is not None:
            shutdown()
        self._llm = None
        gc.unfreeze()
        gc.set_threshold(*self._thresholds)
        gc.collect()


def _require_numbers(results: Sequence[ScoreResult]) -> None:
    """A score that is no number would be compared like one: the choice with NaN wins a question. -inf is a score."""
    broken = sum(bool(np.isnan(result.logprobs).any()) for result in results)
    if broken:
        raise MeasurementError(
            f"the model's log-probabilities are not numbers (NaN) in {broken} of {len(results)} sequences; the checkpoint or a "
            "kernel overflows: try model.dtype=bfloat16, another engine.attention_backend, or look for NaN in the weights",
            "engine",
        )


def _leave_to_itself() -> tuple[int, int, int]:
    """What the engine made while starting lives as long as it: the garbage collector need not walk through it, or come often.

    Returns the collector's thresholds of before.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    return before


def _counted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Progress of a part as progress of the whole."""
    if progress is None:
        return None
    return lambda done, _, unit: progress(before + done, total, unit)


class _Every:
    """Calls `action` when called, at most once in `seconds`."""

    def __init__(self, seconds: float, action: Callable[[], None]) -> None:
        self._seconds, self._action = seconds, action
        self._last = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last >= self._seconds:
            self._action()
            self._last = time.monotonic()
