"""The engine: vLLM started once per cell, in this process, for scoring, generating and questions about what was loaded.

The only module that talks to vLLM's public interface; it works with vLLM 0.26 to 0.32. Differences between versions live in
`engine_arguments` and `_setting`.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evalq.config import RunConfig
from evalq.errors import MeasurementError, MissingExtraError
from evalq.measure.failures import classify

Progress = Callable[[int, int, str], None]  # done, total, unit
# Named, not imported: importing it imports vLLM, and vLLM reads its environment when imported.
PROBE_CLASS = "evalq.measure.probe.EngineProbe"
SCORER_VERSION = "1"
MARGIN_TOKENS = 64  # room of the engine's length above the longest window


@dataclass(frozen=True)
class ScoreRequest:
    """Token ids of one sequence; positions first .. len(ids) - 1 are scored (first >= 1)."""

    ids: list[int]
    first: int


@dataclass(frozen=True)
class ScoreResult:
    """Scores of one request, in order of position: (scored tokens,) arrays; top-k arrays are (scored tokens, k)."""

    logprobs: np.ndarray  # float32, nats
    top1_ids: np.ndarray  # int32
    top1_logprobs: np.ndarray  # float32
    topk_ids: np.ndarray | None
    topk_logprobs: np.ndarray | None


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
        fixed["VLLM_CPU_OMP_THREADS_BIND"] = config.gpu.cpu_threads or _own_cores()
    os.environ.update(fixed)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.update(config.engine.env)


def _own_cores() -> str:
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
        self.tokenizer = None if llm.llm_engine.vllm_config.model_config.skip_tokenizer_init else llm.get_tokenizer()
        self.steps = 0
        self._counter = 0

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
        return cls(llm, scorer, note, started)

    def score(
        self,
        requests: Sequence[ScoreRequest],
        topk: int = 0,
        share_prefixes: bool = False,
        progress: Progress | None = None,
        reverse: bool = False,
    ) -> list[ScoreResult]:
        """Score all requests together, in the engine's own batches. Results in the order of `requests`.

        share_prefixes lets requests read each other's common prefix from the cache (only with prefix caching on); reverse
        feeds the requests from the last to the first, which must not matter.
        """
        if reverse:
            return self.score(requests[::-1], topk, share_prefixes, progress)[::-1]
        if self.scorer == "prompt_logprobs":
            return self._score_by_prompt_logprobs(requests, topk, progress)
        results = self._score_by_hook(requests, topk, share_prefixes, progress)
        # A cached prefix that reaches into the scored part leaves rows uncomputed: score those requests on their own.
        again = [i for i, result in enumerate(results) if result is None]
        if again:
            alone = self._score_by_hook([requests[i] for i in again], topk, False, None)
            for i, result in zip(again, alone, strict=True):
                results[i] = result
        complete = [result for result in results if result is not None]
        if len(complete) != len(requests):
            raise MeasurementError(
                f"the engine returned scores for {len(complete)} of {len(requests)} sequences; "
                "run again with tasks.scorer=prompt_logprobs",
                "engine",
            )
        return complete

    def _score_by_hook(
        self, requests: Sequence[ScoreRequest], topk: int, share: bool, progress: Progress | None
    ) -> list[ScoreResult | None]:
        self._llm.collective_rpc("evalq_take_scores", args=(topk,))
        params = [
            self._params(extra_args={"evalq": [i, request.first]}, skip_reading_prefix_cache=not share)
            for i, request in enumerate(requests)
        ]
        self._run([request.ids for request in requests], params, progress)
        answers = [a for a in self._llm.collective_rpc("evalq_take_scores", args=(0,)) if a]
        if not answers:
            return [None] * len(requests)
        return _split_scores(answers[0], requests)

    def _score_by_prompt_logprobs(
        self, requests: Sequence[ScoreRequest], topk: int, progress: Progress | None
    ) -> list[ScoreResult]:
        params = [self._params(prompt_logprobs=max(1, topk)) for _ in requests]
        outputs = self._run([request.ids for request in requests], params, progress)
        return [
            _read_prompt_logprobs(output.prompt_logprobs, request, topk)
            for output, request in zip(outputs, requests, strict=True)
        ]

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

        return SamplingParams(**{"max_tokens": 1, "temperature": 0.0, "detokenize": False, **settings})

    def _run(
        self,
        prompts: list[list[int]],
        params: list[Any],
        progress: Progress | None,
        finished_seconds: list[float] | None = None,
    ) -> list[Any]:
        """Feed all prompts and step the engine until every one is finished; outputs in the order of prompts."""
        core = self._llm.llm_engine
        order: dict[str, int] = {}
        began = time.monotonic()
        try:
            for i, (ids, one) in enumerate(zip(prompts, params, strict=True)):
                self._counter += 1
                name = f"evalq-{self._counter}"
                core.add_request(name, {"prompt_token_ids": ids}, one)
                order[name] = i
            outputs: list[Any] = [None] * len(prompts)
            seconds = [0.0] * len(prompts)
            done = 0
            while core.has_unfinished_requests():
                for output in core.step():
                    if output.finished:
                        index = order[output.request_id]
                        outputs[index], seconds[index] = output, time.monotonic() - began
                        done += 1
                self.steps += 1
                if progress:
                    progress(done, len(prompts), "sequences")
        except Exception as error:
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
        cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
        parallel = config.parallel_config
        return {
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": _text(model.quantization),
            "max_model_len": int(model.max_model_len),
            "enforce_eager": bool(model.enforce_eager),
            "seed": int(model.seed),
            "kv_cache_dtype": str(cache.cache_dtype),
            "block_size": int(cache.block_size),
            "enable_prefix_caching": bool(cache.enable_prefix_caching),
            "num_blocks": int(cache.num_gpu_blocks or 0),
            "max_num_seqs": int(scheduler.max_num_seqs),
            "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
            "enable_chunked_prefill": bool(_setting(scheduler, "enable_chunked_prefill", "chunked_prefill_enabled")),
            "tensor_parallel_size": int(parallel.tensor_parallel_size),
            "pipeline_parallel_size": int(parallel.pipeline_parallel_size),
            "compilation_mode": _text(_setting(config.compilation_config, "mode", "level")),
            "cudagraph_mode": _text(getattr(config.compilation_config, "cudagraph_mode", None)),
            "load_format": _text(config.load_config.load_format),
            "scorer": self.scorer,
            "scorer_version": SCORER_VERSION,
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
        gc.collect()


def _split_scores(arrays: dict[str, np.ndarray], requests: Sequence[ScoreRequest]) -> list[ScoreResult | None]:
    """Sort rows into requests; None where a request lacks rows."""
    order = np.lexsort((arrays["position"], arrays["owner"]))
    owners = arrays["owner"][order]
    starts = np.searchsorted(owners, np.arange(len(requests)), side="left")
    stops = np.searchsorted(owners, np.arange(len(requests)), side="right")
    results: list[ScoreResult | None] = []
    for request, start, stop in zip(requests, starts, stops, strict=True):
        rows = order[start:stop]
        wanted = np.arange(request.first, len(request.ids))
        # A preempted request is computed twice: keep the last row of each position.
        positions = arrays["position"][rows]
        if len(rows) > len(wanted):
            keep = np.append(positions[1:] != positions[:-1], True)
            rows, positions = rows[keep], positions[keep]
        if not np.array_equal(positions, wanted):
            results.append(None)
            continue
        results.append(
            ScoreResult(
                arrays["logprob"][rows],
                arrays["top1_id"][rows],
                arrays["top1_logprob"][rows],
                arrays["topk_id"][rows] if "topk_id" in arrays else None,
                arrays["topk_logprob"][rows] if "topk_logprob" in arrays else None,
            )
        )
    return results


def _read_prompt_logprobs(entries: Any, request: ScoreRequest, topk: int) -> ScoreResult:
    """The engine's public per-token objects as arrays."""
    logprobs, top_ids, top_logprobs = [], [], []
    for position in range(request.first, len(request.ids)):
        entry = entries[position]
        logprobs.append(entry[request.ids[position]].logprob)
        ranked = sorted(entry.items(), key=lambda pair: pair[1].rank)[: max(1, topk)]
        top_ids.append([token for token, _ in ranked])
        top_logprobs.append([value.logprob for _, value in ranked])
    ids = np.asarray(top_ids, dtype=np.int32).reshape(len(logprobs), max(1, topk))
    values = np.asarray(top_logprobs, dtype=np.float32).reshape(len(logprobs), max(1, topk))
    return ScoreResult(
        np.asarray(logprobs, dtype=np.float32),
        ids[:, 0],
        values[:, 0],
        ids if topk else None,
        values if topk else None,
    )


def _setting(owner: Any, *names: str) -> Any:
    """The first of `names` that `owner` has: settings are renamed between versions."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    return None


def _text(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "name", value))
