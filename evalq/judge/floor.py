"""The A/A floor: the baseline against itself with other request order and batch composition.

Kept per fingerprint under the records root, in aa/, and printed beside every delta measured with that engine.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from evalq.errors import RecordError
from evalq.judge.comparable import differences, unfinished
from evalq.judge.paired import as_increase, ratio
from evalq.judge.pairs import Tables, document_pairs
from evalq.judge.policy import METRIC_UNITS
from evalq.judge.tasks import PERPLEXITY_TASK
from evalq.records import Estimate, Record, from_mapping, parse_json, to_json, write_text

MAY_DIFFER = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "seed", "request_order")


def aa_floor(
    first: Record,
    first_folder: Path,
    second: Record,
    second_folder: Path,
    metric: str = "word_perplexity",
    confidence: float = 0.95,
) -> Estimate:
    """Perplexity increase of a configuration over itself; its interval is the noise that no scheme can be blamed for.

    Errors: RecordError when the two are not one configuration with another order or batch composition.
    """
    problems = [*unfinished(first, "first record"), *unfinished(second, "second record")]
    problems += [str(item) for item in differences(first, second) if item.field not in MAY_DIFFER]
    if first.cell.quant != second.cell.quant:
        problems.append(f"scheme {first.cell.quant} against {second.cell.quant}")
    if first.record_id == second.record_id:
        problems.append("the same record twice has no noise")
    if problems:
        raise RecordError(f"not an A/A pair: {'; '.join(problems)}")
    pairs = document_pairs(Tables.read(first, first_folder), Tables.read(second, second_folder), PERPLEXITY_TASK)
    try:
        found = ratio(pairs.d, pairs.counts[METRIC_UNITS[metric]])
    except ValueError as error:
        raise RecordError(f"no A/A floor of {metric}: {error}") from error
    low, high = found.interval(confidence)
    return as_increase(f"{metric}_aa_floor", found.value, low, high, confidence, found.clusters, found.method)


def floor_width(floor: Estimate | None) -> float | None:
    """The largest difference, in either direction, that the A/A pair cannot exclude; a share."""
    if floor is None or floor.low is None or floor.high is None:
        return None
    return max(abs(floor.low), abs(floor.high))


def floor_key(record: Record) -> str:
    """sha256 of the fingerprint without what an A/A pair may change."""
    kept = {name: value for name, value in record.fingerprint.items() if name not in MAY_DIFFER}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def floor_file(records_root: Path, record: Record, metric: str) -> Path:
    return records_root / "aa" / f"{floor_key(record)[:32]}.{metric}.json"


def write_floor(records_root: Path, record: Record, floor: Estimate, metric: str = "word_perplexity") -> Path:
    """Keep a floor for every later comparison with this fingerprint."""
    file = floor_file(records_root, record, metric)
    write_text(file, to_json(floor) + "\n")
    return file


def read_floor(records_root: Path, record: Record, metric: str = "word_perplexity") -> Estimate | None:
    """The kept floor for this record's fingerprint; None when there is none. Errors: RecordError for a damaged file."""
    file = floor_file(records_root, record, metric)
    try:
        if not file.is_file():
            return None
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(
            f"A/A floor {file} cannot be read ({error}); remove it, or run +experiment=aa again"
        ) from error
    return from_mapping(Estimate, parse_json(text, str(file)), str(file))
