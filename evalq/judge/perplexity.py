"""The gate's metric: the paired perplexity increase against the target and the limit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from evalq.judge.paired import GateInterval, Ratio, as_increase, gate_interval
from evalq.judge.pairs import DocumentPairs
from evalq.judge.policy import METRIC_UNITS, Policy
from evalq.judge.sequential import look_confidence, next_look
from evalq.plan.power import documents_to_decide
from evalq.records import Check, Estimate


def perplexity_check(pairs: DocumentPairs, policy: Policy, floor: Estimate | None) -> Check:
    """Judge the interval of ln(perplexity ratio) against ln(1 + target) and ln(1 + limit); nothing is rounded."""
    metric, gate = policy.source.metric, policy.source
    n = len(pairs.d)
    if n < 2:
        return _too_few(metric, n, policy)
    weights = pairs.counts[METRIC_UNITS[metric]]
    level = look_confidence(gate.looks, n, gate.confidence)
    try:
        found, interval = gate_interval(pairs.d, weights, level)
    except ValueError as error:
        return _check(metric, "INVALID", None, policy, f"cannot be estimated: {error}")
    low, high = interval.low, interval.high
    method = found.method + (f"; look {_look(gate.looks, n)}" if gate.looks else "")
    estimate = as_increase(f"{metric}_increase", found.value, low, high, gate.confidence, n, method)
    estimate = dataclasses.replace(estimate, note=_notes(found, interval, floor))
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return _check(metric, "INVALID", estimate, policy, "the perplexity ratio is too large to be a number")
    status, reason = _decide(found, low, high, policy)
    p_fail = found.p_above(math.log1p(policy.limit))
    if n < gate.min_documents:
        return _too_few(metric, n, policy, estimate)
    return dataclasses.replace(_check(metric, status, estimate, policy, reason), p_fail=p_fail)


def _decide(found: Ratio, low: float, high: float, policy: Policy) -> tuple[str, str]:
    """Status and reason from the interval (low, high) of ln(ratio)."""
    target, limit = math.log1p(policy.target), math.log1p(policy.limit)
    said = f"{_percent(found.value)} [{_percent(low)}, {_percent(high)}]"
    if high < 0.0 and found.value < math.log1p(-min(policy.suspect_improvement, 1.0 - 1e-12)):
        return "SUSPECT", (
            f"{said}: better than the baseline by more than {policy.suspect_improvement:.2%} and than noise; "
            "a quantised model is not, so look for a swapped or broken measurement"
        )
    if high <= target:
        return "PASS", f"{said}: the upper bound is within the target {policy.target:.2%}"
    if high <= limit:
        return (
            "PASS",
            f"{said}: the upper bound is above the target {policy.target:.2%} and within the limit {policy.limit:.2%}",
        )
    if low > limit:
        return "FAIL", f"{said}: the lower bound is above the limit {policy.limit:.2%}"
    more = documents_to_decide(found.value, found.se, found.clusters, limit, policy.source.confidence)
    following = next_look(policy.source.looks, found.clusters)
    advice = (
        "no number of documents would decide it"
        if more is None
        else f"about {more} more documents like these would decide"
    )
    plan = "" if following is None else f", and the next planned look is at {following}"
    return "INCONCLUSIVE", f"{said}: the limit {policy.limit:.2%} lies inside the interval; {advice}{plan}"


def is_warning(check: Check) -> bool:
    """Whether a PASS is above the target and only within the limit."""
    estimate = check.estimate
    if check.status != "PASS" or estimate is None or estimate.high is None or check.target is None:
        return False
    return math.log1p(estimate.high) > math.log1p(check.target)


def _look(looks: Sequence[int], n: int) -> str:
    taken = sum(1 for count in looks if count < n) + 1
    return f"{taken}, {n} of {looks[-1]} planned documents"


def _notes(found: Ratio, interval: GateInterval, floor: Estimate | None) -> str:
    parts = []
    if interval.differ:
        student, boot = ([_percent(x) for x in bounds] for bounds in (interval.student, interval.bootstrap))
        parts.append(
            f"the document bootstrap (symmetric, studentised) says [{', '.join(boot)}], more than a tenth of the width "
            f"from [{', '.join(student)}], which decides"
        )
    if floor is not None and floor.low is not None and floor.high is not None:
        width = max(abs(floor.low), abs(floor.high))
        inside = abs(math.expm1(found.value)) <= width
        parts.append(f"A/A floor ±{width:.4%}" + (": the difference is inside it, that is noise" if inside else ""))
    return "; ".join(parts)


def _too_few(metric: str, n: int, policy: Policy, estimate: Estimate | None = None) -> Check:
    wanted = policy.source.min_documents
    reason = f"{n} documents are too few to judge; the policy wants {wanted}, so {wanted - n} more"
    return _check(metric, "INCONCLUSIVE", estimate, policy, reason)


def _check(metric: str, status: str, estimate: Estimate | None, policy: Policy, reason: str) -> Check:
    return Check(metric, True, status, estimate, policy.target, policy.limit, f"{metric} {reason}")


def _percent(log_value: float) -> str:
    try:
        return f"{math.expm1(log_value):+.3%}"
    except OverflowError:
        return "more than can be written"
