"""Scores of sequences as arrays: what is asked for, what comes back, and sorting rows that arrive in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evalq.measure.hidden import Layout
from evalq.measure.saved import SavedScores

Arrays = dict[str, np.ndarray]


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
    topk_ids: np.ndarray | None = None
    topk_logprobs: np.ndarray | None = None
    divergence: Divergences | None = None


@dataclass(frozen=True)
class Divergences:
    """Exact divergence from the baseline, (scored tokens,) float32 nats; NaN where the baseline's state was not kept."""

    kld: np.ndarray  # KL(baseline || this model)
    reverse_kld: np.ndarray
    base_entropy: np.ndarray
    entropy: np.ndarray


@dataclass(frozen=True)
class HiddenUse:
    """What the scorer does with hidden states: keep them in `folder`, or compare with those kept there."""

    folder: Path
    layout: Layout
    compare: bool


@dataclass(frozen=True)
class Call:
    """What one scoring call carries beside its requests; keys are empty when neither hidden nor saved is given."""

    topk: int
    keys: list[str]
    hidden: HiddenUse | None
    saved: SavedScores | None

    def place(self, index: int) -> list[int]:
        """Where the hidden states of request `index` lie in the store, for the scorer; empty when there is no store."""
        if self.hidden is None:
            return []
        kept = self.hidden.layout.sequences.get(self.keys[index])
        return [kept.offset, kept.count, kept.phase] if kept is not None and kept.count else []

    def of(self, wanted: Sequence[int]) -> Call:
        """The call for some of its requests, in that order."""
        return Call(self.topk, [self.keys[i] for i in wanted] if self.keys else [], self.hidden, self.saved)


@dataclass(frozen=True)
class Portion:
    """Requests, by number, that are scored together, with no other request in the engine."""

    numbers: list[int]
    waves: list[int] | None  # of each: it reads from the cache what its own wave left there; None = nothing is read


def portions(requests: Sequence[ScoreRequest], most_tokens: int, block: int | None) -> list[Portion]:
    """All requests, each in one portion of at most `most_tokens` tokens (or of one longer request).

    Depends on the requests alone, never on time, so that the engine's batches are the same in every run. block: tokens of a
    block of the prefix cache; None = nothing is shared. Of a request that shares, only the tokens behind the beginning that it
    has in common with the one before it in its wave count.
    """
    groups = [list(range(len(requests)))] if block is None else waves(requests, block)
    found: list[Portion] = []
    tokens = most_tokens  # full: the first request begins a portion
    for wave, numbers in enumerate(groups):
        before: list[int] = []
        for number in numbers:
            ids = requests[number].ids
            length = len(ids) - (common(before, ids) if block is not None else 0)
            if tokens + length > most_tokens:
                found.append(Portion([], None if block is None else []))
                tokens, length = 0, len(ids)
            found[-1].numbers.append(number)
            if (of_portion := found[-1].waves) is not None:
                of_portion.append(wave)
            tokens, before = tokens + length, ids
    return found


def common(first: list[int], second: list[int]) -> int:
    """How many ids two sequences begin with alike."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def waves(requests: Sequence[ScoreRequest], block: int) -> list[list[int]]:
    """Requests in waves, so that with a prefix cache of blocks of `block` tokens no request finds a block of its scored part.

    What a request finds in the cache is not computed again, so it has no row there: two endings that begin alike up to the end of a
    block go into different waves, and no wave reads what another left. Beginnings that end before the scored part are shared within
    a wave. (A request whose scored part begins later may still leave a block that another looks for: then its rows are missing, and
    Engine.score computes it again without the cache.)
    """
    found: list[list[int]] = [[]]
    seen: dict[tuple[int, ...], int] = {}
    for i, request in enumerate(requests):
        end = -(-request.first // block) * block  # where the first block ends that holds a scored token
        number = 0
        key = tuple(request.ids[:end])
        if end < len(request.ids):
            number = seen.get(key, 0)
            seen[key] = number + 1
        elif end == len(request.ids):
            # Its last token is always computed; but it fills the block, which nobody may read then.
            seen[key] = max(1, seen.get(key, 0))
        if number == len(found):
            found.append([])
        found[number].append(i)
    return found


NO_ROWS: Arrays = {
    "logprob": np.zeros(0, np.float32),
    "top1_id": np.zeros(0, np.int32),
    "top1_logprob": np.zeros(0, np.float32),
}


class Rows:
    """Scored rows as they come, in any order, until their requests are complete."""

    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = []

    def add(self, arrays: dict[str, np.ndarray]) -> None:
        if arrays:
            self._parts.append(arrays)

    def split(self, requests: Sequence[ScoreRequest], wanted: Sequence[int]) -> dict[int, ScoreResult | None]:
        """Results of the wanted requests by number; None where rows are missing."""
        if not self._parts or not wanted:
            return {i: from_arrays(NO_ROWS) if requests[i].first == len(requests[i].ids) else None for i in wanted}
        if len(self._parts) > 1:
            self._parts = [{name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}]
        return split_scores(self._parts[0], requests, wanted)


def split_scores(
    arrays: dict[str, np.ndarray], requests: Sequence[ScoreRequest], wanted: Sequence[int]
) -> dict[int, ScoreResult | None]:
    """Sort rows into requests; None where a request lacks rows."""
    order = np.lexsort((arrays["position"], arrays["owner"]))
    arrays = {name: values[order] for name, values in arrays.items()}
    starts = np.searchsorted(arrays["owner"], wanted, side="left").tolist()
    stops = np.searchsorted(arrays["owner"], wanted, side="right").tolist()
    positions = arrays["position"]
    results: dict[int, ScoreResult | None] = {}
    for number, start, stop in zip(wanted, starts, stops, strict=True):
        first, last = requests[number].first, len(requests[number].ids)
        if stop - start == last - first and _runs(positions, start, stop, first, last):
            results[number] = from_arrays({name: values[start:stop] for name, values in arrays.items()})
            continue
        # A preempted request is computed twice: keep the last row of each position.
        mine = positions[start:stop]
        rows = np.arange(start, stop)[np.append(mine[1:] != mine[:-1], True)] if stop > start else np.zeros(0, int)
        complete = np.array_equal(positions[rows], np.arange(first, last))
        results[number] = from_arrays({name: values[rows] for name, values in arrays.items()}) if complete else None
    return results


def _runs(positions: np.ndarray, start: int, stop: int, first: int, last: int) -> bool:
    """Whether sorted positions[start:stop] are first .. last - 1, each once."""
    if stop == start:
        return True
    if positions[start] != first or positions[stop - 1] != last - 1:
        return False
    return stop - start < 3 or bool((np.diff(positions[start:stop]) == 1).all())


_DIVERGENCE = ("kld", "reverse_kld", "base_entropy", "entropy")


def from_arrays(rows: dict[str, np.ndarray] | None) -> ScoreResult | None:
    if rows is None:
        return None
    divergence = Divergences(*(rows[name] for name in _DIVERGENCE)) if "kld" in rows else None
    return ScoreResult(
        rows["logprob"],
        rows["top1_id"],
        rows["top1_logprob"],
        rows.get("topk_id"),
        rows.get("topk_logprob"),
        divergence,
    )


def to_arrays(result: ScoreResult) -> dict[str, np.ndarray]:
    rows = {"logprob": result.logprobs, "top1_id": result.top1_ids, "top1_logprob": result.top1_logprobs}
    if result.topk_ids is not None and result.topk_logprobs is not None:
        rows |= {"topk_id": result.topk_ids, "topk_logprob": result.topk_logprobs}
    if result.divergence is not None:
        rows |= {name: getattr(result.divergence, name) for name in _DIVERGENCE}
    return rows


def read_prompt_logprobs(entries: Any, request: ScoreRequest, topk: int) -> ScoreResult:
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
