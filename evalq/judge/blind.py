"""Pairs of outputs, blind: shown in shuffled order under letters, with the key to them in a file of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalq.errors import RecordError
from evalq.judge.review import SCALE, Answer
from evalq.records import from_mapping, parse_json, to_json, write_text

PAIRS_FILE = "pairs.json"
KEY_FILE = "key.json"
VERSION = 1
SIDES = ("a", "b")
FACTS = {"right": 1, "wrong": 0}


@dataclass(frozen=True)
class Pair:
    """One prompt as reviewers see it."""

    item: str
    prompt: str
    a: str
    b: str


@dataclass(frozen=True)
class Pairs:
    """pairs.json: everything that reviewers may see."""

    schema_version: int
    review_id: str
    pairs: list[Pair]


@dataclass(frozen=True)
class Key:
    """key.json: which letter is the candidate's. Not for reviewers."""

    schema_version: int
    review_id: str
    baseline_id: str
    candidate_id: str
    prompts: int
    identical: int  # prompts with equal outputs; they are not shown
    candidate_is: dict[str, str]  # item -> "a" or "b"
    settings: dict[str, str] = field(default_factory=dict)  # how the outputs were generated


def blind(
    review_id: str,
    ids: tuple[str, str],
    prompts: Sequence[str],
    baseline: Sequence[str],
    candidate: Sequence[str],
    seed: int,
    settings: dict[str, str] | None = None,
) -> tuple[Pairs, Key]:
    """Shuffle prompts and letters. ids: baseline and candidate record. Errors: RecordError when the outputs do not match up."""
    if not len(prompts) == len(baseline) == len(candidate):
        raise RecordError(
            f"{len(prompts)} prompts, {len(baseline)} outputs of the baseline and {len(candidate)} of the candidate; "
            "each prompt needs one output of each"
        )
    rng = random.Random(seed)
    rows = [row for row in zip(prompts, baseline, candidate, strict=True) if row[1].strip() != row[2].strip()]
    if not rows:
        raise RecordError("every output of the candidate equals the baseline's, so there is nothing to review")
    rng.shuffle(rows)
    # Half of the candidates under each letter, so that who always answers A says nothing.
    letters = [SIDES[i % 2] for i in range(len(rows))]
    rng.shuffle(letters)
    pairs, key = [], {}
    for number, ((prompt, first, second), letter) in enumerate(zip(rows, letters, strict=True), 1):
        name = f"p{number:03d}"
        key[name] = letter
        pairs.append(Pair(name, prompt, *((second, first) if letter == "a" else (first, second))))
    kept = Key(VERSION, review_id, *ids, len(prompts), len(prompts) - len(rows), key, settings or {})
    return Pairs(VERSION, review_id, pairs), kept


def write_review(folder: Path, pairs: Pairs, key: Key) -> None:
    """Write pairs.json and key.json; the key for its owner only. Errors: RecordError where a review lies already."""
    if (folder / KEY_FILE).exists():
        raise RecordError(
            f"{folder} holds a review already; its answers need its key, so give another folder with --out"
        )
    write_text(folder / PAIRS_FILE, to_json(pairs) + "\n")
    write_text(folder / KEY_FILE, to_json(key) + "\n")
    (folder / KEY_FILE).chmod(0o600)


def read_key(folder: Path) -> Key:
    """Errors: RecordError."""
    return from_mapping(Key, _read(folder / KEY_FILE), str(folder / KEY_FILE))


def read_pairs(folder: Path) -> Pairs:
    """Errors: RecordError."""
    return from_mapping(Pairs, _read(folder / PAIRS_FILE), str(folder / PAIRS_FILE))


def _read(file: Path) -> Any:
    try:
        return parse_json(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{file} cannot be read ({error}); give the folder of evalq review make") from error


def read_answers(file: Path, key: Key) -> list[Answer]:
    """One reviewer's downloaded answers, unblinded. Errors: RecordError naming what does not fit."""
    data = _read(file)
    if not isinstance(data, dict) or not isinstance(data.get("answers"), list):
        raise RecordError(f"{file} is no file of answers; download it from the form again")
    if data.get("review_id") != key.review_id:
        raise RecordError(f"{file} answers review {data.get('review_id')!r}, and this one is {key.review_id}")
    reviewer = str(data.get("reviewer") or "").strip()
    if not reviewer:
        raise RecordError(f"{file} does not say who answered; give the reviewer a name in it")
    return [unblinded(reviewer, given, key, str(file)) for given in data["answers"]]


def unblinded(reviewer: str, given: Any, key: Key, where: str) -> Answer:
    """One answer in terms of baseline and candidate. Errors: RecordError for an unknown item or a value outside its scale."""
    item = given.get("item") if isinstance(given, dict) else None
    if not isinstance(item, str) or item not in key.candidate_is:
        raise RecordError(f"{where}: {json.dumps(item)} is no item of review {key.review_id}")
    letter = key.candidate_is[item]
    other = "b" if letter == "a" else "a"
    values = {side: _coherence(given.get(f"coherence_{side}"), f"{where}, {item}") for side in SIDES}
    facts = {side: FACTS.get(str(given.get(f"facts_{side}"))) for side in SIDES}
    chosen = given.get("preference")
    if chosen not in (None, "a", "b", "tie"):
        raise RecordError(f"{where}, {item}: preference is {chosen!r}; allowed: a, b, tie")
    preference = None if chosen is None else 0 if chosen == "tie" else 1 if chosen == letter else -1
    return Answer(reviewer, item, preference, values[other], values[letter], facts[other], facts[letter])


def _coherence(value: Any, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not SCALE[0] <= value <= SCALE[1]:
        raise RecordError(f"{where}: coherence is {value!r}; allowed: {SCALE[0]} to {SCALE[1]}")
    return value
