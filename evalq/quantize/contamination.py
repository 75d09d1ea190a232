"""Whether calibration text and evaluation documents share a run of tokens: exact, by hashed runs that are then compared.

Two readings of a text are checked: the model's own token ids, and words (letters and digits, case folded), so that a copy
with other spaces or punctuation is found as well. A hash only nominates; the tokens decide, so no clean text is accused.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalq.errors import ConfigError

RUN_TOKENS = 50
SHOWN_WORDS = 12
Tokens = NDArray[np.uint64]
Reading = Callable[[str], Tokens]
_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd: its powers are distinct modulo 2^64


class Document(NamedTuple):
    """An evaluation document: `label` names task and number."""

    label: str
    text: str


@dataclass(frozen=True)
class Overlap:
    """A run that calibration text number `text` and a document share."""

    text: int
    document: str
    reading: str
    excerpt: str


@dataclass(frozen=True)
class Runs:
    """All runs of the evaluation documents, sorted by hash: (runs,) each; `tokens` is one array over all documents."""

    hashes: Tokens
    starts: NDArray[np.int64]
    documents: NDArray[np.int64]
    tokens: Tokens


def words(text: str) -> Tokens:
    """Case-folded words as 64-bit numbers; punctuation and white space are no words."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return np.fromiter((_number(word) for word in _WORD.findall(plain)), dtype=np.uint64)


def _number(word: str) -> int:
    data = word.encode("utf-8", "surrogatepass")
    return zlib.crc32(data) << 32 | zlib.crc32(data[::-1] + b"\0")


def token_ids(folder: Path) -> Reading | None:
    """The model's own tokens; None where the folder has no tokenizer.json or `tokenizers` is absent."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library raises bare Exception for a file it does not know; words are checked all the same
        return None
    tokenizer.no_truncation()
    return lambda text: np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint64)


def run_hashes(tokens: Tokens, run: int = RUN_TOKENS) -> Tokens:
    """A polynomial hash modulo 2^64 of every run of `run` tokens: (tokens - run + 1,), empty when there is none."""
    if len(tokens) < run:
        return np.empty(0, dtype=np.uint64)
    powers = np.ones(run, dtype=np.uint64)
    powers[1:] = np.multiply.accumulate(np.full(run - 1, _MULTIPLIER, dtype=np.uint64))
    mixed = (tokens + np.uint64(1)) * _MULTIPLIER  # token 0 must count as well
    hashes: Tokens = np.lib.stride_tricks.sliding_window_view(mixed, run) @ powers
    return hashes


def runs_of(documents: Sequence[Document], reading: Reading, run: int = RUN_TOKENS) -> Runs:
    """Every run of every document."""
    tokens = [reading(document.text) for document in documents]
    hashes = [run_hashes(part, run) for part in tokens]
    bases = np.cumsum([0, *(len(part) for part in tokens)])
    starts = [np.arange(len(part)) + base for part, base in zip(hashes, bases, strict=False)]
    owners = [np.full(len(part), number) for number, part in enumerate(hashes)]
    none, nowhere = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    joined = np.concatenate([none, *hashes])
    order = np.argsort(joined, kind="stable")
    places, numbers = np.concatenate([nowhere, *starts]), np.concatenate([nowhere, *owners])
    return Runs(joined[order], places[order], numbers[order], np.concatenate([none, *tokens]))


def first_shared(tokens: Tokens, runs: Runs, run: int = RUN_TOKENS) -> tuple[int, int] | None:
    """(position in `tokens`, document) of the first run that both hold; None when there is none."""
    hashes = run_hashes(tokens, run)
    low, high = (np.searchsorted(runs.hashes, hashes, side=side) for side in ("left", "right"))
    for position in np.flatnonzero(high > low):
        wanted = tokens[position : position + run]
        for place in range(int(low[position]), int(high[position])):
            start = int(runs.starts[place])
            if np.array_equal(runs.tokens[start : start + run], wanted):
                return int(position), int(runs.documents[place])
    return None


def overlaps(
    texts: Sequence[str], documents: Sequence[Document], tokenizer_folder: Path | None = None, run: int = RUN_TOKENS
) -> list[Overlap]:
    """The first shared run of each calibration text that has one, in either reading."""
    readings: dict[str, Reading] = {"words": words}
    ids = token_ids(tokenizer_folder) if tokenizer_folder is not None else None
    if ids is not None:
        readings["tokens"] = ids
    found: dict[int, Overlap] = {}
    for name, reading in readings.items():
        runs = runs_of(documents, reading, run)
        for number, text in enumerate(texts):
            if number in found:
                continue
            shared = first_shared(reading(text), runs, run)
            if shared is not None:
                excerpt = " ".join(documents[shared[1]].text.split()[:SHOWN_WORDS])
                found[number] = Overlap(number, documents[shared[1]].label, name, excerpt)
    return [found[number] for number in sorted(found)]


def check_contamination(
    texts: Sequence[str], source: str, documents: Sequence[Document], tokenizer_folder: Path | None = None
) -> None:
    """Refuse calibration text that shares a run of RUN_TOKENS with an evaluation document. Errors: ConfigError."""
    found = overlaps(texts, documents, tokenizer_folder)
    if not found:
        return
    first = found[0]
    begins = " ".join(texts[first.text].split())[:40]
    more = f", and {len(found) - 1} more texts do as well" if len(found) > 1 else ""
    raise ConfigError(
        f"calibration text {first.text} of {source} (it begins {begins!r}) shares {RUN_TOKENS} "
        f'{first.reading} in a row with {first.document} ("{first.excerpt} ..."){more}; '
        "a model calibrated on what it is scored on looks better than it is, so choose another "
        "calibration=NAME or calibration.file, or evaluate on other data"
    )
