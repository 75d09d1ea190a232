"""The gate: two records and a policy in, one verdict out. Only numpy and pyarrow are needed."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evalq import __version__
from evalq.config import GateConfig
from evalq.errors import (
    EXIT_CONFIG,
    EXIT_INCONCLUSIVE,
    EXIT_MEASUREMENT,
    EXIT_PASS,
    EXIT_QUALITY_FAIL,
    RecordError,
)
from evalq.judge.comparable import (
    Difference,
    check_allow,
    differences,
    identical_values,
    same_effective_config,
    scheme_forced,
    unfinished,
)
from evalq.judge.complete import missing_measurements, required_metrics, required_tasks
from evalq.judge.conditions import condition_check
from evalq.judge.kv import blindness, kv_checks, pool_problem, reads_elsewhere, short_contexts
from evalq.judge.pairs import ItemPairs, Tables, document_pairs, item_pairs
from evalq.judge.perplexity import is_warning, perplexity_check
from evalq.judge.policy import NEVER_ALLOWED, Policy, checked_policy, flat_policy
from evalq.judge.tasks import (
    PERPLEXITY_TASK,
    accuracy_difference,
    flips,
    is_binary,
    mcnemar,
    non_inferior,
)
from evalq.records import SCHEMA_VERSION, VERDICTS, Check, Estimate, Record, Scalar, Verdict

EXIT_CODES = {
    "PASS": EXIT_PASS,
    "FAIL": EXIT_QUALITY_FAIL,
    "INCONCLUSIVE": EXIT_INCONCLUSIVE,
    "SUSPECT": EXIT_INCONCLUSIVE,
    "INVALID": EXIT_MEASUREMENT,
}
PRECEDENCE = ("INVALID", "FAIL", "SUSPECT", "INCONCLUSIVE", "PASS")


def judge(
    baseline: Record,
    baseline_folder: Path,
    candidate: Record,
    candidate_folder: Path,
    policy: GateConfig,
    allow: Sequence[str] = (),
    floor: Estimate | None = None,
) -> Verdict:
    """Judge `candidate` against `baseline`. `floor` is an A/A estimate (`evalq.judge.floor`), in the gate's metric.

    Errors: ConfigError for a bad policy or an `allow` that names no field. Everything else becomes a verdict.
    """
    rules = checked_policy(policy)
    check_allow(allow, sorted({*baseline.fingerprint, *candidate.fingerprint}))
    found = differences(baseline, candidate)
    excused = {*policy.allow, *allow} - set(NEVER_ALLOWED)
    case = _Case(baseline, candidate, rules, [d for d in found if d.field in excused])
    problems = [*unfinished(baseline, "baseline"), *unfinished(candidate, "candidate")]
    if candidate.failure is None:
        problems += [*pool_problem(baseline, candidate), *blindness(candidate)]
    if baseline.failure is None and candidate.failure is None:  # a cell that died has no whole fingerprint
        problems += [f"not comparable: {d}{_advice(d)}" for d in found if d.field not in excused]
    if problems:
        return case.invalid(problems)
    try:
        first, second = Tables.read(baseline, baseline_folder), Tables.read(candidate, candidate_folder)
        return _judge_tables(case, first, second, floor)
    except RecordError as error:
        return case.invalid([str(error)])


def _advice(difference: Difference) -> str:
    if difference.field in NEVER_ALLOWED:
        return ""
    return f"; measure the baseline anew, or accept the difference with --allow {difference.field}"


@dataclass(frozen=True)
class _Case:
    """One comparison: what every verdict about it repeats."""

    baseline: Record
    candidate: Record
    rules: Policy
    allowed: list[Difference]

    def verdict(self, status: str, warning: bool, reasons: list[str], checks: list[Check]) -> Verdict:
        ids = (self.baseline.record_id, self.candidate.record_id)
        allowed = [str(item) for item in self.allowed]
        names = f"{self.candidate.cell.quant} against {self.baseline.cell.quant}"
        summary = _summary(status, warning, names, reasons)
        scalars = self.rules.as_scalars()
        return _verdict(status, EXIT_CODES[status], warning, summary, reasons, checks, ids, scalars, allowed)

    def invalid(self, reasons: list[str], checks: Sequence[Check] = ()) -> Verdict:
        return self.verdict("INVALID", False, reasons, list(checks))


def _judge_tables(case: _Case, first: Tables, second: Tables, floor: Estimate | None) -> Verdict:
    """Judge two finished, comparable records. Errors: RecordError for rows that are missing or do not match."""
    rules = case.rules
    problems = [
        *missing_measurements(first, rules, "baseline", first),
        *missing_measurements(second, rules, "candidate", first),
        *_unequal_counts(case),
    ]
    if rules.source.aa_floor and (floor is None or floor.low is None or floor.high is None):
        problems.append("the policy wants an A/A floor and there is none; run +experiment=aa first")
    if problems:
        return case.invalid(problems)
    documents = document_pairs(first, second, PERPLEXITY_TASK)
    duplicate = same_effective_config(case.baseline, case.candidate, documents)
    if duplicate:
        return case.invalid([duplicate])
    checks = [perplexity_check(documents, rules, floor), *_task_checks(case, first, second)]
    sides = ((case.baseline, first.folder), (case.candidate, second.folder))
    checks += kv_checks(*sides, documents, rules)
    checks += [condition_check(item, case.baseline, case.candidate) for item in rules.conditions]
    suspicion = identical_values(case.baseline, case.candidate, documents)
    if reads_elsewhere(case.candidate):  # equal prefill scores are then what is expected of the scheme
        suspicion = None
    return _conclude(case, checks, suspicion, short_contexts(case.baseline, case.candidate, documents, PERPLEXITY_TASK))


def _unequal_counts(case: _Case) -> list[str]:
    """Tasks that the two sides scored to a different extent."""
    problems = []
    for task in required_tasks(case.rules):
        first, second = case.baseline.tasks.get(task), case.candidate.tasks.get(task)
        if first is None or second is None:
            continue
        for name in ("dataset_hash", "n", "left_out", "truncated", "window_tokens"):
            a, b = getattr(first, name), getattr(second, name)
            if a != b:
                problems.append(f"not comparable: {name} of {task}: baseline {a!r}, candidate {b!r}")
    return problems


def _task_checks(case: _Case, first: Tables, second: Tables) -> list[Check]:
    checks = []
    for task in required_tasks(case.rules):
        if task == PERPLEXITY_TASK:
            continue
        for metric in required_metrics(task, case.rules, case.baseline.tasks[task]):
            checks.append(_task_check(item_pairs(first, second, task, metric), task, metric, case.rules))
    return checks


def _task_check(pairs: ItemPairs, task: str, metric: str, rules: Policy) -> Check:
    """One accuracy against its margin; it advises unless the policy makes the margin required."""
    confidence = rules.source.confidence
    margin = rules.margins.get(task, rules.target)
    required = task in rules.source.required_margins
    if len(pairs.baseline) < 2:
        return Check(
            f"{task} {metric}", required, "INCONCLUSIVE", None, None, margin, f"{task} {metric}: one item only"
        )
    try:
        estimate = accuracy_difference(pairs, task, metric, confidence)
    except ValueError as error:
        raise RecordError(f"{task} {metric} cannot be estimated: {error}") from error
    status = non_inferior(estimate, margin)
    value, low, high = (100.0 * (x or 0.0) for x in (estimate.value, estimate.low, estimate.high))
    reason = f"{task} {metric} {value:+.2f} points [{low:+.2f}, {high:+.2f}], margin {margin:.2%}"
    if status == "INCONCLUSIVE":
        reason += f": {estimate.n} items cannot settle it"
    if is_binary(pairs):
        changed, test = flips(pairs, task, metric, confidence), mcnemar(pairs.baseline, pairs.candidate)
        reason += f"; {test.lost + test.won} items flipped ({changed.note}), McNemar p={test.p_two_sided:.3g}"
    return Check(f"{task} {metric}", required, status, estimate, None, margin, reason)


def _conclude(case: _Case, checks: list[Check], suspicion: str | None, notes: Sequence[str]) -> Verdict:
    """The worst required check decides; a PASS needs every required check to pass."""
    required = [check for check in checks if check.required]
    statuses = {check.status for check in required} | ({"SUSPECT"} if suspicion else set())
    status = next(name for name in PRECEDENCE if name in statuses)
    warning = status == "PASS" and any(is_warning(check) for check in required)
    reasons = [check.reason for check in required if check.status == status]
    if suspicion and status == "SUSPECT":
        reasons.append(suspicion)
    if warning and case.rules.source.strict:
        reasons.append("the policy is strict: above the target is a failure")
        status, warning = "FAIL", False
    reasons += [f"{check.reason} ({check.status})" for check in required if check.reason not in reasons]
    reasons += [f"advice: {check.reason}" for check in checks if not check.required]
    reasons += [f"note: {check.estimate.note}" for check in required if check.estimate and check.estimate.note]
    reasons += _left_out_notes(case)
    reasons += [f"note: {text}" for text in [*notes, *scheme_forced(case.baseline, case.candidate)]]
    reasons += [f"allowed difference: {item}" for item in case.allowed]
    return case.verdict(status, warning, reasons, checks)


def _left_out_notes(case: _Case) -> list[str]:
    scores = [case.candidate.tasks[task] for task in required_tasks(case.rules)]
    return [
        f"note: {s.left_out} of {s.n + s.left_out} of {s.task} left out on both sides" for s in scores if s.left_out
    ]


def _summary(status: str, warning: bool, names: str, reasons: Sequence[str]) -> str:
    word = "PASS with a warning" if warning else status
    return f"{word}: {names}: {reasons[0]}." if reasons else f"{word}: {names}."


def _verdict(
    status: str,
    exit_code: int,
    warning: bool,
    summary: str,
    reasons: list[str],
    checks: list[Check],
    ids: tuple[str | None, str | None],
    policy: dict[str, Scalar],
    allowed: list[str],
) -> Verdict:
    return Verdict(
        schema_version=SCHEMA_VERSION,
        status=status,
        exit_code=exit_code,
        warning=warning,
        summary=summary,
        reasons=reasons,
        checks=checks,
        baseline_id=ids[0],
        candidate_id=ids[1],
        policy=policy,
        allowed_differences=allowed,
        evalq_version=__version__,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def no_verdict(
    reasons: list[str],
    policy: GateConfig,
    ids: tuple[str | None, str | None] = (None, None),
    exit_code: int = EXIT_MEASUREMENT,
) -> Verdict:
    """The INVALID verdict of a comparison that could not even begin: no baseline, unreadable record, bad request."""
    summary = _summary("INVALID", False, "nothing was judged", reasons)
    return _verdict("INVALID", exit_code, False, summary, reasons, [], ids, flat_policy(policy), [])


def contradiction(verdict: Verdict) -> str | None:
    """Why a stored verdict cannot be what the judge wrote; None when it can. This is no signature."""
    statuses = [verdict.status, *(check.status for check in verdict.checks)]
    unknown = [status for status in statuses if status not in VERDICTS]
    if unknown:
        return f"status {unknown[0]!r} is not one of {', '.join(VERDICTS)}"
    codes = {EXIT_CODES[verdict.status]} | ({EXIT_CONFIG} if verdict.status == "INVALID" else set())
    if verdict.exit_code not in codes:
        return f"{verdict.status} never has exit code {verdict.exit_code}"
    if verdict.status != "PASS":
        return None
    required = [check for check in verdict.checks if check.required]
    if not required:
        return "PASS without any required check"
    failed = next((check for check in required if check.status != "PASS"), None)
    if failed is not None:
        return f"PASS although {failed.metric} is {failed.status}"
    strict_warning = verdict.policy.get("strict") is True and (verdict.warning or any(map(is_warning, required)))
    return "PASS with a warning under a strict policy" if strict_warning else None
