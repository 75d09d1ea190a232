"""What a report is written from: records and verdicts as they are, and what was computed of their pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from evalq.kvrecord import KvReport
from evalq.records import Estimate, Ledger, Record, Verdict
from evalq.report.tradeoff import Placed, Workload

WORKLOAD = Workload()  # what memory is asked for: requests at once, tokens each
KV_TOKENS = WORKLOAD.context * WORKLOAD.concurrency  # at which weights and KV are added up


def total_bytes(ledger: Ledger | None) -> int | None:
    """Weights and the KV cache of KV_TOKENS tokens; None when either was not measured."""
    if ledger is None or ledger.weight_bytes is None or ledger.kv_bytes_per_token is None:
        return None
    return ledger.weight_bytes + KV_TOKENS * ledger.kv_bytes_per_token


@dataclass(frozen=True)
class DocumentChange:
    """One perplexity document; the difference is candidate minus baseline, in nats per token."""

    doc_id: int
    tokens: int
    difference_nats: float
    beginning: str


@dataclass(frozen=True)
class ItemChange:
    """One item that changed sides, or whose share changed most. Leads are in nats: the chosen answer's over the other's."""

    task: str
    metric: str
    item_id: int
    prompt: str
    gold: str
    baseline_answer: str
    candidate_answer: str
    baseline_value: float
    candidate_value: float
    baseline_lead_nats: float | None = None
    candidate_lead_nats: float | None = None

    @property
    def lost(self) -> bool:
        return self.candidate_value < self.baseline_value


@dataclass(frozen=True)
class TokenChange:
    """One scored token; probabilities of the correct token, and what each model ranked first."""

    task: str
    doc_id: int
    position: int
    before: str
    token: str
    baseline_probability: float
    candidate_probability: float
    baseline_first: str
    candidate_first: str
    kld_nats: float


@dataclass(frozen=True)
class Causes:
    """From red to cause: what changed most between two records. `missing`: what could not be looked at, and why."""

    documents: list[DocumentChange] = field(default_factory=list)  # all of them, worst first
    items: list[ItemChange] = field(default_factory=list)  # worst first
    flips: dict[str, tuple[int, int]] = field(default_factory=dict)  # "task metric" -> (right to wrong, wrong to right)
    tokens: list[TokenChange] = field(default_factory=list)  # largest divergence first
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PathBucket:
    """Tokens with `low` to `high` tokens of context, on a path that reads the KV cache."""

    low: int
    high: int
    tokens: int
    increase: Estimate | None  # of token perplexity, a share
    mean_kld: float  # nats, a lower bound
    same_top1: float


@dataclass(frozen=True)
class CacheView:
    """What was found out about a KV cache. Needles: (length, depth in percent) -> (found, asked)."""

    report: KvReport
    buckets: dict[str, list[PathBucket]]  # by path: decode, long
    baseline_needles: dict[tuple[int, int], tuple[int, int]]
    needles: dict[tuple[int, int], tuple[int, int]]
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Candidate:
    """One candidate cell, its verdict, and its differences to the baseline."""

    record: Record
    folder: Path
    verdict: Verdict | None
    causes: Causes
    fidelity: list[Estimate] = field(default_factory=list)
    buckets: dict[str, list[Estimate]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)  # of the fingerprints, each a sentence
    p_holm: float | None = None
    notes: list[str] = field(default_factory=list)
    cache: CacheView | None = None

    @property
    def name(self) -> str:
        return self.record.cell.quant

    @property
    def increase(self) -> Estimate | None:
        """The gate's metric: a share, with its interval."""
        checks = self.verdict.checks if self.verdict else []
        return next((c.estimate for c in checks if c.estimate is not None and "perplexity" in c.metric), None)


@dataclass(frozen=True)
class Claim:
    """A statement of the articles beside what these records say. `answer`: agrees, differs, open."""

    number: int
    says: str
    answer: str
    measured: str


@dataclass(frozen=True)
class Group:
    """One baseline and all that is compared with it."""

    model: str
    gpu: str
    engine: str
    baseline: Record | None
    candidates: list[Candidate]
    floor: Estimate | None = None  # A/A, a share
    model_notes: list[str] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)  # quality against memory against speed
    recommendation: str = ""


@dataclass(frozen=True)
class StudyView:
    """All that one report shows."""

    title: str
    groups: list[Group]
    command: str = ""
    notes: list[str] = field(default_factory=list)  # what was left out, and why
    created_at: str = ""
