"""Does scoring read the quantised KV cache at all? Asked of the running engine, by making what is in the cache absurd.

Schemes with static scales: every K and V scale is multiplied by 1e-3 and by 1e3 (E5M2, whose range is 128 times wider,
by 1e-7 and 1e7), so that what is written saturates or vanishes. Schemes without static scales: the cache is erased after
every step, and in the step itself nothing is written. Scores of the same tokens are compared on three paths: a document in one
step, in chunks, and its last tokens one per step. At the end all is as before, which is checked too.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evalq.errors import EvalqError, MeasurementError
from evalq.kvrecord import Sensitivity, is_quantised_kv
from evalq.measure.engine import Engine
from evalq.measure.kv.documents import embedded_documents, long_windows
from evalq.measure.scores import ScoreRequest
from evalq.records import Scalar, from_mapping, parse_json, to_json, write_text

VERSION = 2  # raise when the question is asked differently, so that kept answers are not used
DOCUMENTS, TOKENS, DECODE_TOKENS, CHUNKS = 2, 192, 8, 3
THRESHOLD_NATS = 0.01  # mean absolute change per token; absurd scales move tokens by whole nats
NOISE_FACTOR = 10.0
ONE_STEP, CHUNKED, DECODE = "one step", "chunks", "one token per step"
PATHS = (ONE_STEP, CHUNKED, DECODE)
FINGERPRINT_SETTINGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "block_size",
    "enforce_eager",
    "cudagraph_mode",
    "compilation_mode",
    "enable_prefix_caching",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "load_format",
    "scorer",
)


class CannotAskError(MeasurementError):
    """This engine cannot be asked; nothing was changed in it."""


def engine_fingerprint(settings: dict[str, Scalar], identity: dict[str, Scalar], backend: str, version: str) -> str:
    """sha256 of what the answer depends on: engine, device, backend, KV dtype, graphs, and the model's name."""
    kept = {name: settings.get(name) for name in FINGERPRINT_SETTINGS}
    about = {name: identity.get(name) for name in ("gpu", "model_id")}
    return hashlib.sha256(json.dumps([VERSION, kept, about, backend, version], sort_keys=True).encode()).hexdigest()


def kept_answer(store: Path, fingerprint: str) -> Sensitivity | None:
    """The stored answer for this engine; None when there is none that can be read."""
    file = _file(store, fingerprint)
    try:
        kept: Sensitivity = from_mapping(Sensitivity, parse_json(file.read_text(encoding="utf-8"), str(file)))
    except (OSError, EvalqError, UnicodeDecodeError):
        return None
    return kept if kept.fingerprint == fingerprint else None


def keep_answer(store: Path, answer: Sensitivity) -> None:
    """Write the answer where `kept_answer` looks for it."""
    write_text(_file(store, answer.fingerprint), to_json(answer) + "\n")


def _file(store: Path, fingerprint: str) -> Path:
    return store / f"sensitivity-{fingerprint[:24]}.json"


def factors(kv_dtype: str, per_step_scales: bool) -> list[float]:
    """What scales are multiplied by; empty = the scheme has no static scales that could be made absurd."""
    if per_step_scales or not kv_dtype.startswith("fp8") or not is_quantised_kv(kv_dtype):
        return []
    return [1e-7, 1e7] if "e5m2" in kv_dtype else [1e-3, 1e3]


def measure_sensitivity(engine: Engine, kv_dtype: str, identity: dict[str, str], tokens: int = TOKENS) -> Sensitivity:
    """Ask the running engine. identity: fingerprint, attention_backend, engine_version.

    Errors: CannotAskError; MeasurementError when the engine is not as before afterwards.
    """
    if engine.scorer != "hook":
        raise CannotAskError(
            "whether scores read the KV cache can only be asked with tasks.scorer=hook, and this engine refused it: "
            f"{engine.scorer_note or 'the scorer is prompt_logprobs'}",
            "engine",
        )
    refusal = next((answer for answer in engine.ask_workers("evalq_watch_steps") if answer), "")
    if refusal:
        raise CannotAskError(f"{refusal}, so that scheduling cannot be watched; use a vLLM from 0.26 to 0.32", "engine")
    asked = _Question(engine, kv_dtype, _windows(engine, tokens))
    return asked.answer(identity)


def _windows(engine: Engine, tokens: int) -> list[list[int]]:
    if engine.tokenizer is None:
        raise CannotAskError("random weights have no tokenizer; the KV cache's sensitivity was not asked for", "data")
    settings = engine.settings()
    longest = int(settings["max_model_len"] or 0) - 2
    length = min(tokens, longest, int(settings["max_num_batched_tokens"] or tokens))
    if length < 4 * DECODE_TOKENS:
        raise CannotAskError(
            f"an engine of {longest + 2} tokens and {settings['max_num_batched_tokens']} per step is too small to ask whether "
            f"scores read the KV cache; set engine.max_model_len and engine.max_num_batched_tokens to {4 * DECODE_TOKENS + 2} "
            "or more",
            "data",
        )
    return long_windows(engine.tokenizer, embedded_documents(), length, DOCUMENTS)


class _Question:
    """Passes over the same windows in different states of the cache."""

    def __init__(self, engine: Engine, kv_dtype: str, windows: Sequence[list[int]]) -> None:
        self.engine = engine
        self.kv_dtype = kv_dtype
        self.windows = windows
        self.length = len(windows[0])
        self.most: dict[str, int] = {}

    def answer(self, identity: dict[str, str]) -> Sensitivity:
        per_step = self.kv_dtype.endswith("_per_token_head")
        wanted = factors(self.kv_dtype, per_step)
        reached = self.engine.ask_workers("evalq_scale_kv", 1.0)
        scales = wanted if wanted and min(reached) > 0 else []
        before = {path: self._pass(path) for path in PATHS}
        moved: dict[str, float] = {}
        try:
            for factor in scales:
                self.engine.ask_workers("evalq_scale_kv", factor)
                for path in PATHS:
                    moved[f"{path}, scales x {factor:g}"] = _change(before[path], self._pass(path))
            if not scales:
                for path in PATHS:
                    moved[f"{path}, erased"] = _change(before[path], self._erased(path))
        finally:
            self.engine.ask_workers("evalq_scale_kv", 1.0)
            self.engine.reset_prefix_cache()
        noise = max(_change(before[path], self._pass(path)) for path in PATHS)
        self.engine.reset_prefix_cache()
        return self._conclude(identity, "scales" if scales else "erased cache", moved, noise)

    def _conclude(self, identity: dict[str, str], method: str, moved: dict[str, float], noise: float) -> Sensitivity:
        threshold = max(THRESHOLD_NATS, NOISE_FACTOR * noise)
        if noise > 1.0:
            raise MeasurementError(
                f"scores differ by {noise:.3g} nats per token after the KV scales were restored; "
                "nothing that this engine scores from here on can be trusted",
                "engine",
            )
        wanted = {ONE_STEP: self.length, CHUNKED: self.length // CHUNKS, DECODE: 1}
        wrong = [path for path in PATHS if self.most[path] != wanted[path]]
        if wrong:
            raise MeasurementError(
                f"the engine scheduled {self.most[wrong[0]]} tokens of a document per step where {wanted[wrong[0]]} were "
                "wanted, so nothing is known about what its scores read; use a vLLM from 0.26 to 0.32",
                "engine",
            )
        yes = {path: _most(moved, path) > threshold for path in PATHS}
        return Sensitivity(
            prefill="yes" if yes[ONE_STEP] else "only across chunks" if yes[CHUNKED] else "no",
            decode="yes" if yes[DECODE] else "no",
            method=method,
            kv_dtype=self.kv_dtype,
            attention_backend=identity["attention_backend"],
            engine_version=identity["engine_version"],
            tokens=len(self.windows) * (self.length - 1),
            moved_nats={name: round(value, 6) for name, value in moved.items()},
            noise_nats=round(noise, 9),
            threshold_nats=round(threshold, 9),
            tokens_per_step=dict(self.most),
            fingerprint=identity["fingerprint"],
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def _pass(self, path: str, between: Any = None) -> np.ndarray:
        """Log-probabilities of one pass over all windows; not finite ones stay so. (scored tokens,)"""
        self.engine.reset_prefix_cache()
        self.engine.ask_workers("evalq_take_steps")
        if path == ONE_STEP:  # one after the other, so that none is cut by the step's budget
            rows = [row for ids in self.windows for row in self._score([ScoreRequest(ids, 1)], self.length, between)]
        elif path == CHUNKED:
            size = self.length // CHUNKS
            rows = self._score([ScoreRequest(ids, size + 1) for ids in self.windows], size, between)
        else:
            first = self.length - DECODE_TOKENS
            heads = [ScoreRequest(ids[:first], first - 1) for ids in self.windows]
            self._score(heads, self.length, between)
            self.engine.ask_workers("evalq_take_steps")
            rows = self._score([ScoreRequest(ids, first + 1) for ids in self.windows], 1, between, share=True)
        steps = [step for answer in self.engine.ask_workers("evalq_take_steps") for step in answer]
        self.most[path] = max(self.most.get(path, 0), max((count for _, _, count in steps), default=0))
        return np.concatenate(rows)

    def _score(self, requests: list[ScoreRequest], size: int, between: Any, share: bool = False) -> list[np.ndarray]:
        results = self.engine.score_paced(requests, size, share_prefixes=share, between_steps=between)
        missing = sum(result is None for result in results)
        if missing:
            raise MeasurementError(f"the engine left {missing} of {len(requests)} sequences unscored", "engine")
        return [result.logprobs for result in results if result is not None]

    def _erased(self, path: str) -> np.ndarray:
        """A pass in which the cache holds zeros whenever a step begins, and gets nothing in a pass of one step."""
        engine = self.engine
        engine.ask_workers("evalq_erase_kv")
        if path != ONE_STEP:
            return self._pass(path, lambda: engine.ask_workers("evalq_erase_kv"))
        engine.ask_workers("evalq_block_kv_writes", True)
        try:
            return self._pass(path)
        finally:
            engine.ask_workers("evalq_block_kv_writes", False)


def _change(before: np.ndarray, after: np.ndarray) -> float:
    """Mean absolute change per token, nats; a value that is no number counts as a change of 100."""
    change = np.abs(after.astype(np.float64) - before.astype(np.float64))
    return float(np.mean(np.where(np.isfinite(change), np.minimum(change, 100.0), 100.0)))


def _most(moved: dict[str, float], path: str) -> float:
    return max((value for name, value in moved.items() if name.startswith(f"{path}, ")), default=0.0)
