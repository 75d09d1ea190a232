"""Long context: whole windows of kv.long_tokens, scored at every position, for perplexity and divergence by position."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from evalq.config import KvConfig
from evalq.kvrecord import LongScore
from evalq.measure.engine import Engine, Progress
from evalq.measure.kv.decode import perplexity, token_rows
from evalq.measure.kv.documents import Document, ids_hash, long_windows
from evalq.measure.scores import ScoreRequest


def score_long(
    engine: Engine, documents: Sequence[Document], kv: KvConfig, progress: Progress | None = None
) -> tuple[LongScore, list[dict[str, Any]]]:
    """The score and its kv_tokens rows, one per token."""
    began = time.monotonic()
    length = kv.long_tokens or int(engine.settings()["max_model_len"] or 0) - 1
    windows = long_windows(engine.tokenizer, documents, length, kv.long_documents)
    results = engine.score([ScoreRequest(ids, 1) for ids in windows], kv.topk, False, progress)
    rows: list[dict[str, Any]] = []
    for number, (ids, result) in enumerate(zip(windows, results, strict=True)):
        rows.extend(token_rows("long", number, ids, 1, result))
    score = LongScore(
        documents=len(windows),
        left_out=kv.long_documents - len(windows),
        tokens_per_document=length,
        tokens=len(rows),
        token_perplexity=perplexity(rows),
        ids_hash=ids_hash(windows),
        seconds=round(time.monotonic() - began, 3),
    )
    return score, rows
