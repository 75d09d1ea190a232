"""The claims of the source articles beside what the records of a study say. What no record here shows stays open."""

from __future__ import annotations

from collections.abc import Callable

from evalq.records import Record
from evalq.report.page.view import KV_TOKENS, Candidate, Claim, Group, total_bytes

AGREES, DIFFERS, OPEN = "agrees", "differs", "open"
Answer = tuple[str, str]


def claims_of(group: Group) -> list[Claim]:
    """One row per claim, in the articles' order."""
    return [Claim(number, says, *answer(group)) for number, says, answer in _CLAIMS]


def _fp8_kv(one: Candidate) -> bool:
    return one.record.applied is not None and "fp8" in one.record.applied.kv_dtype_effective


def _fp8_weights(one: Candidate) -> bool:
    dtypes = one.record.ledger.weight_bytes_by_dtype if one.record.ledger else {}
    return any("float8" in name or "fp8" in name for name in dtypes)


def _usable(group: Group, *tests: Callable[[Candidate], bool]) -> list[Candidate]:
    return [one for one in group.candidates if one.record.status == "complete" and all(test(one) for test in tests)]


def _kv_halves(group: Group) -> Answer:
    base = group.baseline.ledger if group.baseline else None
    found = _usable(group, _fp8_kv)
    if base is None or not base.kv_bytes_per_token or not found:
        return OPEN, "no cell with an FP8 KV cache here"
    parts, shares = [], []
    for one in found:
        ledger = one.record.ledger
        if ledger is None or not ledger.kv_bytes_per_token:
            continue
        shares.append(ledger.kv_bytes_per_token / base.kv_bytes_per_token)
        parts.append(f"{one.name}: {ledger.kv_bytes_per_token:,} of {base.kv_bytes_per_token:,} bytes per token")
    if not shares:
        return OPEN, "the pool of the FP8 cells was not measured"
    return (AGREES if all(abs(share - 0.5) < 0.05 for share in shares) else DIFFERS), "; ".join(parts)


def _all_memory(group: Group) -> Answer:
    base = total_bytes(group.baseline.ledger) if group.baseline else None
    found = [(one, total_bytes(one.record.ledger)) for one in _usable(group, _fp8_kv, _fp8_weights)]
    shares = [(one.name, 1.0 - size / base) for one, size in found if size is not None and base]
    if not shares:
        return OPEN, "no cell with FP8 weights and FP8 KV here"
    said = "; ".join(f"{name}: {share:.1%} less" for name, share in shares)
    answer = AGREES if all(0.6 <= share <= 0.7 for _, share in shares) else DIFFERS
    return answer, f"{said} for weights and {KV_TOKENS:,} cached tokens (two bytes become one: never above 50 %)"


def _fp8_perplexity(group: Group) -> Answer:
    found = [one for one in group.candidates if _fp8_kv(one) or _fp8_weights(one)]
    parts: list[str] = []
    within: list[bool | None] = []  # None: the interval reaches over an end of the range
    for one in found:
        e = one.increase
        if e is None or e.value is None or e.low is None or e.high is None:
            continue
        parts.append(f"{one.name} {e.value:+.2%} [{e.low:+.2%}, {e.high:+.2%}], n={e.n}")
        outside = e.low > 0.015 or e.high < 0.005
        within.append(False if outside else True if e.low >= 0.005 and e.high <= 0.015 else None)
    if not parts:
        return OPEN, "no FP8 cell with a judged perplexity here"
    answer = DIFFERS if False in within else AGREES if all(within) else OPEN
    return answer, "; ".join(parts)


def _mixed(group: Group) -> Answer:
    found = [one for one in _usable(group) if one.name == "mixed-4-8"]
    base = group.baseline.ledger if group.baseline else None
    if not found:
        return OPEN, "mixed-4-8 was not measured here"
    one, ledger = found[0], found[0].record.ledger
    saved = None
    if base and ledger and base.weight_bytes and ledger.weight_bytes:
        saved = 1.0 - ledger.weight_bytes / base.weight_bytes
    losses = [c.estimate for c in one.verdict.checks if c.estimate and "acc" in c.metric] if one.verdict else []
    parts = [f"{saved:.1%} less weight memory"] if saved is not None else []
    parts += [
        f"{e.name.removesuffix('_difference')} {100 * e.value:+.2f} points [{100 * e.low:+.2f}, {100 * e.high:+.2f}], n={e.n}"
        for e in losses
        if e.value is not None and e.low is not None and e.high is not None
    ]
    if not parts:
        return OPEN, "neither its memory nor its accuracy was measured"
    lost = [e for e in losses if e.high is not None and e.high < -0.01]
    kept = losses and all(e.low is not None and e.low >= -0.01 for e in losses)
    if lost or (saved is not None and saved < 0.3):
        return DIFFERS, "; ".join(parts)
    return (AGREES if kept and saved is not None else OPEN), "; ".join(parts)


def _offload(group: Group) -> Answer:
    pairs = [one for one in group.candidates if "offload" in one.record.cell.engine]
    return OPEN, "measured with offload on, see speed" if pairs else "no cell with KV offload here"


def _attention_kinds(group: Group) -> Answer:
    return OPEN, "one model has one kind of attention; compare the ladders of two studies"


def _first_start(group: Group) -> Answer:
    cells = [group.baseline, *(one.record for one in _usable(group))]
    parts = [f"{cell.cell.quant} {_start(cell):.0f} s" for cell in cells if cell is not None and _start(cell)]
    return OPEN, f"starts as they were (cold or warm is not known): {', '.join(parts)}" if parts else "no start timed"


def _start(record: Record) -> float:
    return record.stage_seconds.get("start", 0.0)


def _rules(group: Group) -> Answer:
    refused = [one for one in group.candidates if one.record.failure is not None]
    said = "; ".join(f"{one.name}: {one.record.failure.kind}" for one in refused if one.record.failure)
    return OPEN, said or "every cell here could run; the rules are those of evalq plan --rules"


_CLAIMS: tuple[tuple[int, str, Callable[[Group], Answer]], ...] = (
    (1, "An FP8 KV cache halves KV memory", _kv_halves),
    (2, "FP8 weights with FP8 KV save 60 to 70 % of all memory", _all_memory),
    (3, "FP8 costs 0.5 to 1.5 % perplexity", _fp8_perplexity),
    (4, "mixed-4-8 loses less than 1 % accuracy and saves 35 % of memory", _mixed),
    (5, "KV offload to the host: 20 to 30 % more latency, twice the capacity", _offload),
    (6, "GQA is faster at low load, MLA steadier at high load", _attention_kinds),
    (7, "The first start with FP8 takes about 3 minutes", _first_start),
    (8, "Some models, schemes and devices do not go together", _rules),
)
