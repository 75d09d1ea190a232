"""Every paired estimate of a candidate in one file beside its record: what MLflow and the report show besides the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evalq.errors import RecordError
from evalq.judge.compare import compare
from evalq.judge.fidelity import fidelity, token_pairs
from evalq.records import ESTIMATES_FILE, SCHEMA_VERSION, Estimate, Record, read_table, to_json, write_text

TOKENS_AT_MOST = 2_000_000  # beyond it fidelity is left to `evalq compare --fidelity`: a run must not wait for it


@dataclass(frozen=True)
class PairedEstimates:
    """estimates.json."""

    schema_version: int
    baseline_id: str
    candidate_id: str
    estimates: list[Estimate]
    notes: list[str] = field(default_factory=list)


def paired_estimates(
    first: Record, first_folder: Path, second: Record, second_folder: Path, allow: Sequence[str], confidence: float
) -> PairedEstimates:
    """Differences of quality and, where both kept their tokens, fidelity. Errors: RecordError for records not comparable."""
    known = {*first.fingerprint, *second.fingerprint}
    excused = [name for name in allow if name in known]
    found = compare(first, first_folder, second, second_folder, excused, confidence)
    close, notes = _fidelity(first, first_folder, second, second_folder, confidence)
    ids = (first.record_id, second.record_id)
    return PairedEstimates(SCHEMA_VERSION, *ids, [*found.estimates, *close], [*found.notes, *notes])


def _fidelity(
    first: Record, first_folder: Path, second: Record, second_folder: Path, confidence: float
) -> tuple[list[Estimate], list[str]]:
    tables = read_table(first_folder, first, "tokens"), read_table(second_folder, second, "tokens")
    if tables[0] is None or tables[1] is None:
        return [], ["no fidelity: one side kept no tokens"]
    if len(tables[0]) > TOKENS_AT_MOST:
        return [], [f"no fidelity: {len(tables[0]):,} tokens are too many; evalq compare --fidelity computes it"]
    try:
        return fidelity(token_pairs(tables[0], tables[1]), confidence).estimates, []
    except RecordError as error:
        return [], [f"no fidelity: {error}"]


def write_estimates(folder: Path, found: PairedEstimates) -> None:
    """Write estimates.json into the candidate's record folder."""
    write_text(folder / ESTIMATES_FILE, to_json(found) + "\n")
