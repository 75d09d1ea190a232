"""How figures are written for people. Bytes inside, GiB only here; nothing is compared after this."""

from __future__ import annotations

from evalq.records import Check, Estimate, Verdict

GIB = 1024**3
COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "SUSPECT": "magenta", "INVALID": "red"}
ABSENT = "-"


def percent(value: float | None, digits: int = 2) -> str:
    """A share as a signed percent."""
    return ABSENT if value is None else f"{100.0 * value:+.{digits}f} %"


def interval(estimate: Estimate | None, digits: int = 2) -> str:
    """An estimate of a share with its interval, in percent."""
    if estimate is None or estimate.value is None:
        return ABSENT
    if estimate.low is None or estimate.high is None:
        return percent(estimate.value, digits)
    return f"{percent(estimate.value, digits)} [{100 * estimate.low:+.{digits}f}, {100 * estimate.high:+.{digits}f}]"


def size(value: float | None) -> str:
    """Bytes as GiB, MiB, KiB or B."""
    if value is None:
        return ABSENT
    for unit, factor in (("GiB", GIB), ("MiB", 1024**2), ("KiB", 1024)):
        if abs(value) >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value:.0f} B"


def verdict_word(verdict: Verdict) -> str:
    """The status, with the warning said aloud."""
    return "PASS (warning)" if verdict.warning and verdict.status == "PASS" else verdict.status


def limits(check: Check) -> str:
    """Target and limit of a check, where it has them."""
    parts = [
        f"{name} {100 * value:.4g} %"
        for name, value in (("target", check.target), ("limit", check.limit))
        if value is not None
    ]
    return ", ".join(parts) or ABSENT
