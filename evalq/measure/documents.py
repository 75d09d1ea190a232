"""Texts of the evaluation data, for the contamination check of calibration text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from evalq.config import RunConfig
from evalq.measure import data


def evaluation_documents(config: RunConfig) -> list[tuple[str, str]]:
    """(label, text) of every item of every task of the config, whole sets whatever the limits.

    Errors: as evalq.measure.data.find_sources; hub tasks are read through lm-eval.
    """
    found: list[tuple[str, str]] = []
    remote: dict[str, Any] = {}
    read: set[str] = set()
    for task, source in data.find_sources(config).items():
        if source.file is None:
            remote[task] = data.task_overrides(source, config.data)
        elif source.identity not in read:  # two tasks of one file
            read.add(source.identity)
            rows = data.read_rows(source)
            found.extend((f"document {n} of {source.label} ({task})", text_of(row)) for n, row in enumerate(rows))
    if remote:
        from evalq.measure.tasks import load_tasks

        for task, loaded in load_tasks(remote).items():
            found.extend((f"document {n} of {task}", text_of(dict(row))) for n, row in enumerate(loaded.eval_docs))
    return found


def text_of(row: dict[str, Any]) -> str:
    """All text of an item, field by field."""
    return "\n".join(_strings(row))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)
