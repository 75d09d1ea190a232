"""Proving a candidate on the engine: the search's own documents in planned looks, and documents kept for the last verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evalq.config import QuantConfig, RunConfig, config_hash, parse_share
from evalq.errors import ConfigError, EvalqError, InfeasibleError, MeasurementError
from evalq.judge.gate import EXIT_CODES
from evalq.judge.repeated import confidence_at
from evalq.measure import data
from evalq.measure.documents import text_of
from evalq.measure.launch import WORKER
from evalq.pipeline import Measured, identify, judge_cell, measure
from evalq.preparation import Prepared, as_baseline, baseline_scheme, prepare
from evalq.records import VERDICT_FILE, Estimate, Verdict, to_json, write_text
from evalq.report.progress import QuietWatcher
from evalq.search.kept import BEGUN, PASSED, KeptDocuments, Series, text_hash


@dataclass(frozen=True)
class Split:
    """Documents of the perplexity task: the first `search` for the search, the next `final` for the last verdict."""

    search: int
    final: int
    looks: tuple[int, ...]
    kept: tuple[str, ...] = ()  # hashes of the texts for the last verdict
    identity: str = ""  # of the data that was divided


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
    hashes = [text_hash(text) for text in texts[:count]]
    seen, kept = set(hashes[:search]), hashes[search:]
    doubled = sum(text in seen for text in kept)
    if doubled:
        raise ConfigError(
            f"{doubled} of the {final} documents kept for the last verdict are the same text as one of the search's; take doubled "
            f"documents out of {source.label}, so that the last verdict is on text that the search has not scored"
        )
    looks = list(config.search.looks) or [max(least, search // 3), max(least, 2 * search // 3), search]
    if looks[-1] != search or (sorted(set(looks)) != looks and config.search.looks):
        raise ConfigError(f"search.looks={looks} must rise and end at {search}, the documents of the search")
    return Split(search, final, tuple(sorted(set(looks))), tuple(kept), source.identity)


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

    def kept_items(self) -> list[str]:
        """What the last verdict is on: the kept texts, and the items of each other task whose margin gates."""
        gating = sorted(set(self.config.gate.required_margins) - {data.PERPLEXITY})
        sources = data.find_sources(self.config)
        return [*self.split.kept, *(f"{task} {sources[task].identity}" for task in gating if task in sources)]

    def candidate_key(self, quant: QuantConfig) -> str:
        """The same for the same measurement, whatever a search called it: checkpoint, settings, data, versions.

        Errors: EvalqError when the source checkpoint or a calibration text cannot be read.
        """
        config = self.final_config(dataclasses.replace(quant, name="candidate"))
        try:
            return identify(prepare(config), QuietWatcher()).key
        except (ConfigError, InfeasibleError):  # it will be refused; any name will do
            return config_hash(config)

    def verdict(self, quant: QuantConfig, kept: KeptDocuments, series: Series) -> tuple[Proof, Verdict | None]:
        """Judge on the kept documents, at the level that is the series'. Nothing is shown of them before the look is noted."""
        config, key = self.final_config(quant), self.candidate_key(quant)
        try:
            cell, baseline, candidate = self._measure_pair(config, self.split.final, Hushed(self.watcher))
        except _RefusedError as refused:
            return refused.proof, None
        before = kept.begin(series, key)
        confidence = confidence_at(config.gate.confidence, kept.level_of(series, key))
        gate = dataclasses.replace(cell.config.gate, confidence=confidence)
        held = dataclasses.replace(cell, config=dataclasses.replace(cell.config, gate=gate))
        verdict = judge_cell(held, baseline, candidate)
        proof = _proof(verdict, candidate, self.split.final)
        kept.settle(series, key, verdict.status if proof.estimate or verdict.checks else None)
        if before in (None, BEGUN, PASSED) or verdict.status != PASSED:
            return proof, verdict
        return _first_stands(before, proof, verdict, candidate)

    def _judge(self, config: RunConfig, documents: int) -> Proof:
        """Errors: EvalqError when the baseline fails; a candidate that cannot run did not pass."""
        try:
            cell, baseline, candidate = self._measure_pair(config, documents, self.watcher)
            return _proof(judge_cell(cell, baseline, candidate), candidate, documents)
        except _RefusedError as refused:
            return refused.proof

    def _measure_pair(
        self, config: RunConfig, documents: int, watcher: QuietWatcher
    ) -> tuple[Prepared, Measured, Measured]:
        """Measure baseline and candidate, or take their stored records.

        Errors: _RefusedError for a candidate that cannot run; EvalqError when the baseline fails, or the data have changed.
        """
        yardstick = as_baseline(prepare(dataclasses.replace(config, quant=baseline_scheme(config))))
        found = yardstick.sources[data.PERPLEXITY]
        if self.split.identity and found.identity != self.split.identity:
            raise MeasurementError(
                f"{found.label} changed while the search ran, and which documents were kept is no longer true; run it again",
                "data",
            )
        watcher.cell(yardstick.name)
        baseline = self._measure(measure(yardstick, watcher, self.command, reuse=True), documents)
        try:
            cell = prepare(config)
            watcher.cell(cell.name)
            candidate = self._measure(measure(cell, watcher, self.command, reuse=True), documents)
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


class Hushed(QuietWatcher):
    """Shows how far a measurement is, and no score: a last verdict is seen when it has been noted, not before."""

    def __init__(self, shown: QuietWatcher) -> None:
        self.cell, self.stage, self.progress, self.say = shown.cell, shown.stage, shown.progress, shown.say  # type: ignore[method-assign]
        self.line = shown.line  # type: ignore[method-assign]


class _RefusedError(Exception):
    """A candidate that cannot run."""

    def __init__(self, error: EvalqError) -> None:
        super().__init__(str(error))
        self.proof = Proof("FAILED", False, str(error), None, 0, None, None, None, str(error))


def _first_stands(status: str, proof: Proof, verdict: Verdict, candidate: Measured) -> tuple[Proof, Verdict]:
    """A pass of what did not pass before on the same documents, measured anew: the first answer stands."""
    summary = (
        f"{status}: a first measurement of this candidate on these documents ended so, and that stands; measured again: "
        f"{verdict.summary}"
    )
    verdict = dataclasses.replace(
        verdict,
        status=status if status in EXIT_CODES else "INCONCLUSIVE",
        exit_code=EXIT_CODES.get(status, EXIT_CODES["INCONCLUSIVE"]),
        warning=False,
        summary=summary,
        reasons=[summary, *verdict.reasons],
    )
    write_text(candidate.folder / VERDICT_FILE, to_json(verdict) + "\n")
    return dataclasses.replace(proof, status=verdict.status, passed=False, summary=summary), verdict


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
