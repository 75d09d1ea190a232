"""The decode-path score: teacher-forced tokens, few per engine step, so that each reads the KV cache as serving does.

Each document's window is computed up to a point in the usual large steps and stays in the prefix cache; the tokens after that
point then come one per step (kv.decode_step_tokens), as prompt tokens, which the engine schedules exactly like decoded ones.
How many tokens each step really had is read from the engine, and rows from larger steps are left out.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evalq.config import KvConfig
from evalq.errors import MeasurementError
from evalq.kvrecord import DecodeScore
from evalq.measure.engine import Engine, Progress
from evalq.measure.kv.documents import Document, ids_hash, window
from evalq.measure.scores import ScoreRequest, ScoreResult

POOL_SHARE = 0.5  # of the KV pool that the documents of one batch may take, so that none is evicted while it waits


@dataclass(frozen=True)
class Segment:
    """Tokens `start` .. `start` + count - 1 of a window are computed in small steps and predict the ones after them."""

    doc_id: int
    ids: list[int]  # the window up to the last predicted token
    start: int


def plan_segments(
    windows: dict[int, list[int]], segments: int, tokens: int, block: int, seed: int
) -> list[list[Segment]]:
    """Rounds of segments, one of each document per round, from shallow to deep; starts are whole blocks.

    A document gets segment s in the s-th of `segments` equal parts of its window, at a place drawn by `seed`; parts too
    short for `tokens` tokens stay empty. Every later segment reads what an earlier one wrote, as decoding does.
    """
    rounds: list[list[Segment]] = [[] for _ in range(segments)]
    for doc_id, ids in windows.items():
        random = np.random.default_rng([seed, doc_id])
        edges = np.linspace(0, len(ids) - 1, segments + 1)
        for number, (low, high) in enumerate(itertools.pairwise(edges)):
            first = max(1, math.ceil(low / block))
            last = math.floor((high - tokens) / block)
            if first <= last:
                start = int(random.integers(first, last + 1)) * block
                rounds[number].append(Segment(doc_id, ids[: start + tokens + 1], start))
    return rounds


def score_decode(
    engine: Engine, documents: Sequence[Document], length: int, kv: KvConfig, progress: Progress | None = None
) -> tuple[DecodeScore, list[dict[str, Any]]]:
    """The score and its kv_tokens rows. Errors: MeasurementError where the engine's scorer is not the hook."""
    if engine.scorer != "hook":
        raise MeasurementError(
            f"the decode path can only be scored with tasks.scorer=hook, and here it is {engine.scorer}"
            f"{': ' + engine.scorer_note if engine.scorer_note else ''}; switch kv.decode off",
            "engine",
        )
    began = time.monotonic()
    engine.ask_workers("evalq_watch_steps")
    settings = engine.settings()
    block = int(settings["block_size"] or 16)
    pool = int(settings["num_blocks"] or 0) * block
    windows = _windows(engine, documents, length, kv.decode_documents)
    rounds = plan_segments(windows, kv.decode_segments, kv.decode_tokens, block, kv.seed)
    size = max(1, min(int(settings["max_num_seqs"] or 1), int(POOL_SHARE * pool // max(1, length))))
    names = list(windows)
    rows: list[dict[str, Any]] = []
    asked = sum(len(segments) for segments in rounds)
    done = 0
    for start in range(0, len(names), size):
        batch = set(names[start : start + size])
        engine.reset_prefix_cache()
        for segments in rounds:
            mine = [segment for segment in segments if segment.doc_id in batch]
            rows.extend(_score_round(engine, mine, kv))
            done += len(mine)
            if progress:
                progress(done, asked, "segments")
    engine.reset_prefix_cache()
    return _summary(rows, rounds, kv, time.monotonic() - began), rows


def _windows(engine: Engine, documents: Sequence[Document], length: int, count: int) -> dict[int, list[int]]:
    """Windows of up to `count` different documents, spread evenly over all of them."""
    distinct = list({document.text: document for document in documents}.values())
    step = max(1.0, len(distinct) / count)
    chosen = [distinct[int(i * step)] for i in range(min(count, len(distinct)))]
    return {document.doc_id: window(engine.tokenizer, document, length) for document in chosen}


def _score_round(engine: Engine, segments: list[Segment], kv: KvConfig) -> list[dict[str, Any]]:
    """One segment of each document: its head in large steps, then its tokens in small ones."""
    if not segments:
        return []
    engine.compute([segment.ids[: segment.start + 1] for segment in segments])
    engine.ask_workers("evalq_take_steps")
    requests = [ScoreRequest(segment.ids, segment.start + 1) for segment in segments]
    results = engine.score_paced(requests, kv.decode_step_tokens, kv.topk, share_prefixes=True)
    large = _large_steps(engine, kv.decode_step_tokens)
    rows: list[dict[str, Any]] = []
    for number, (segment, result) in enumerate(zip(segments, results, strict=True)):
        if result is not None:
            rows.extend(token_rows("decode", segment.doc_id, segment.ids, segment.start + 1, result, large.get(number)))
    return rows


def _large_steps(engine: Engine, most: int) -> dict[int, set[int]]:
    """Request number -> tokens that were computed in a step of more than `most` tokens of their document."""
    large: dict[int, set[int]] = {}
    steps = [step for answer in engine.ask_workers("evalq_take_steps")[:1] for step in answer]
    for owner, first, count in steps:
        if count > most:
            large.setdefault(owner, set()).update(range(first, first + count))
    return large


def token_rows(
    path: str, doc_id: int, ids: Sequence[int], first: int, result: ScoreResult, large: set[int] | None = None
) -> list[dict[str, Any]]:
    """kv_tokens rows of one scored sequence; positions whose last context token is in `large` are left out."""
    rows = []
    for i, position in enumerate(range(first, len(ids))):
        if large and position - 1 in large:
            continue
        rows.append(
            {
                "path": path,
                "doc_id": doc_id,
                "window_position": position,
                "token_id": int(ids[position]),
                "logprob": float(result.logprobs[i]),
                "top1_id": int(result.top1_ids[i]),
                "top1_logprob": float(result.top1_logprobs[i]),
                "topk_ids": None if result.topk_ids is None else result.topk_ids[i].tolist(),
                "topk_logprobs": None if result.topk_logprobs is None else result.topk_logprobs[i].tolist(),
            }
        )
    return rows


def _summary(rows: list[dict[str, Any]], rounds: list[list[Segment]], kv: KvConfig, seconds: float) -> DecodeScore:
    segments = [segment for part in rounds for segment in part]
    return DecodeScore(
        documents=len({row["doc_id"] for row in rows}),
        segments=len(segments),
        tokens=len(rows),
        left_out=kv.decode_documents * kv.decode_segments * kv.decode_tokens - len(rows),
        step_tokens=kv.decode_step_tokens,
        token_perplexity=perplexity(rows),
        ids_hash=ids_hash([[segment.doc_id, segment.start, *segment.ids] for segment in segments]),
        seconds=round(seconds, 3),
    )


def perplexity(rows: Sequence[dict[str, Any]]) -> float | None:
    """exp of the mean negative log-probability; None without rows or where it is no number."""
    if not rows:
        return None
    mean = -math.fsum(row["logprob"] for row in rows) / len(rows)
    return math.exp(mean) if math.isfinite(mean) and mean < 700 else None
