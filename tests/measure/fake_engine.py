"""An engine whose log-probabilities follow from the token ids alone, and a word tokenizer with BOS and EOS."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evalq.measure.scores import ScoreRequest, ScoreResult

WORDS = 500


@functools.cache
def word_tokenizer(with_bos: bool = True) -> PreTrainedTokenizerFast:
    """Splits at whitespace and punctuation: <s>, </s>, <unk>, w0 .. w499, and the commonest English words."""
    common = [
        "the",
        "of",
        "and",
        "a",
        "to",
        "in",
        "is",
        "it",
        "that",
        "was",
        "for",
        "on",
        "are",
        "as",
        "with",
        "he",
        "she",
    ]
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(WORDS)), *common])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>"} if with_bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>", **special)


def logprob(ids: Sequence[int], position: int) -> float:
    """A log-probability of ids[position] after ids[:position]: any change of what precedes changes it."""
    digest = hashlib.sha256(np.asarray(ids[: position + 1], dtype=np.int64).tobytes()).digest()
    return -0.01 - 10.0 * int.from_bytes(digest[:6], "big") / 2.0**48


class FakeEngine:
    """Scores by `logprob`; remembers every batch."""

    def __init__(self, with_bos: bool = True) -> None:
        self.tokenizer = word_tokenizer(with_bos)
        self.batches: list[list[ScoreRequest]] = []
        self.shared: list[bool] = []
        self.prompts: list[list[int]] = []
        self.text = "w1 w2 w3"

    @property
    def sequences(self) -> list[ScoreRequest]:
        return [request for batch in self.batches for request in batch]

    def score(
        self,
        requests: Sequence[ScoreRequest],
        topk: int = 0,
        share: bool = False,
        progress: Any = None,
        reverse: bool = False,
        hidden: Any = None,
        saved: Any = None,
    ) -> list[ScoreResult]:
        self.batches.append(list(requests))
        self.shared.append(share)
        return [self._one(request, topk) for request in requests]

    def _one(self, request: ScoreRequest, topk: int) -> ScoreResult:
        assert 1 <= request.first < len(request.ids)
        positions = range(request.first, len(request.ids))
        values = np.asarray([logprob(request.ids, p) for p in positions], dtype=np.float32)
        top1 = np.asarray([request.ids[p] if logprob(request.ids, p) > -5 else 0 for p in positions], dtype=np.int32)
        top = np.tile(np.arange(topk, dtype=np.int32), (len(values), 1)) if topk else None
        return ScoreResult(values, top1, np.maximum(values, -1.0), top, None if top is None else top.astype(np.float32))

    def generate(
        self,
        prompts: Sequence[list[int]],
        length: int,
        stops: Sequence[str] = (),
        temperature: float = 0.0,
        progress: Any = None,
    ) -> tuple[list[Any], list[float]]:
        self.prompts.extend(prompts)
        outputs = [SimpleNamespace(outputs=[SimpleNamespace(text=self.text)]) for _ in prompts]
        return outputs, [0.1] * len(prompts)
