"""Token windows for the KV measurements: the run's own documents where it scores any, else the embedded ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evalq.measure import data


@dataclass(frozen=True)
class Document:
    """One text of the perplexity task, with its number there."""

    doc_id: int
    text: str


def task_documents(tasks: dict[str, Any], limit: int | None) -> list[Document]:
    """The texts that the perplexity task scores, in its order; the embedded articles when that task does not run."""
    task = tasks.get(data.PERPLEXITY)
    if task is None:
        return embedded_documents()
    rows = list(task.eval_docs)[: limit if limit is not None else None]
    return [Document(i, str(task.doc_to_target(row))) for i, row in enumerate(rows)]


def embedded_documents() -> list[Document]:
    """The articles that evalq brings along."""
    name, label = data.EMBEDDED_FILES[data.PERPLEXITY]
    source = data.Source(data.PERPLEXITY, label, data.EMBEDDED / name, "")
    return [Document(i, str(row["page"])) for i, row in enumerate(data.read_rows(source))]


def first_token(tokenizer: Any) -> int:
    """The one context token that a window starts with: BOS, or EOS where there is none."""
    bos = tokenizer.bos_token_id
    return int(bos if bos is not None else tokenizer.eos_token_id)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def window(tokenizer: Any, document: Document, length: int) -> list[int]:
    """The first window of a document as the perplexity task cuts it: one context token, then at most length - 1."""
    return [first_token(tokenizer), *encode(tokenizer, document.text)[: length - 1]]


def long_windows(tokenizer: Any, documents: Sequence[Document], length: int, count: int) -> list[list[int]]:
    """Up to `count` windows of exactly `length` tokens from the documents one after the other."""
    start = first_token(tokenizer)
    windows: list[list[int]] = []
    stream: list[int] = []
    for document in documents:
        stream.extend(encode(tokenizer, document.text))
        while len(stream) >= length - 1 and len(windows) < count:
            windows.append([start, *stream[: length - 1]])
            stream = stream[length - 1 :]
        if len(windows) == count:
            break
    return windows


def ids_hash(sequences: Sequence[Sequence[int]]) -> str:
    """sha256 over token sequences, in order, with their lengths."""
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(np.asarray([len(ids), *ids], dtype=np.int64).tobytes())
    return digest.hexdigest()
