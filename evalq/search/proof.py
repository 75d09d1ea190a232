"""Proving a candidate on the engine: the search's own documents in planned looks, and documents kept for the last verdict."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evalq.config import QuantConfig, RunConfig, config_hash, parse_share
from evalq.errors import ConfigError, EvalqError, InfeasibleError, MeasurementError
from evalq.identity import making
from evalq.judge.repeated import confidence_at
from evalq.measure import data
from evalq.measure.documents import text_of
from evalq.measure.launch import WORKER
from evalq.pipeline import Measured, judge_cell, measure
from evalq.preparation import Prepared, as_baseline, baseline_scheme, prepare
from evalq.records import Estimate, Verdict
from evalq.report.progress import QuietWatcher
from evalq.search.kept import UNKNOWN, KeptDocuments, Series, text_hash


@dataclass(frozen=True)
class Split:
    """Documents of the perplexity task: the first `search` for the search, the next `final` for the last verdict."""

    search: int
    final: int
    looks: tuple[int, ...]
    kept: tuple[str, ...] = ()  # hashes of the texts for the last verdict


@dataclass(frozen=True)
class Proof:
    """What the engine said about one candidate. `passed`: within the target, not only within the limit."""

    status: str  # a verdict's, or FAILED
    passed: bool
    summary: str
    estimate: Estimate | None
    documents: int
    weight_bytes: int | None  # as the engine reports it
    output_tokens_per_second: float | None
    record: str | None
    error: str = ""


def split_documents(config: RunConfig) -> Split:
    """How the documents are divided. Errors: ConfigError when there are too few, or they are the hub's."""
    source = data.find_sources(config).get(data.PERPLEXITY)
    if source is None:
        raise ConfigError("evalq search decides by perplexity; set tasks.perplexity=true")
    if source.file is None:
        raise ConfigError("evalq search divides the documents of a file; use data=embedded or data=local")
    texts = [str(row.get("page") or text_of(row)) for row in data.read_rows(source)][config.tasks.perplexity_from :]
    rows = len(texts)
    count = min(rows, config.tasks.perplexity_limit or rows)
    final = round(count * parse_share(config.search.final_share, "search.final_share"))
    search, least = count - final, config.gate.min_documents
    if min(search, final) < least:
        raise ConfigError(
            f"{count} documents give {search} to the search and {final} to the final verdict, and the gate wants {least} of "
            "each; raise tasks.perplexity_limit, change search.final_share, or lower gate.min_documents"
        )
    seen = set(texts[:search])
    doubled = sum(text in seen for text in texts[search:count])
    if doubled:
        raise ConfigError(
            f"{doubled} of the {final} documents kept for the last verdict are the same text as one of the search's; take doubled "
            f"documents out of {source.label}, so that the last verdict is on text that the search has not scored"
        )
    looks = list(config.search.looks) or [max(least, search // 3), max(least, 2 * search // 3), search]
    if looks[-1] != search or (sorted(set(looks)) != looks and config.search.looks):
        raise ConfigError(f"search.looks={looks} must rise and end at {search}, the documents of the search")
    return Split(search, final, tuple(sorted(set(looks))), tuple(map(text_hash, texts[search:count])))


@dataclass
class Bench:
    """Where candidates are proved; remembers what the engine cost."""

    config: RunConfig
    split: Split
    watcher: QuietWatcher
    command: Sequence[str] = WORKER
    engine_seconds: float = 0.0
    start_seconds: list[float] = field(default_factory=list)
    score_seconds: list[tuple[float, int]] = field(default_factory=list)  # (seconds, documents)
    reused: int = 0

    def prove(self, quant: QuantConfig) -> Proof:
        """Judge a candidate on the search's documents, look by look, until it is decided."""
        gate = dataclasses.replace(
            self.config.gate,
            looks=list(self.split.looks),
            required_tasks=[data.PERPLEXITY],
            required_margins=[],
            conditions=[],
        )
        tasks = dataclasses.replace(self.config.tasks, hellaswag=False, truthfulqa=False, extra=[], keep_tokens=False)
        load = dataclasses.replace(self.config.load, enabled=False)
        proof = None
        for look in self.split.looks:
            limited = dataclasses.replace(tasks, perplexity_limit=look)
            config = dataclasses.replace(self.config, quant=quant, gate=gate, tasks=limited, load=load)
            proof = self._judge(config, look)
            if proof.status != "INCONCLUSIVE":
                break
        assert proof is not None  # a split has a look
        return proof

    def final_config(self, quant: QuantConfig) -> RunConfig:
        """The cell of a last verdict: the kept documents, every task, the gate of the config."""
        gate = dataclasses.replace(self.config.gate, looks=[], extend=False)
        first = self.config.tasks.perplexity_from + self.split.search
        tasks = dataclasses.replace(
            self.config.tasks, perplexity_from=first, perplexity_limit=self.split.final, keep_tokens=False
        )
        return dataclasses.replace(self.config, quant=quant, gate=gate, tasks=tasks)

    def candidate_key(self, quant: QuantConfig) -> str:
        """The same for the same checkpoint and settings, whatever a search called it; another calibration text is another.

        Errors: EvalqError for a calibration text that cannot be read.
        """
        cell = prepare(self.final_config(dataclasses.replace(quant, name="candidate")))
        parts = {"config": config_hash(cell.config), "made": making(cell)}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def verdict(self, quant: QuantConfig, kept: KeptDocuments, series: Series) -> tuple[Proof, Verdict | None]:
        """Judge on the kept documents, at the level that is the series'; noted before it is made and when it is made."""
        config = self.final_config(quant)
        name = self.candidate_key(quant)
        try:
            cell, baseline, candidate = self._measure_pair(config, self.split.final)
        except _RefusedError as refused:
            kept.note(series, name, "FAILED")
            return refused.proof, None
        kept.note(series, name, UNKNOWN)
        confidence = confidence_at(config.gate.confidence, kept.level_of(series, name))
        gate = dataclasses.replace(cell.config.gate, confidence=confidence)
        held = dataclasses.replace(cell, config=dataclasses.replace(cell.config, gate=gate))
        verdict = judge_cell(held, baseline, candidate)
        kept.note(series, name, verdict.status)
        return _proof(verdict, candidate, self.split.final), verdict

    def _judge(self, config: RunConfig, documents: int) -> Proof:
        """Errors: EvalqError when the baseline fails; a candidate that cannot run did not pass."""
        try:
            cell, baseline, candidate = self._measure_pair(config, documents)
            return _proof(judge_cell(cell, baseline, candidate), candidate, documents)
        except _RefusedError as refused:
            return refused.proof

    def _measure_pair(self, config: RunConfig, documents: int) -> tuple[Prepared, Measured, Measured]:
        """Measure baseline and candidate, or take their stored records.

        Errors: _RefusedError for a candidate that cannot run; EvalqError when the baseline fails.
        """
        yardstick = as_baseline(prepare(dataclasses.replace(config, quant=baseline_scheme(config))))
        self.watcher.cell(yardstick.name)
        baseline = self._measure(measure(yardstick, self.watcher, self.command, reuse=True), documents)
        try:
            cell = prepare(config)
            self.watcher.cell(cell.name)
            candidate = self._measure(measure(cell, self.watcher, self.command, reuse=True), documents)
        except MeasurementError as error:
            if error.kind not in ("unsupported", "engine", "no_kv_room", "oom"):
                raise  # a full disk or an interruption says nothing about the candidate
            raise _RefusedError(error) from error
        except (ConfigError, InfeasibleError) as error:
            raise _RefusedError(error) from error
        return cell, baseline, candidate

    def _measure(self, measured: Measured, documents: int) -> Measured:
        if measured.reused:
            self.reused += 1
        seconds = measured.record.stage_seconds
        self.engine_seconds += 0.0 if measured.reused else sum(seconds.values())
        if not measured.reused or not self.start_seconds:
            self.start_seconds.append(sum(seconds.values()) - seconds.get(f"score {data.PERPLEXITY}", 0.0))
            self.score_seconds.append((seconds.get(f"score {data.PERPLEXITY}", 0.0), documents))
        return measured


class _RefusedError(Exception):
    """A candidate that cannot run."""

    def __init__(self, error: EvalqError) -> None:
        super().__init__(str(error))
        self.proof = Proof("FAILED", False, str(error), None, 0, None, None, None, str(error))


def _proof(verdict: Verdict, candidate: Measured, documents: int) -> Proof:
    estimate = next((c.estimate for c in verdict.checks if c.estimate and "perplexity" in c.metric), None)
    ledger = candidate.record.ledger
    load = next(iter(candidate.record.loads.values()), None)
    return Proof(
        verdict.status,
        verdict.status == "PASS" and not verdict.warning,
        verdict.summary,
        estimate,
        documents,
        ledger.weight_bytes if ledger else None,
        load.output_tokens_per_second if load and load.valid else None,
        str(Path(candidate.folder)),
    )
