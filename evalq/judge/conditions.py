"""Joint conditions of a policy on memory and speed, each as a check against a share of the baseline's figure."""

from __future__ import annotations

import math

from evalq.judge.policy import LOAD_QUANTITIES, Condition, ledger_figure, load_figure
from evalq.loads.results import Level, LoadResult, short_name
from evalq.loads.validity import unlike_levels
from evalq.records import Check, Estimate, Load, Record

Range = tuple[float, float, float]  # middle, low, high
Measured = tuple[LoadResult, Level]
LOAD_SHAPE = ("requests", "input_tokens_per_request", "output_tokens_per_request", "concurrency")


def condition_check(condition: Condition, baseline: Record, candidate: Record) -> Check:
    """Compare the candidate's share of the baseline with the condition; INVALID when either was not measured.

    A speed has a range of repeats: the condition holds when it holds for the whole range of the ratio, fails when it
    fails for all of it, and is INCONCLUSIVE between.
    """
    ranges = []
    for side, record in (("baseline", baseline), ("candidate", candidate)):
        found, reason = _figure(condition, record)
        if found is None:
            return _check(condition, "INVALID", None, f"{condition.text}: the {side} {reason}")
        ranges.append(found)
    unlike = _unlike_loads(condition, baseline, candidate)
    if unlike:
        return _check(condition, "INVALID", None, f"{condition.text}: {unlike}")
    (base, base_low, base_high), (cand, cand_low, cand_high) = ranges
    share, low, high = cand / base, cand_low / base_high, cand_high / base_low
    inside = high <= condition.share if condition.at_most else low >= condition.share
    outside = low > condition.share if condition.at_most else high < condition.share
    status = "PASS" if inside else "FAIL" if outside else "INCONCLUSIVE"
    spread = "" if low == high else f" (repeats span {low:.1%} to {high:.1%})"
    n = 1 if low == high else 2
    estimate = Estimate(f"{condition.quantity}_share", share, low, high, 1.0, n, "ratio of figures, range of repeats")
    word = {"PASS": "holds", "FAIL": "does not hold", "INCONCLUSIVE": "lies inside the spread of repeats"}[status]
    return _check(condition, status, estimate, f"{condition.text} {word}: {share:.2%} of the baseline{spread}")


def _check(condition: Condition, status: str, estimate: Estimate | None, reason: str) -> Check:
    return Check(f"condition {condition.quantity}", True, status, estimate, None, condition.share, reason)


def _figure(condition: Condition, record: Record) -> tuple[Range | None, str]:
    if condition.quantity in LOAD_QUANTITIES:
        return _load_range(condition, record)
    value = ledger_figure(record.ledger, condition.quantity)
    if value is None or not math.isfinite(value) or value <= 0:
        return None, f"has no {condition.quantity} in its memory ledger (found {value})"
    return (value, value, value), ""


def _unlike_loads(condition: Condition, baseline: Record, candidate: Record) -> str | None:
    """Why the two sides' loads are not one load; no fingerprint holds their lengths."""
    first, second = (load_figure(record.loads, condition.load or "") for record in (baseline, candidate))
    if condition.quantity not in LOAD_QUANTITIES or first is None or second is None:
        return None
    for name in LOAD_SHAPE:
        a, b = getattr(first, name), getattr(second, name)
        if a != b:
            return f"not one load: {name} is {a} in the baseline and {b} in the candidate; measure both alike"
    problems = _unlike_results(*(_level(record, load) for record, load in ((baseline, first), (candidate, second))))
    return f"not one load: {problems[0]}; measure both alike" if problems else None


def _unlike_results(first: Measured | None, second: Measured | None) -> list[str]:
    """What the loads' own results say against comparing them: another rate, another kind, another start."""
    if first is None or second is None:
        return []
    problems = [
        f"{name} is {getattr(first[0], name)} in one cell and {getattr(second[0], name)} in the other"
        for name in ("kind", "start")
        if getattr(first[0], name) != getattr(second[0], name)
    ]
    return [*problems, *unlike_levels(first[1], second[1])]


def _level(record: Record, load: Load) -> Measured | None:
    """The level behind a load in short; None in records from before there were results."""
    levels = ((result, level) for result in record.load_results.values() for level in result.levels)
    return next((pair for pair in levels if short_name(*pair) == load.name), None)


def _load_range(condition: Condition, record: Record) -> tuple[Range | None, str]:
    load = load_figure(record.loads, condition.load or "")
    if load is None:
        return None, f"has no load {condition.load}; measured: {', '.join(record.loads) or 'none'}"
    if not load.valid:
        return None, f"has an invalid load {load.name}: {'; '.join(load.reasons)}"
    value = getattr(load, condition.quantity)
    low, high = value, value
    if condition.quantity == "output_tokens_per_second":
        low = value if load.output_tokens_per_second_low is None else load.output_tokens_per_second_low
        high = value if load.output_tokens_per_second_high is None else load.output_tokens_per_second_high
    if any(x is None or not math.isfinite(x) or x <= 0 for x in (value, low, high)):
        return None, f"has no finite {condition.quantity} for load {load.name} (found {value})"
    if not low <= value <= high:
        return None, f"has a {condition.quantity} of {value} for load {load.name} outside its repeats {low} to {high}"
    return (value, low, high), ""
