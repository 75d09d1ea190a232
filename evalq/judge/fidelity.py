"""How close two models' next-token distributions are, from stored per-token values.

Where only the top k log-probabilities are known, KL divergence is taken over the tokens both sides know and one bucket
for all others. Merging outcomes never raises a divergence (data-processing inequality), so the result is a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalq.errors import RecordError
from evalq.judge.paired import Floats, ratio
from evalq.judge.pairs import column
from evalq.records import Estimate

if TYPE_CHECKING:
    import pyarrow as pa

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
POSITION_EDGES = (1, 16, 64, 256, 1024)  # tokens of context
CONFIDENCE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.9)  # probability of the baseline's first choice
CHUNK = 16_384  # tokens; bounds the (tokens, k, k) comparison
KEYS = ("task", "doc_id", "position", "window_position", "token_id")
HIGHEST = 1e-3  # how far above 0 float32 may round a log-probability, or below 0 a divergence
FLOOR = 1e-6  # least probability of the tail bucket: float32 log-probabilities add up to 1 only so far


@dataclass(frozen=True)
class TokenPairs:
    """Scored tokens of two records, one to one; each array (tokens,)."""

    documents: NDArray[np.int64]
    context: NDArray[np.int64]  # tokens of context each was predicted from
    kld: Floats  # nats, baseline to candidate; a lower bound unless `exact`; NaN where not measured
    covered: Floats  # baseline probability of the tokens that have a cell of their own
    same_top1: Floats  # 1 where both rank the same token first
    change: Floats  # probability of the correct token, candidate minus baseline
    top1_probability: Floats  # of the baseline's first choice
    exact: bool  # over the whole vocabulary, perhaps for an even sample of the tokens
    reverse_kld: Floats | None = None  # nats, candidate to baseline; exact only
    entropy_change: Floats | None = None  # nats, candidate minus baseline; exact only

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Tokens whose divergence is known."""
        return ~np.isnan(self.kld)


@dataclass(frozen=True)
class Fidelity:
    """Estimates over all tokens and by bucket; `buckets`: "context 64-255 tokens" -> estimates."""

    tokens: int
    documents: int
    exact: bool
    mass_covered: float
    estimates: list[Estimate]
    buckets: dict[str, list[Estimate]]


def token_pairs(baseline: pa.Table, candidate: pa.Table, exact: bool = True) -> TokenPairs:
    """Match the rows of two tokens.parquet tables. Errors: RecordError when they are not the same tokens in order.

    exact=False: the candidate's exact columns compare with another baseline than this one and are not read.
    """
    keys = [(name, "ascending") for name in ("task", "doc_id", "position")]
    first, second = baseline.sort_by(keys), candidate.sort_by(keys)
    for name in ("task", "doc_id", "position", "token_id"):
        if not first.column(name).equals(second.column(name)):
            raise RecordError(f"tokens.parquet of the two records differ in {name}; both must score the same tokens")
    _refuse_rows(first)
    logprobs = [_floats(side, "logprob") for side in (first, second)]
    if max((side.max(initial=0.0) for side in logprobs), default=0.0) > HIGHEST:
        raise RecordError("tokens.parquet has a logprob above 0; no probability is above 1, so measure it anew")
    known = exact and second.column("exact_kld_nats").null_count < len(second)
    if known:
        kld, covered = _floats(second, "exact_kld_nats", sparse=True), np.ones(len(second))
        if (kld < -HIGHEST).any():
            raise RecordError("tokens.parquet has an exact_kld_nats below 0, which no divergence is; measure it anew")
    else:
        kld, covered = _partition_kld(first, second, logprobs)
    tops = [column(side, "top1_id", "tokens") for side in (first, second)]
    change = np.exp(logprobs[1]) - np.exp(logprobs[0])
    return TokenPairs(
        documents=np.asarray(first.column("doc_id").to_numpy(), np.int64),
        context=np.asarray(first.column("window_position").to_numpy(), np.int64),
        kld=kld,
        covered=covered,
        same_top1=(tops[0] == tops[1]).astype(np.float64),
        change=change,
        top1_probability=np.exp(_floats(first, "top1_logprob")),
        exact=known,
        reverse_kld=_optional(second, "exact_reverse_kld_nats", known),
        entropy_change=_difference(second, "entropy_nats", "base_entropy_nats", known),
    )


def _refuse_rows(table: pa.Table) -> None:
    """Errors: RecordError for tokens without a place, or with one that another token has too."""
    empty = [name for name in KEYS if table.column(name).null_count]
    if empty:
        raise RecordError(f"tokens.parquet has empty values in {empty[0]}; measure it anew")
    if len(table.group_by(["task", "doc_id", "position"]).aggregate([])) != len(table):
        raise RecordError("tokens.parquet has some tokens twice; measure it anew")


def _optional(table: pa.Table, name: str, known: bool) -> Floats | None:
    if not known or name not in table.schema.names or table.column(name).null_count == len(table):
        return None
    return _floats(table, name, sparse=True)


def _difference(table: pa.Table, own: str, base: str, known: bool) -> Floats | None:
    first, second = _optional(table, base, known), _optional(table, own, known)
    return None if first is None or second is None else second - first


def _floats(table: pa.Table, name: str, sparse: bool = False) -> Floats:
    """A column; sparse: NaN stands for a value that was not measured."""
    values = table.column(name)
    found = np.asarray(values.to_numpy(zero_copy_only=False), np.float64)
    present = np.asarray(values.is_valid().to_numpy(zero_copy_only=False), bool)
    if not (sparse or present.all()) or not np.isfinite(found[present]).all():
        raise RecordError(f"tokens.parquet has values of {name} that are empty or not finite; measure it anew")
    return found


def _partition_kld(first: pa.Table, second: pa.Table, logprobs: list[Floats]) -> tuple[Floats, Floats]:
    """KL over the cells that both sides know, and the baseline mass in them; (tokens,) both."""
    kld, covered = np.zeros(len(first)), np.zeros(len(first))
    for part in _chunks(len(first)):
        sides = [
            known_cells(table.slice(part.start, part.stop - part.start), lp[part])
            for table, lp in ((first, logprobs[0]), (second, logprobs[1]))
        ]
        kld[part], covered[part] = partition_kld(*sides[0], *sides[1])
    return kld, covered


def _chunks(n: int) -> Iterator[slice]:
    for start in range(0, n, CHUNK):
        yield slice(start, min(start + CHUNK, n))


def known_cells(table: pa.Table, logprob: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Known ids and log-probabilities: the correct token, then the top k (or the first); id -1 pads; (tokens, m)."""
    target = np.asarray(table.column("token_id").to_numpy(), np.int64)[:, None]
    ids, values = _top(table)
    ids = np.where(ids == target, -1, ids)  # the correct token has its cell already
    return np.hstack([target, ids]), np.hstack([logprob[:, None], values])


def _top(table: pa.Table) -> tuple[NDArray[np.int64], Floats]:
    """The top k as rectangles padded with id -1; the first choice alone where no top k was kept."""
    lists, logs = (table.column(name).combine_chunks() for name in ("topk_ids", "topk_logprobs"))
    if lists.null_count:
        ids = np.asarray(table.column("top1_id").to_numpy(zero_copy_only=False), np.int64)[:, None]
        return ids, _floats(table, "top1_logprob")[:, None]
    if not lists.value_lengths().equals(logs.value_lengths()):
        raise RecordError("topk_ids and topk_logprobs of a record are not of one length; measure it anew")
    lengths = np.asarray(lists.value_lengths().to_numpy(zero_copy_only=False), np.int64)
    width = int(lengths.max(initial=0))
    ids, values = np.full((len(lists), width), -1, np.int64), np.full((len(lists), width), -np.inf)
    inside = np.arange(width) < lengths[:, None]
    ids[inside] = lists.flatten().to_numpy(zero_copy_only=False)
    values[inside] = logs.flatten().to_numpy(zero_copy_only=False)
    if np.isnan(values).any():
        raise RecordError("topk_logprobs of a record are empty or not numbers; measure it anew")
    return ids, values


def partition_kld(
    p_ids: NDArray[np.int64], p_log: Floats, q_ids: NDArray[np.int64], q_log: Floats
) -> tuple[Floats, Floats]:
    """KL(p || q) over tokens listed on both sides and one tail bucket; also p's mass outside the tail; nats.

    ids and logs (tokens, m); an id of -1 is no token; no id twice in a row.
    """
    match = (p_ids[:, :, None] == q_ids[:, None, :]) & (p_ids[:, :, None] >= 0)  # (tokens, m, m)
    both = match.any(axis=2)
    q_at = np.take_along_axis(q_log, match.argmax(axis=2), axis=1)
    p = np.where(both, np.exp(p_log), 0.0)
    q = np.where(both, np.exp(q_at), 0.0)
    ratio_log = np.where(both, np.where(both, p_log, 0.0) - np.where(both, q_at, 0.0), 0.0)
    p_mass = p.sum(axis=1)
    p_tail, q_tail = np.maximum(1.0 - p_mass, FLOOR), np.maximum(1.0 - q.sum(axis=1), FLOOR)
    kld = (p * ratio_log).sum(axis=1) + p_tail * np.log(p_tail / q_tail)
    return np.maximum(kld, 0.0), np.minimum(p_mass, 1.0)


def fidelity(pairs: TokenPairs, confidence: float = 0.95) -> Fidelity:
    """Every figure with its interval, clustered by document. Errors: RecordError for fewer than two documents."""
    n_documents = len(np.unique(pairs.documents))
    if n_documents < 2:
        raise RecordError(f"fidelity over {n_documents} documents has no interval; score 2 or more")
    if len(np.unique(pairs.documents[pairs.measured])) < 2:
        raise RecordError("divergence is known for fewer than two documents; raise tasks.divergence_store_gib")
    everything = np.ones(len(pairs.kld), bool)
    buckets = {
        name: _means(pairs, mask, confidence)
        for name, mask in (*_context_buckets(pairs.context), *_confidence_buckets(pairs.top1_probability))
        if len(np.unique(pairs.documents[mask & pairs.measured])) >= 2
    }
    estimates = [*_means(pairs, everything, confidence), *_shape(pairs, confidence)]
    mass = float(pairs.covered.mean())
    return Fidelity(len(pairs.kld), n_documents, pairs.exact, mass, estimates, buckets)


def _means(pairs: TokenPairs, mask: NDArray[np.bool_], confidence: float) -> list[Estimate]:
    documents = pairs.documents[mask]
    return [
        *_divergences(pairs, mask, confidence),
        mean_estimate("same_top1", pairs.same_top1[mask], documents, confidence),
        mean_estimate("mean_correct_probability_change", pairs.change[mask], documents, confidence),
        _root(mean_estimate("rms_correct_probability_change", pairs.change[mask] ** 2, documents, confidence)),
    ]


def _divergences(pairs: TokenPairs, mask: NDArray[np.bool_], confidence: float) -> list[Estimate]:
    """Mean divergence both ways and mean change of entropy, over the tokens where they are known."""
    known = mask & pairs.measured
    note = _exactness(pairs)
    if not pairs.exact:
        note += f"; {pairs.covered[mask].mean():.4f} of the baseline's mass is covered"
    named = [
        ("mean_kld_nats", pairs.kld),
        ("mean_reverse_kld_nats", pairs.reverse_kld),
        ("mean_entropy_change_nats", pairs.entropy_change),
    ]
    for name, values in named:
        if values is not None and np.isnan(values[known]).any():
            raise RecordError(f"{name} is not known for every token whose divergence is; measure it anew")
    return [
        mean_estimate(name, values[known], pairs.documents[known], confidence, note)
        for name, values in named
        if values is not None
    ]


def _exactness(pairs: TokenPairs) -> str:
    if not pairs.exact:
        return "lower bound"
    known, total = int(pairs.measured.sum()), len(pairs.kld)
    return "exact" if known == total else f"exact, an even sample of {known:,} of {total:,} tokens"


def _shape(pairs: TokenPairs, confidence: float) -> list[Estimate]:
    """Quantiles and the maximum of the divergence, percentiles of the probability change."""
    note = _exactness(pairs)
    kld, documents = pairs.kld[pairs.measured], pairs.documents[pairs.measured]
    found = [quantile_estimate("kld_nats", kld, documents, q, confidence, note) for q in QUANTILES]
    top = float(kld.max())
    found.append(
        Estimate(
            "kld_nats_max",
            top,
            None,
            None,
            confidence,
            len(kld),
            "largest seen",
            note=f"{note}; a maximum has no interval",
        )
    )
    changes = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
    name = "correct_probability_change"
    return found + [quantile_estimate(name, pairs.change, pairs.documents, q, confidence) for q in changes]


def mean_estimate(name: str, values: Floats, documents: NDArray[Any], confidence: float, note: str = "") -> Estimate:
    """Mean over tokens, interval clustered by document."""
    found = ratio(values, np.ones(len(values)), documents)
    low, high = found.interval(confidence)
    return Estimate(name, found.value, low, high, confidence, len(values), found.method, note=note)


def _root(square: Estimate) -> Estimate:
    low, high = (float(np.sqrt(max(x or 0.0, 0.0))) for x in (square.low, square.high))
    value = float(np.sqrt(square.value or 0.0))
    return Estimate(
        square.name, value, low, high, square.confidence, square.n, f"root of the mean square; {square.method}"
    )


def quantile_estimate(
    name: str, values: Floats, documents: NDArray[Any], q: float, confidence: float, note: str = ""
) -> Estimate:
    """A quantile over tokens; interval by inverting the clustered interval of the share below it (Woodruff 1952)."""
    ordered = np.sort(values)
    point = float(np.quantile(ordered, q))
    below = ratio((values <= point).astype(np.float64), np.ones(len(values)), documents)
    levels = (q + bound - below.value for bound in below.interval(confidence))
    low, high = (float(np.quantile(ordered, min(max(level, 0.0), 1.0))) for level in levels)
    return Estimate(f"{name}_p{100 * q:g}", point, low, high, confidence, len(values), "quantile, Woodruff", note=note)


Named = tuple[str, NDArray[np.bool_]]


def _context_buckets(context: NDArray[np.int64]) -> list[Named]:
    return _buckets(context, POSITION_EDGES, lambda low, high: f"context {_span(low, high)} tokens")


def _span(low: float, high: float | None) -> str:
    return f"{low:g} and more" if high is None else f"{low:g}-{high - 1:g}"


def _confidence_buckets(probability: Floats) -> list[Named]:
    return _buckets(
        probability, CONFIDENCE_EDGES, lambda low, high: f"baseline confidence {low:g}-{1 if high is None else high:g}"
    )


def _buckets(values: NDArray[Any], edges: tuple[float, ...], name: Callable[[float, float | None], str]) -> list[Named]:
    ends = [*edges[1:], None]
    return [
        (name(low, high), (values >= low) & (values < (np.inf if high is None else high)))
        for low, high in zip(edges, ends, strict=True)
    ]
