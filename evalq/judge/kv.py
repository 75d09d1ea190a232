"""KV schemes judged where the quantised cache is read: blind scores refused, the decode path within the same budget.

Long context, needles and continuations advise: the policy's limit speaks of perplexity on the task's own windows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalq.errors import RecordError
from evalq.judge.fidelity import CHUNK, HIGHEST, known_cells, partition_kld
from evalq.judge.paired import Floats, as_increase, ratio
from evalq.judge.pairs import DocumentPairs, ItemPairs
from evalq.judge.perplexity import perplexity_check
from evalq.judge.policy import Policy
from evalq.judge.tasks import accuracy_difference, mcnemar
from evalq.kvrecord import CONTEXT_WORDS, is_quantised_kv
from evalq.records import Check, Estimate, Record, read_table

if TYPE_CHECKING:
    import pyarrow as pa

POSITION_EDGES = (1, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)  # tokens of context
LONG_CONTEXT = 2048  # tokens: from here on FP8 KV lost several times what it lost below 512 (reports/kv-h200)
DECODE_METRIC = "decode"
MAY_BE_EMPTY = ("topk_ids", "topk_logprobs", "answer")  # nobody asked for them, or the model said nothing


@dataclass(frozen=True)
class PathPairs:
    """Tokens that both records scored on one path, one to one; each array (tokens,)."""

    documents: NDArray[np.int64]
    context: NDArray[np.int64]  # tokens of context each was predicted from
    baseline_nll: Floats
    candidate_nll: Floats
    kld: Floats  # nats; a lower bound, from the top k of both sides
    same_top1: Floats

    def take(self, mask: NDArray[np.bool_]) -> PathPairs:
        return PathPairs(*(getattr(self, field.name)[mask] for field in dataclasses.fields(self)))


def blindness(candidate: Record) -> list[str]:
    """Why the scores of a KV scheme say nothing about it; empty for other schemes and for scores that read the cache."""
    applied = candidate.applied
    if applied is None or not is_quantised_kv(applied.kv_dtype_requested):
        return []
    report = candidate.kv
    found = report.sensitivity if report is not None else None
    name = candidate.cell.quant
    if found is None:
        why = "; ".join(report.notes) if report is not None and report.notes else "it was not asked"
        return [
            f"the record does not say whether the scores of the KV scheme {name} read the quantised cache ({why}); "
            "measure it anew"
        ]
    decode = report is not None and report.decode is not None
    if decode and found.decode != "yes":
        return [f"the decode-path scores of {name} do not react to absurd KV scales, so they do not read the cache"]
    if found.prefill == "yes" or decode:
        return []
    return [
        f"scored blind: with {found.attention_backend} prefill reads the quantised KV cache: {found.prefill}, so the scores "
        f"say nothing about {name}; add kv=decode, which scores the decode path (reads it: {found.decode})"
    ]


def pool_problem(baseline: Record, candidate: Record) -> list[str]:
    """A quantised KV cache that takes no less than the baseline's was not applied, whatever the engine calls it."""
    applied = candidate.applied
    if applied is None or not is_quantised_kv(applied.kv_dtype_requested):
        return []
    first, second = (record.ledger.kv_bytes_per_token if record.ledger else None for record in (baseline, candidate))
    if first is None or second is None or second < first:
        return []
    return [
        f"the scheme {candidate.cell.quant} was not applied: its KV cache takes {second} bytes per token and the baseline's {first}"
    ]


def reads_elsewhere(candidate: Record) -> bool:
    """Whether prefill cannot see the scheme and the decode path was scored for it."""
    report = candidate.kv
    return bool(report and report.sensitivity and report.decode and report.sensitivity.prefill != "yes")


def short_contexts(baseline: Record, candidate: Record, documents: DocumentPairs, task: str) -> list[str]:
    """What a verdict on a quantised KV cache does not cover: contexts longer than the longest that was scored, in tokens."""
    kept = [record.applied.kv_dtype_effective for record in (baseline, candidate) if record.applied is not None]
    if len(kept) != 2 or kept[0] == kept[1] or not is_quantised_kv(kept[1]):
        return []
    longest = int(min(documents.counts["tokens"].max(), candidate.tasks[task].window_tokens))
    if longest >= LONG_CONTEXT or (candidate.kv is not None and candidate.kv.long is not None):
        return []
    return [
        f"the KV cache is {kept[1].split()[0]} and the {CONTEXT_WORDS} has {longest:,} tokens; its loss grows with "
        f"the context, so score documents of {LONG_CONTEXT:,} tokens or more (data=local, data=hub) or add kv=study"
    ]


def kv_checks(
    baseline: tuple[Record, Path], candidate: tuple[Record, Path], words: DocumentPairs, policy: Policy
) -> list[Check]:
    """Checks of everything that both records measured about the KV cache.

    words: the documents of the perplexity task, for words (or bytes) per token. The decode path is required for a scheme that
    quantises the cache and advises for the others. Errors: RecordError for rows that do not match.
    """
    first, second = baseline[0].kv, candidate[0].kv
    checks = _one_sided(baseline[0], candidate[0])
    if first is None or second is None:
        return checks
    applied = candidate[0].applied
    required = applied is not None and is_quantised_kv(applied.kv_dtype_requested)
    if first.decode is not None and second.decode is not None:
        checks.append(_decode_check(path_pairs(baseline, candidate, "decode"), words, policy, required))
    if first.long is not None and second.long is not None:
        checks += _long_checks(path_pairs(baseline, candidate, "long"), policy)
    if first.needle is not None and second.needle is not None:
        checks.append(_needle_check(needle_pairs(baseline, candidate), policy))
    if first.generation is not None and second.generation is not None:
        checks.append(_generation_check(baseline, candidate, policy))
    return checks


def _one_sided(baseline: Record, candidate: Record) -> list[Check]:
    """A decode score on one side only is a measurement that is missing on the other."""
    sides = [("baseline", baseline), ("candidate", candidate)]
    have = [side for side, record in sides if record.kv is not None and record.kv.decode is not None]
    if len(have) != 1:
        return []
    reason = f"decode path: only the {have[0]} has it; measure both with kv=decode"
    return [Check(DECODE_METRIC, True, "INVALID", None, None, None, reason)]


def _decode_check(pairs: PathPairs, words: DocumentPairs, policy: Policy, required: bool) -> Check:
    """The policy's own check on the decode path, per word (byte, token) as the policy counts."""
    documents = as_documents(pairs, words)
    check = perplexity_check(documents, policy, None)
    kld = float(pairs.kld.mean())
    where = f"decode path ({len(pairs.kld)} tokens of {len(documents.d)} documents, KL {kld:.2g} nats or more): "
    return dataclasses.replace(
        check, metric=f"{DECODE_METRIC} {check.metric}", required=required, reason=where + check.reason
    )


def as_documents(pairs: PathPairs, words: DocumentPairs) -> DocumentPairs:
    """Sums by text, with words and bytes in the proportion of the whole document. Errors: RecordError."""
    missing = [doc_id for doc_id in pairs.documents.tolist() if doc_id not in words.row_of]
    if missing:
        raise RecordError(f"document {missing[0]} was scored on the decode path and not by the perplexity task")
    rows, index = np.unique([words.row_of[doc_id] for doc_id in pairs.documents.tolist()], return_inverse=True)
    tokens = np.bincount(index).astype(np.float64)
    whole = words.counts["tokens"][rows]
    counts = {unit: tokens * values[rows] / whole for unit, values in words.counts.items()}
    sums = [np.bincount(index, weights=side).astype(np.float64) for side in (pairs.baseline_nll, pairs.candidate_nll)]
    return DocumentPairs(sums[0], sums[1], counts, words.doc_ids[rows])


def path_pairs(baseline: tuple[Record, Path], candidate: tuple[Record, Path], path: str) -> PathPairs:
    """Match the rows of one path. Errors: RecordError when they are not the same tokens or not finite."""
    first, second = (_rows(side, "kv_tokens", path) for side in (baseline, candidate))
    for name in ("doc_id", "window_position", "token_id"):
        if not first.column(name).equals(second.column(name)):
            raise RecordError(
                f"kv_tokens.parquet of the two records differ in {name} of path {path}; measure both alike"
            )
    nll = [-_floats(table, "logprob", path) for table in (first, second)]
    return PathPairs(
        documents=_numbers(first, "doc_id"),
        context=_numbers(first, "window_position"),
        baseline_nll=nll[0],
        candidate_nll=nll[1],
        kld=_divergence(first, second, [-side for side in nll]),
        same_top1=(_numbers(first, "top1_id") == _numbers(second, "top1_id")).astype(np.float64),
    )


def _rows(side: tuple[Record, Path], name: str, path: str | None = None) -> pa.Table:
    import pyarrow.compute as pc

    record, folder = side
    table = read_table(folder, record, name)
    if table is None:
        raise RecordError(f"record {record.record_id} names no table {name}; measure it anew")
    empty = [column for column in table.schema.names if column not in MAY_BE_EMPTY and table.column(column).null_count]
    if empty:
        raise RecordError(f"{name} of record {record.record_id} has empty values in {empty[0]}; measure it anew")
    keys = ["item_id"] if path is None else ["doc_id", "window_position"]
    if path is not None:
        table = table.filter(pc.equal(table.column("path"), path))
    where = name if path is None else f"path {path} in {name}"
    if len(table) == 0:
        raise RecordError(f"record {record.record_id} has no rows of {where}; measure it anew")
    if len(table.group_by(keys).aggregate([])) != len(table):
        raise RecordError(f"record {record.record_id} has some rows of {where} twice; measure it anew")
    return table.sort_by([(key, "ascending") for key in keys])


def _numbers(table: pa.Table, name: str) -> NDArray[np.int64]:
    return np.asarray(table.column(name).to_numpy(zero_copy_only=False), np.int64)


def _floats(table: pa.Table, name: str, path: str) -> Floats:
    values = np.asarray(table.column(name).to_numpy(zero_copy_only=False), np.float64)
    if not np.isfinite(values).all():
        raise RecordError(f"{int((~np.isfinite(values)).sum())} values of {name} on the path {path} are not finite")
    if (values > HIGHEST).any():
        raise RecordError(f"{name} on the path {path} is up to {values.max():.3g}; no probability is above 1")
    return values


def _divergence(first: pa.Table, second: pa.Table, logprobs: list[Floats]) -> Floats:
    """KL(baseline || candidate) over what both know, a lower bound; (tokens,)."""
    kld = np.zeros(len(first))
    for start in range(0, len(first), CHUNK):
        part = slice(start, start + CHUNK)
        sides = [
            known_cells(table.slice(start, CHUNK), lp[part])
            for table, lp in zip((first, second), logprobs, strict=True)
        ]
        kld[part], _ = partition_kld(*sides[0], *sides[1])
    return kld


def _columns(table: pa.Table, *names: str) -> Any:
    return zip(*(table.column(name).to_pylist() for name in names), strict=True)


@dataclass(frozen=True)
class Bucket:
    """Figures of the tokens with `low` .. `high` - 1 tokens of context."""

    low: int
    high: int
    tokens: int
    baseline_perplexity: float
    increase: Estimate | None  # of token perplexity; None for fewer than two documents
    mean_kld: float  # nats, lower bound
    same_top1: float


def position_buckets(pairs: PathPairs, confidence: float, edges: tuple[int, ...] = POSITION_EDGES) -> list[Bucket]:
    """Perplexity and divergence by position, empty buckets left out."""
    buckets = []
    for low, high in zip(edges, (*edges[1:], 1 << 62), strict=True):
        mask = (pairs.context >= low) & (pairs.context < high)
        if mask.any():
            buckets.append(_bucket(pairs.take(mask), low, min(high, int(pairs.context.max()) + 1), confidence))
    return buckets


def _bucket(part: PathPairs, low: int, high: int, confidence: float) -> Bucket:
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(part.baseline_nll.mean()))
    return Bucket(
        low, high, len(part.kld), perplexity, increase_of(part, f"context_{low}", confidence),
        float(part.kld.mean()), float(part.same_top1.mean()),
    )  # fmt: skip


def increase_of(part: PathPairs, name: str, confidence: float) -> Estimate | None:
    """Relative increase of token perplexity with its interval, clustered by document; None where it cannot be had."""
    d = part.candidate_nll - part.baseline_nll
    try:
        found = ratio(d, np.ones(len(d)), part.documents)
    except ValueError:
        return None
    low, high = found.interval(confidence)
    estimate = as_increase(name, found.value, low, high, confidence, len(d), found.method)
    return None if None in (estimate.value, estimate.low, estimate.high) else estimate


def _long_checks(pairs: PathPairs, policy: Policy) -> list[Check]:
    """One advisory line per bucket of positions."""
    checks = []
    for bucket in position_buckets(pairs, policy.source.confidence):
        said = f"context {bucket.low}-{bucket.high - 1} tokens: token perplexity {_percent(bucket.increase)}"
        said += f", KL {bucket.mean_kld:.2g} nats or more, same first choice {bucket.same_top1:.2%}"
        checks.append(_advice(f"long context {bucket.low}", bucket.increase, policy, f"long {said}"))
    return checks


def _advice(metric: str, estimate: Estimate | None, policy: Policy, reason: str) -> Check:
    status = "INCONCLUSIVE"
    if estimate is not None and estimate.low is not None and estimate.high is not None:
        status = "PASS" if estimate.high <= policy.limit else "FAIL" if estimate.low > policy.limit else "INCONCLUSIVE"
    return Check(metric, False, status, estimate, policy.target, policy.limit, reason)


def _percent(estimate: Estimate | None) -> str:
    if estimate is None or estimate.value is None or estimate.low is None or estimate.high is None:
        return "without an interval"
    return f"{estimate.value:+.2%} [{estimate.low:+.2%}, {estimate.high:+.2%}]"


@dataclass(frozen=True)
class NeedlePairs:
    """The grid: item by item, with its cell."""

    length: NDArray[np.int64]
    depth: NDArray[np.int64]
    values: ItemPairs


def needle_pairs(baseline: tuple[Record, Path], candidate: tuple[Record, Path]) -> NeedlePairs:
    """Match the needles. Errors: RecordError when the prompts are not the same."""
    first, second = (_rows(side, "needles") for side in (baseline, candidate))
    for name in ("item_id", "ids_hash", "expected"):
        if not first.column(name).equals(second.column(name)):
            raise RecordError(f"needles.parquet of the two records differ in {name}; measure both alike")
    values = [np.asarray(table.column("value").to_pylist(), np.float64) for table in (first, second)]
    if not np.isin(np.concatenate(values), (0.0, 1.0)).all():
        raise RecordError("a needle was neither found (1) nor missed (0); measure both anew")
    return NeedlePairs(
        np.asarray(first.column("length").to_pylist(), np.int64),
        np.asarray(first.column("depth").to_pylist(), np.int64),
        ItemPairs(values[0], values[1], None),
    )


def _needle_check(pairs: NeedlePairs, policy: Policy) -> Check:
    """Exact-match accuracy, candidate minus baseline, with McNemar's exact test."""
    values, confidence = pairs.values, policy.source.confidence
    if len(values.baseline) < 2:
        return Check("needle", False, "INCONCLUSIVE", None, None, None, "needle: one item only")
    estimate, test = (
        accuracy_difference(values, "needle", "exact_match", confidence),
        mcnemar(values.baseline, values.candidate),
    )
    low, high = estimate.low or 0.0, estimate.high or 0.0
    status = "PASS" if low >= -policy.target else "FAIL" if high < -policy.target else "INCONCLUSIVE"
    reason = (
        f"needle retrieval {values.baseline.mean():.1%} to {values.candidate.mean():.1%} of {len(values.baseline)}: "
        f"{100 * (estimate.value or 0.0):+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]; {test.lost} lost, {test.won} won, "
        f"McNemar p={test.p_two_sided:.3g}"
    )
    return Check("needle", False, status, estimate, None, policy.target, reason)


@dataclass(frozen=True)
class Divergence:
    """Where continuations leave the baseline's."""

    first: NDArray[np.int64]  # first token that differs; the length where none does
    length: int
    baseline_loops: int
    candidate_loops: int

    @property
    def identical(self) -> float:
        return float(np.mean(self.first >= self.length))


def divergence(baseline: tuple[Record, Path], candidate: tuple[Record, Path]) -> Divergence:
    """Match the continuations. Errors: RecordError when the prompts are not the same."""
    first, second = (_rows(side, "generations") for side in (baseline, candidate))
    if not first.column("ids_hash").equals(second.column("ids_hash")):
        raise RecordError("generations.parquet of the two records have different prompts; measure both alike")
    pairs = list(zip(*(table.column("token_ids").to_pylist() for table in (first, second)), strict=True))
    at = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))) for a, b in pairs
    ]
    loops = [sum(value >= 0 for value in table.column("loop_from").to_pylist()) for table in (first, second)]
    return Divergence(np.asarray(at, np.int64), max((len(a) for a, _ in pairs), default=0), loops[0], loops[1])


def _generation_check(baseline: tuple[Record, Path], candidate: tuple[Record, Path], policy: Policy) -> Check:
    found = divergence(baseline, candidate)
    reason = (
        f"greedy continuations of {len(found.first)} prompts: first difference at token {np.median(found.first):g} (median), "
        f"{found.identical:.1%} identical after {found.length} tokens; loops {found.baseline_loops} to {found.candidate_loops}"
    )
    worse = found.candidate_loops > 2 * found.baseline_loops + 0.1 * len(found.first)
    return Check("generation", False, "FAIL" if worse else "PASS", None, None, None, reason)


def prefill_of(baseline: tuple[Record, Path], candidate: tuple[Record, Path], decode: PathPairs) -> PathPairs | None:
    """The prefill scores of exactly the decode path's tokens; None where a record kept no scores of single tokens.

    Divergence needs a top k that prefill may not have kept; it is 0 there. Errors: RecordError for a token that is missing.
    """
    sides = []
    for record, folder in (baseline, candidate):
        table = read_table(folder, record, "tokens")
        if table is None:
            return None
        found = {
            (doc_id, context): (nll, top)
            for doc_id, context, position, nll, top in _columns(
                table, "doc_id", "window_position", "position", "logprob", "top1_id"
            )
            if position == context - 1  # the first window of a document, which is the one that the decode path takes
        }
        keys = list(zip(decode.documents.tolist(), decode.context.tolist(), strict=True))
        if any(key not in found for key in keys):
            raise RecordError(f"tokens.parquet of record {record.record_id} lacks tokens that the decode path scored")
        sides.append([found[key] for key in keys])
    nll = [-np.asarray([value for value, _ in side], np.float64) for side in sides]
    same = np.asarray([float(a[1] == b[1]) for a, b in zip(*sides, strict=True)])
    return PathPairs(decode.documents, decode.context, nll[0], nll[1], np.zeros(len(same)), same)


def needle_grid(side: tuple[Record, Path]) -> dict[tuple[int, int], tuple[int, int]]:
    """(length, depth) -> (found, asked) of one record."""
    grid: dict[tuple[int, int], tuple[int, int]] = {}
    for length, depth, value in _columns(_rows(side, "needles"), "length", "depth", "value"):
        found, asked = grid.get((length, depth), (0, 0))
        grid[length, depth] = (found + int(value), asked + 1)
    return grid
