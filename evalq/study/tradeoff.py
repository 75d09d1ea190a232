"""Quality against memory: which cells another one beats, and which scheme may be shipped, in words."""

from __future__ import annotations

from collections.abc import Sequence

from evalq.records import Estimate, Ledger, Load, Record
from evalq.report.page.view import Candidate, Group, Tradeoff

KV_TOKENS = 32_768  # cached tokens at which weights and KV are added up, so that a KV scheme shows on the same axis
BASELINE = Estimate("increase", 0.0, 0.0, 0.0, 1.0, 0, "the yardstick itself")


def total_bytes(ledger: Ledger | None, tokens: int = KV_TOKENS) -> int | None:
    """Weights and the KV cache of `tokens` tokens; None when either was not measured."""
    if ledger is None or ledger.weight_bytes is None or ledger.kv_bytes_per_token is None:
        return None
    return ledger.weight_bytes + tokens * ledger.kv_bytes_per_token


def speed_of(record: Record) -> Load | None:
    """The load that schemes are compared by: the valid one with the most requests at once."""
    valid = [load for load in record.loads.values() if load.valid and load.output_tokens_per_second is not None]
    return max(valid, key=lambda load: load.concurrency, default=None)


def tradeoff_of(group: Group) -> list[Tradeoff]:
    """Every cell with a memory ledger, by bytes; the baseline is one of them."""
    cells: list[tuple[str, int, Estimate | None, float | None]] = []
    sides: list[tuple[Record | None, Estimate | None]] = [(group.baseline, BASELINE)]
    sides += [(one.record, one.increase) for one in group.candidates if one.record.status == "complete"]
    for record, increase in sides:
        size = total_bytes(record.ledger) if record else None
        if record is not None and size is not None:
            load = speed_of(record)
            cells.append((record.cell.quant, size, increase, load.output_tokens_per_second if load else None))
    placed = [
        Tradeoff(name, size, increase, speed, *_standing(name, size, increase, cells))
        for name, size, increase, speed in cells
    ]
    return sorted(placed, key=lambda one: one.total_bytes)


def _standing(
    name: str, size: int, increase: Estimate | None, cells: Sequence[tuple[str, int, Estimate | None, float | None]]
) -> tuple[str, str]:
    """Dominated: another cell needs no more memory and its whole interval is better. Tied: no more memory, intervals overlap."""
    if increase is None or increase.low is None or increase.high is None:
        return "open", "no interval of its quality"
    tied = ""
    for other, bytes_, quality, _ in cells:
        if other == name or quality is None or quality.low is None or quality.high is None or bytes_ > size:
            continue
        if quality.high < increase.low:
            return "dominated", f"{other} is better and no larger"
        if bytes_ < size and quality.low <= increase.high:
            tied = other
    return ("tied", f"{tied} is smaller and not shown to be worse") if tied else ("front", "no cell beats it in both")


def recommendation(group: Group, cells: Sequence[Tradeoff]) -> str:
    """One sentence: what may be shipped and why."""
    if not group.candidates:
        return "Only the baseline was measured; there is no scheme to judge."
    passed = {one.name for one in group.candidates if one.verdict is not None and one.verdict.status == "PASS"}
    sizes = {one.name: one.total_bytes for one in cells}
    # The smallest; of equal ones the better.
    able = [
        (one.total_bytes, one.increase.value or 0.0, one.name) for one in cells if one.name in passed and one.increase
    ]
    choice = min(able)[2] if able else None
    if choice is not None:
        return _ship(choice, group, sizes)
    if passed:
        return f"{', '.join(sorted(passed))} may be shipped; its memory was not measured."
    if all(one.verdict is None for one in group.candidates):
        return "These records measured memory and speed only; nothing here says that a scheme may be shipped."
    undecided = [one.name for one in group.candidates if one.verdict is not None and one.verdict.exit_code == 3]
    more = f" {_words(undecided)} cannot be decided by these data." if undecided else ""
    return f"Ship none of these schemes: the 16-bit baseline is what stays within the budget.{more}"


def _ship(choice: str, group: Group, sizes: dict[str, int]) -> str:
    candidate: Candidate = next(one for one in group.candidates if one.name == choice)
    warning = " It passes with a warning: above the target, within the limit." if candidate.verdict.warning else ""  # type: ignore[union-attr]
    base = sizes.get(group.baseline.cell.quant) if group.baseline else None
    saved = f", which takes {1 - sizes[choice] / base:.0%} less memory than 16 bit" if base else ""
    others = len([one for one in group.candidates if one.verdict and one.verdict.status == "PASS"]) - 1
    rest = f" {others} other scheme{'s' if others > 1 else ''} passed and need more memory." if others else ""
    return f"Ship {choice}{saved} at {KV_TOKENS:,} cached tokens.{warning}{rest}"


def _words(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
