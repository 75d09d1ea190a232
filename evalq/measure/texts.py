"""What people need to read beside the figures: questions, answers, beginnings of documents, texts of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from evalq.records import piece_schema, text_schema

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_LIMIT = 2000  # characters of a prompt or an answer; of a long prompt the end, which asks the question
DOCUMENT_LIMIT = 400  # characters of a perplexity document, from its beginning


def kept_texts(
    samples_by_task: dict[str, list[dict[str, Any]]], tokens: pa.Table | None, tokenizer: Any
) -> dict[str, pa.Table]:
    """The tables `texts` and, where there are scored tokens, `pieces`; a table without rows is left out."""
    import pyarrow as pa

    rows = [text_row(task, sample) for task, samples in samples_by_task.items() for sample in samples]
    tables = {"texts": pa.Table.from_pylist(rows, schema=text_schema())} if rows else {}
    if tokens is not None and len(tokens):
        tables["pieces"] = piece_table(tokens, tokenizer)
    return tables


def text_row(task: str, sample: dict[str, Any]) -> dict[str, Any]:
    """One texts.parquet row from one of lm-eval's samples."""
    pairs = _arguments(sample)
    prompt = pairs[0][0] if pairs else ""
    row = {"task": task, "id": int(sample["doc_id"]), "choices": [], "response": None}
    if pairs and len(pairs[0]) == 1:  # a document to be scored as it is
        return {**row, "prompt": _printable(prompt[:DOCUMENT_LIMIT])}
    response = _response(sample)
    choices = [] if response is not None else [_printable(pair[1].strip()[:TEXT_LIMIT]) for pair in pairs]
    return {**row, "prompt": _printable(prompt[-TEXT_LIMIT:]), "choices": choices, "response": response}


def _arguments(sample: dict[str, Any]) -> list[list[str]]:
    """(context, continuation), or (document,), of every request of a sample; lm-eval writes them as mappings or pairs."""
    arguments = sample.get("arguments") or []
    pairs = arguments.values() if isinstance(arguments, dict) else arguments
    return [[str(part) for part in (pair.values() if isinstance(pair, dict) else pair)] for pair in pairs]


def _response(sample: dict[str, Any]) -> str | None:
    """What the model wrote, for a task that generates; None for one that scores given answers."""
    answers = sample.get("filtered_resps") or []
    first = answers[0] if isinstance(answers, list | tuple) and answers else None
    return _printable(first[:TEXT_LIMIT]) if isinstance(first, str) else None


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def piece_table(tokens: pa.Table, tokenizer: Any) -> pa.Table:
    """The text of every token that was scored or ranked first."""
    import pyarrow as pa

    ids = np.unique(np.concatenate([tokens.column(name).to_numpy() for name in ("token_id", "top1_id")]))
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    texts = tokenizer.batch_decode([[i] for i in ids.tolist()], skip_special_tokens=False)
    pieces = [_with_space(name or "", text) for name, text in zip(names, texts, strict=True)]
    return pa.table({"token_id": ids.astype(np.int32), "piece": pieces}, schema=piece_schema())


def _with_space(name: str, text: str) -> str:
    """SentencePiece tokenizers drop the space before a word when it is decoded alone."""
    return f" {text}" if name.startswith("▁") and not text.startswith(" ") else _printable(text)
