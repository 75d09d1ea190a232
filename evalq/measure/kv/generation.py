"""Short greedy continuations: where they leave the baseline's is the judge's business, whether they loop is found here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from evalq.config import KvConfig
from evalq.kvrecord import GenerationScore
from evalq.measure.engine import Engine
from evalq.measure.kv.documents import Document, ids_hash, window

LONGEST_PERIOD = 16  # tokens
LEAST_REPEATS = 3
LEAST_TOKENS = 16  # of the repetition


def loop_start(ids: Sequence[int]) -> int:
    """First token of the repetition in which a sequence ends; -1 when it ends in none.

    A repetition has a period of at most LONGEST_PERIOD tokens, comes at least LEAST_REPEATS times and is at least
    LEAST_TOKENS long.
    """
    best = len(ids)
    for period in range(1, min(LONGEST_PERIOD, len(ids) // 2) + 1):
        start = len(ids) - period
        while start > 0 and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        if len(ids) - start >= max(LEAST_REPEATS * period, LEAST_TOKENS):
            best = min(best, start)
    return best if best < len(ids) else -1


def score_generations(
    engine: Engine, documents: Sequence[Document], kv: KvConfig
) -> tuple[GenerationScore, list[dict[str, Any]]]:
    """The score and its generations rows."""
    began = time.monotonic()
    prompts = [window(engine.tokenizer, document, kv.generation_prompt_tokens) for document in documents]
    prompts = [ids for ids in prompts if len(ids) == kv.generation_prompt_tokens][: kv.generation_prompts]
    outputs = engine.greedy(prompts, kv.generation_tokens, ignore_eos=True)
    rows: list[dict[str, Any]] = [
        {"item_id": i, "ids_hash": ids_hash([prompt]), "token_ids": ids, "loop_from": loop_start(ids)}
        for i, (prompt, ids) in enumerate(zip(prompts, outputs, strict=True))
    ]
    score = GenerationScore(
        prompts=len(rows),
        tokens=kv.generation_tokens,
        loops=sum(row["loop_from"] >= 0 for row in rows),
        ids_hash=ids_hash(prompts),
        seconds=round(time.monotonic() - began, 3),
    )
    return score, rows
