"""Which records may be compared: equal fingerprints, different effective schemes, finished measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evalq.config import nearest
from evalq.errors import ConfigError
from evalq.judge.pairs import DocumentPairs
from evalq.judge.policy import NEVER_ALLOWED
from evalq.records import Record, Scalar

ABSENT = "(absent)"
IDENTITY = ("model_id", "weights_hash", "tokenizer_hash", "gpu", "engine_version", "harness_version")


@dataclass(frozen=True)
class Difference:
    """One field of the fingerprint that is not equal; a side without the field has the value ABSENT."""

    field: str
    baseline: Scalar
    candidate: Scalar

    def __str__(self) -> str:
        return f"{self.field}: baseline {self.baseline!r}, candidate {self.candidate!r}"


def differences(baseline: Record, candidate: Record) -> list[Difference]:
    """Every field of the two fingerprints that is not equal, by name; a field on one side only counts."""
    first, second = baseline.fingerprint, candidate.fingerprint
    return [
        Difference(name, first.get(name, ABSENT), second.get(name, ABSENT))
        for name in sorted(set(first) | set(second))
        if (name in first) != (name in second) or not _same(first.get(name), second.get(name))
    ]


def _same(a: Scalar, b: Scalar) -> bool:
    return type(a) is type(b) and a == b  # True is not 1 here, and "1" is not 1


def check_allow(allow: Sequence[str], known: Sequence[str]) -> None:
    """Refuse exceptions that make no sense. Errors: ConfigError for a field no record has or that is never excused."""
    problems = [
        f"--allow {name} is not a field of these records: {nearest(name, list(known))}"
        for name in allow
        if name not in known
    ]
    problems += [
        f"allowing a difference in {name} is refused; random weights measure no quality, so load the real ones"
        for name in allow
        if name in NEVER_ALLOWED
    ]
    if problems:
        raise ConfigError(*problems)


def unfinished(record: Record, side: str) -> list[str]:
    """Why a record cannot be judged at all: failed, invalid, scheme not applied, random weights."""
    problems = []
    if record.failure is not None:
        problems.append(
            f"the {side} failed while measuring ({record.failure.kind} at {record.failure.stage}): "
            f"{record.failure.message}"
        )
    if record.status != "complete" and record.failure is None:
        notes = "; ".join(record.notes)
        problems.append(f"the {side} record is {record.status}, not complete{': ' + notes if notes else ''}")
    if record.applied is None:
        problems.append(f"the {side} record does not say whether its scheme {record.cell.quant} was applied")
    elif not record.applied.ok or record.applied.problems:
        why = "; ".join(record.applied.problems) or "the engine's state does not match the scheme"
        problems.append(f"the scheme {record.cell.quant} of the {side} was not applied: {why}")
    if side == "baseline" and not record.cell.is_baseline:
        problems.append(
            f"the baseline record {record.record_id} was measured as candidate {record.cell.quant}, not as a baseline; "
            "swapped arguments? use evalq compare for any two records"
        )
    if side == "candidate" and record.cell.is_baseline:
        problems.append(
            f"the candidate record {record.record_id} was measured as a baseline, so no scheme can be judged by it; "
            "swapped arguments? use evalq compare for any two records"
        )
    if not record.fingerprint:
        problems.append(f"the {side} record has an empty fingerprint, so nothing can be compared with it")
    elif record.failure is None:  # two records that both keep silent about their weights are not equal
        silent = [name for name in IDENTITY if not record.fingerprint.get(name)]
        problems += [f"the fingerprint of the {side} does not say {', '.join(silent)}"] if silent else []
    said = (
        record.fingerprint.get("load_format"),
        record.engine_settings.get("load_format"),
        record.fingerprint.get("weights_hash"),
    )
    if any(str(value).lower() == "dummy" for value in said):
        problems.append(f"the {side} ran on random weights (load_format=dummy), which measure speed and memory only")
    return problems


def _same_cell(baseline: Record, candidate: Record) -> bool:
    """Whether both were measured as one scheme, where equal values are no surprise; a name alone proves nothing."""
    first, second = baseline.cell, candidate.cell
    return first.quant == second.quant and first.is_baseline == second.is_baseline


def same_applied_scheme(baseline: Record, candidate: Record) -> bool:
    """Whether the engine ended up with the same layer kernels, parameter dtypes and KV cache in both."""
    return baseline.applied is not None and baseline.applied == candidate.applied


def same_effective_config(baseline: Record, candidate: Record, documents: DocumentPairs | None = None) -> str | None:
    """Why the two records are one configuration measured twice; None when they are not.

    A duplicate config is one; so is a candidate of another name whose applied scheme and whose every document are
    identical to the baseline's, bit for bit: it was probably never loaded.
    """
    if baseline.record_id == candidate.record_id:
        return f"baseline and candidate are the same record {baseline.record_id}"
    if baseline.config_hash == candidate.config_hash:
        return f"baseline and candidate have the same effective config ({baseline.config_hash[:12]}): a duplicate"
    if _same_cell(baseline, candidate):
        return None
    identical = documents is not None and np.array_equal(documents.baseline_nll, documents.candidate_nll)
    if identical and same_applied_scheme(baseline, candidate):
        return (
            f"every document of {candidate.cell.quant} has exactly the value of {baseline.cell.quant} and the engine "
            "reports the same layers and KV cache: the candidate was probably never loaded"
        )
    return None


def identical_values(baseline: Record, candidate: Record, documents: DocumentPairs) -> str | None:
    """A warning when another scheme gives bit-identical values although the engine reports another state."""
    if _same_cell(baseline, candidate):
        return None
    if not np.array_equal(documents.baseline_nll, documents.candidate_nll):
        return None
    return (
        f"every document of {candidate.cell.quant} has exactly the value of {baseline.cell.quant}; "
        "either the scheme has no effect on scoring or the candidate was never called"
    )


def scheme_forced(baseline: Record, candidate: Record) -> list[str]:
    """Differences that the scheme itself brings about and that the verdict only mentions."""
    first, second = baseline.applied, candidate.applied
    if first is None or second is None or first.attention_backend == second.attention_backend:
        return []
    return [
        f"attention backend {first.attention_backend} (KV cache {first.kv_dtype_effective}) in the baseline and "
        f"{second.attention_backend} (KV cache {second.kv_dtype_effective}) in the candidate; "
        "its own effect is part of the difference"
    ]
