"""The question whether scores read the cache, asked of engines of a few lines that read it in different ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalq.errors import MeasurementError
from evalq.measure.kv import sensitivity
from evalq.measure.kv.sensitivity import (
    CannotAskError,
    engine_fingerprint,
    factors,
    keep_answer,
    kept_answer,
    measure_sensitivity,
)
from evalq.measure.scores import ScoreRequest, ScoreResult

IDENTITY = {"attention_backend": "CPU_ATTN", "engine_version": "0.32", "fingerprint": "f" * 64}


class Tokenizer:
    bos_token_id = 1
    eos_token_id = 2

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [3 + ord(letter) % 40 for letter in text]


@dataclasses.dataclass
class Engine:
    """Scores react to damage as `reads` says: from the cache within a step, from earlier steps, or not at all."""

    reads: str = "all"  # all | earlier steps | nothing
    layers: int = 2
    scorer: str = "hook"
    scorer_note: str = ""
    restores: bool = True
    paces: bool = True
    factor: float = 1.0
    erased: bool = False
    blocked: bool = False
    steps: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    cached: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    length: int = 2048

    @property
    def tokenizer(self) -> Any:
        return Tokenizer()

    def settings(self) -> dict[str, Any]:
        return {"max_model_len": self.length, "max_num_batched_tokens": 4096}

    def reset_prefix_cache(self) -> None:
        self.cached.clear()

    def ask_workers(self, method: str, *arguments: Any) -> list[Any]:
        if method == "evalq_scale_kv":
            self.factor = arguments[0] if self.restores or arguments[0] != 1.0 else self.factor
            return [self.layers]
        if method == "evalq_erase_kv":
            self.erased = True
            return [1]
        if method == "evalq_block_kv_writes":
            self.blocked = arguments[0]
            self.erased = self.erased and arguments[0]
            return [self.layers]
        if method == "evalq_take_steps":
            taken, self.steps = self.steps, []
            return [taken]
        return [""]

    def score_paced(
        self,
        requests: list[ScoreRequest],
        step_tokens: int,
        topk: int = 0,
        share_prefixes: bool = False,
        between_steps: Callable[[], None] | None = None,
    ) -> list[ScoreResult | None]:
        results: list[ScoreResult | None] = []
        size = step_tokens if self.paces else 10**6
        for owner, request in enumerate(requests):
            start = max(
                (len(ids) for ids in self.cached if share_prefixes and tuple(request.ids[: len(ids)]) == ids), default=0
            )
            logprobs = []
            for first in range(start, len(request.ids), size):
                count = min(size, len(request.ids) - first)
                self.steps.append((owner, first, count))
                for position in range(first + 1, min(first + count + 1, len(request.ids))):
                    if position >= request.first:
                        logprobs.append(-3.0 - 0.01 * (position % 7) - self._damage(first, bool(between_steps)))
            self.cached.add(tuple(request.ids))
            values = np.asarray(logprobs, np.float32)
            results.append(ScoreResult(values, values.astype(np.int32), values, None, None))
        return results

    def _damage(self, computed: int, erasing: bool) -> float:
        harmed = self.factor != 1.0 or self.blocked or erasing
        visible = self.reads == "all" or (self.reads == "earlier steps" and computed > 0)
        return 2.0 if harmed and visible else 0.0


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "bfloat16"])
@pytest.mark.parametrize(
    ("reads", "prefill", "decode"),
    [("all", "yes", "yes"), ("earlier steps", "only across chunks", "yes"), ("nothing", "no", "no")],
)
def test_answers(dtype: str, reads: str, prefill: str, decode: str) -> None:
    """a5."""
    engine: Any = Engine(reads)
    found = measure_sensitivity(engine, dtype, IDENTITY)
    assert (found.prefill, found.decode) == (prefill, decode)
    assert found.method == ("scales" if dtype.startswith("fp8") else "erased cache")
    assert found.noise_nats == 0.0
    assert found.tokens_per_step == {"one step": 192, "chunks": 64, "one token per step": 1}
    assert engine.factor == 1.0
    assert not engine.blocked
    assert not engine.cached, "what was cached of a harmed pass must be forgotten"


def test_factors_are_beyond_the_formats_range() -> None:
    """E4M3: 448 down to 2^-9; E5M2: 57,344 down to 2^-16. A key of 1 must saturate, or fall below the least that is kept."""
    for dtype, largest, smallest in (("fp8_e4m3", 448.0, 2.0**-9), ("fp8_e5m2", 57344.0, 2.0**-16)):
        low, high = factors(dtype, False)
        assert 1.0 / low > largest
        assert 1.0 / high < smallest
    assert factors("fp8_per_token_head", True) == factors("bfloat16", False) == factors("nvfp4", False) == []


def test_scheme_without_layers_that_have_scales_is_asked_by_erasing() -> None:
    engine: Any = Engine(layers=0)
    assert measure_sensitivity(engine, "fp8_e4m3", IDENTITY).method == "erased cache"


def test_an_engine_that_is_not_as_before_is_an_error() -> None:
    engine: Any = Engine(restores=False)
    with pytest.raises(MeasurementError, match="after the KV scales were restored"):
        measure_sensitivity(engine, "fp8_e4m3", IDENTITY)


def test_a_scheduler_that_ignores_the_pace_gives_no_answer() -> None:
    engine: Any = Engine(paces=False)
    with pytest.raises(MeasurementError, match="192 tokens of a document per step where 64 were wanted"):
        measure_sensitivity(engine, "fp8_e4m3", IDENTITY)


@pytest.mark.parametrize("broken", [Engine(scorer="prompt_logprobs", scorer_note="no hook"), Engine(length=32)])
def test_engines_that_cannot_be_asked(broken: Any) -> None:
    with pytest.raises(CannotAskError):
        measure_sensitivity(broken, "fp8_e4m3", IDENTITY)


def test_short_engines_are_asked_with_shorter_texts() -> None:
    engine: Any = Engine(length=160)
    assert measure_sensitivity(engine, "fp8_e4m3", IDENTITY).tokens == 2 * 157


def test_answer_is_kept_per_engine(tmp_path: Path) -> None:
    engine: Any = Engine()
    settings: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "enforce_eager": True, "num_blocks": 7}
    prints = [
        engine_fingerprint(settings, {"gpu": "h200", "model_id": "m"}, "FLASH_ATTN", "0.32"),
        engine_fingerprint(
            {**settings, "enforce_eager": False}, {"gpu": "h200", "model_id": "m"}, "FLASH_ATTN", "0.32"
        ),
        engine_fingerprint(settings, {"gpu": "h200", "model_id": "m"}, "TRITON_ATTN", "0.32"),
        engine_fingerprint(settings, {"gpu": "h200", "model_id": "m"}, "FLASH_ATTN", "0.33"),
    ]
    assert len(set(prints)) == 4
    assert prints[0] == engine_fingerprint(
        {**settings, "num_blocks": 8}, {"gpu": "h200", "model_id": "m"}, "FLASH_ATTN", "0.32"
    )
    found = measure_sensitivity(engine, "fp8_e4m3", {**IDENTITY, "fingerprint": prints[0]})
    assert kept_answer(tmp_path, prints[0]) is None
    keep_answer(tmp_path, found)
    assert kept_answer(tmp_path, prints[0]) == found
    assert kept_answer(tmp_path, prints[1]) is None
    next(tmp_path.glob("*.json")).write_text("{}", encoding="utf-8")
    assert kept_answer(tmp_path, prints[0]) is None


def test_values_that_are_no_numbers_count_as_moved() -> None:
    before = np.zeros(4)
    assert sensitivity._change(before, np.asarray([np.nan, 0.0, np.inf, -500.0])) == pytest.approx(75.0)
