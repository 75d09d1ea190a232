"""Proving a candidate on the engine: the search's own documents in planned looks, and documents kept for the last verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evalq.config import QuantConfig, RunConfig, config_hash, parse_share
from evalq.errors import ConfigError, EvalqError, InfeasibleError, MeasurementError
from evalq.judge.gate import EXIT_CODES, judge
from evalq.judge.repeated import confidence_at
from evalq.measure import data
from evalq.measure.documents import text_of
from evalq.measure.launch import WORKER
from evalq.pipeline import Measured, identify, judge_cell, keep_estimates, keep_verdict, measure
from evalq.preparation import Prepared, as_baseline, baseline_scheme, prepare
from evalq.records import Estimate, Verdict
from evalq.report.progress import QuietWatcher
from evalq.search.kept import BEGUN, PASSED, KeptDocuments, Series, text_hash


@dataclass(frozen=True)
class Split:
    """Documents of the perplexity task: the first `search` for the search, the next `final` for the last verdict."""

    search: int
    final: int
    looks: tuple[int, ...]
    kept: tuple[str, ...] = ()  # hashes of the texts for the last verdict
    identities: Mapping[str, str] = field(default_factory=dict)  # of every task's data when the documents were divided


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
    sources = data.find_sources(config)
    source = sources.get(data.PERPLEXITY)
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
    seen = {"".join(text.split()) for text in texts[:search]}
    doubled = sum("".join(text.split()) in seen for text in texts[search:count])
    if doubled:
        raise ConfigError(
            f"{doubled} of the {final} documents kept for the last verdict are the same text as one of the search's; take doubled "
            f"documents out of {source.label}, so that the last verdict is on text that the search has not scored"
        )
    looks = list(config.search.looks) or [max(least, search // 3), max(least, 2 * search // 3), search]
    if looks[-1] != search or (sorted(set(looks)) != looks and config.search.looks):
        raise ConfigError(f"search.looks={looks} must rise and end at {search}, the documents of the search")
    kept = tuple(text_hash(text) for text in texts[search:count])
    identities = {task: found.identity for task, found in sources.items()}
    return Split(search, final, tuple(sorted(set(looks))), kept, identities)


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

        Errors: EvalqError when the source checkpoint cannot be had.
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
        verdict = judge(baseline.record, baseline.folder, candidate.record, candidate.folder, gate)
        if not verdict.checks:  # INVALID before anything was compared: it shows nothing, and no estimates are written
            if before is None:
                kept.withdraw(series, key)
        else:
            kept.settle(series, key, verdict.status)
        if before not in (None, BEGUN, PASSED, verdict.status):
            verdict = _first_stands(before, verdict)
        keep_verdict(candidate, verdict)  # after the notes, so that no file says PASS of what is not one
        if verdict.checks:
            keep_estimates(baseline, candidate, gate)
        return _proof(verdict, candidate, self.split.final), verdict

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
        for task, found in yardstick.sources.items():
            if found.identity != self.split.identities.get(task, found.identity):
                raise MeasurementError(
                    f"{found.label} changed while the search ran, so what was kept for the last verdict is not what it was; "
                    "run it again",
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


def _first_stands(status: str, verdict: Verdict) -> Verdict:
    """The verdict of what did not pass before on the same documents and is measured anew: the earlier answer stands."""
    status = status if status in EXIT_CODES else "INCONCLUSIVE"
    summary = (
        f"{status}: an earlier measurement of this candidate on these documents ended so, and that stands; measured again: "
        f"{verdict.summary}"
    )
    reasons = [summary, *verdict.reasons]
    code = EXIT_CODES[status]
    return dataclasses.replace(verdict, status=status, exit_code=code, warning=False, summary=summary, reasons=reasons)


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
