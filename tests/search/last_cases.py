"""Stub benches and made-up proofs, for the tests of the search and of its last verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stub_worker import in_process, plan_command

from evalq import pipeline
from evalq.config import QuantConfig, RunConfig
from evalq.report.progress import QuietWatcher
from evalq.search.candidates import Candidate
from evalq.search.kept import kept_documents
from evalq.search.proof import Bench, Proof, split_documents

ONE_TASK = ("gate.required_tasks=[wikitext]", "tasks=perplexity", "data=embedded")


BAD, GOOD = {"act": "record", "increase": 0.2, "documents": 20}, {"act": "record", "documents": 20}


def last_verdict(bench: Bench, file: Path) -> tuple[Proof, Any]:
    """The last verdict of the config's own scheme, as a series of one."""
    with kept_documents(file) as notes:
        series = notes.open([bench.candidate_key(bench.config.quant)], bench.kept_items(), "policy")
        return bench.verdict(bench.config.quant, notes, series)


def named(name: str, cost: float) -> Candidate:
    return Candidate(name, QuantConfig(name), (), 1, cost, 0.0)


def said(status: str, warned: bool = False) -> Proof:
    return Proof(status, status == "PASS" and not warned, "", None, 30, 1, None, None)


def stub_bench(
    config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, watcher: QuietWatcher | None = None, **acts: Any
) -> Bench:
    """A bench on a stub engine; every measurement is of 20 documents unless `acts` says otherwise."""
    command = plan_command(folder, {"act": "record", "documents": 20}, **acts)
    monkeypatch.setattr(pipeline, "run_worker", in_process(command))
    return Bench(config, split_documents(config), watcher or QuietWatcher(), command)
