"""What a record says about its KV cache: whether scores read it, and the scores taken where it is read.

Tables (beside record.json): kv_tokens.parquet, needles.parquet, generations.parquet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

SIXTEEN_BIT_KV = ("bfloat16", "float16", "float32")
NEEDLE_ANSWER_TOKENS = 12  # generated after each needle prompt
CONTEXT_WORDS = "longest context scored"  # in a verdict's note on what it does not cover
PREFILL_ANSWERS = ("yes", "only across chunks", "no")


@dataclass(frozen=True)
class Sensitivity:
    """Whether scores move when what is in the KV cache is made absurd, by the way the tokens are computed."""

    prefill: (
        str  # one of PREFILL_ANSWERS: does a score of a document computed in one step, or in several, read the cache
    )
    decode: str  # "yes" or "no": does a score of a token computed alone in its step
    method: str  # "scales" (K and V scales x 1e-3, x 1e3, ...) or "erased cache" (schemes without static scales)
    kv_dtype: str
    attention_backend: str
    engine_version: str
    tokens: int  # scored in one step in each state; the other paths score the later ones of them
    moved_nats: dict[str, float]  # "one step, scales x 1000" -> mean absolute change per token
    noise_nats: float  # the same between two unharmed passes, before and after
    threshold_nats: float  # a change above it counts as moved
    tokens_per_step: dict[str, int]  # path -> most tokens of one document in one engine step, as the engine scheduled
    fingerprint: str  # of the engine; the answer is asked once for each
    created_at: str  # ISO 8601, UTC


@dataclass(frozen=True)
class DecodeScore:
    """Teacher-forced scores of tokens that were computed `step_tokens` at a time, so that each reads the cache."""

    documents: int
    segments: int  # stretches of tokens, spread over each document's window
    tokens: int
    left_out: int  # tokens asked for and not scored, or not scored in steps of this size
    step_tokens: int
    token_perplexity: float | None
    ids_hash: str  # sha256 over documents, positions and token ids
    seconds: float


@dataclass(frozen=True)
class LongScore:
    """Scores of long documents, concatenated from the data set's own."""

    documents: int
    left_out: int  # documents asked for and not there
    tokens_per_document: int
    tokens: int
    token_perplexity: float | None
    ids_hash: str
    seconds: float


@dataclass(frozen=True)
class NeedleScore:
    """Retrieval of a number hidden in a long text; the items are in needles.parquet."""

    items: int
    lengths: list[int]  # tokens
    depths: list[int]  # percent of the text that stands before the needle
    accuracy: float | None
    ids_hash: str
    seconds: float


@dataclass(frozen=True)
class GenerationScore:
    """Greedy continuations; the token ids are in generations.parquet."""

    prompts: int
    tokens: int  # per prompt
    loops: int  # continuations that end in a repetition
    ids_hash: str  # of the prompts
    seconds: float


@dataclass(frozen=True)
class KvReport:
    """All of it; what was not asked for is None. `scales`: smallest and largest K and V scale, by layer count."""

    sensitivity: Sensitivity | None = None
    decode: DecodeScore | None = None
    long: LongScore | None = None
    needle: NeedleScore | None = None
    generation: GenerationScore | None = None
    notes: list[str] = field(default_factory=list)


def is_quantised_kv(dtype: str) -> bool:
    """Whether a KV dtype, as a scheme names it, holds fewer than 16 bits per value."""
    return dtype not in SIXTEEN_BIT_KV


def kv_token_schema() -> pa.Schema:
    """kv_tokens.parquet: one row per token scored on a path that reads the cache."""
    import pyarrow as pa

    return pa.schema(
        [
            ("path", pa.string()),  # "decode" or "long"
            ("doc_id", pa.int32()),
            ("window_position", pa.int32()),  # number of tokens of context it was predicted from
            ("token_id", pa.int32()),
            ("logprob", pa.float32()),
            ("top1_id", pa.int32()),
            ("top1_logprob", pa.float32()),
            ("topk_ids", pa.list_(pa.int32())),
            ("topk_logprobs", pa.list_(pa.float32())),
        ]
    )


def needle_schema() -> pa.Schema:
    """needles.parquet: one row per hidden number. value: 1.0 when it was named exactly, else 0.0."""
    import pyarrow as pa

    return pa.schema(
        [
            ("item_id", pa.int64()),
            ("length", pa.int32()),  # tokens of the prompt
            ("depth", pa.int32()),  # percent of the text before the needle
            ("ids_hash", pa.string()),  # sha256 of the prompt's token ids
            ("expected", pa.string()),
            ("answer", pa.string()),
            ("value", pa.float64()),
        ]
    )


def generation_schema() -> pa.Schema:
    """generations.parquet: one row per prompt."""
    import pyarrow as pa

    return pa.schema(
        [
            ("item_id", pa.int64()),
            ("ids_hash", pa.string()),  # sha256 of the prompt's token ids
            ("token_ids", pa.list_(pa.int32())),  # as generated
            ("loop_from", pa.int32()),  # first token of the repetition it ends in; -1 = none
        ]
    )
