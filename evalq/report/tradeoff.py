"""Which cells are worth having: quality against memory against speed, with differences within noise counted as none.

a dominates b when a is better than b beyond noise on one axis and worse beyond noise on none. Cells that differ beyond noise on no
axis are tied: both are kept. Ties are not transitive, so domination may go in a circle; who is in one is kept too, and the front is
never empty.

quality  interval of the paired perplexity increase of one cell over the other, the same documents; it must exclude 0
memory   weights and the KV cache of `concurrency` requests of `context` tokens; counted, so any difference counts
speed    output tokens per second; the ranges of the repeats must be apart, and by SPEED_NOISE at least
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evalq.kvrecord import CONTEXT_WORDS
from evalq.records import Estimate, Record, Verdict

SPEED_NOISE = 0.02  # a share; repeats within one engine start agree better than two starts do
AXES = ("quality", "memory", "speed")

# Interval of the relative increase of the first cell over the second; None where it is not known.
PairInterval = Callable[[str, str], tuple[float, float] | None]


@dataclass(frozen=True)
class Workload:
    """What the memory of a cell is asked for: so many requests at once, of so many tokens each."""

    context: int = 4096
    concurrency: int = 16


@dataclass(frozen=True)
class Point:
    """One cell as the trade-off sees it. Bytes, tokens per second; increase over the baseline as a share."""

    name: str
    model: str
    gpu: str
    is_baseline: bool
    status: str  # of the verdict; BASELINE, or FAILED where nothing was measured
    releasable: bool
    increase: Estimate | None
    memory_bytes: int | None
    speed: float | None
    speed_low: float | None
    speed_high: float | None
    caution: str = ""  # what the verdict does not cover, in the judge's words


@dataclass(frozen=True)
class Placed:
    """A point and its place: front, dominated, or unplaced where an axis was not measured."""

    point: Point
    place: str
    by: list[str] = field(default_factory=list)  # cells that dominate it
    tied: list[str] = field(default_factory=list)  # cells it cannot be told apart from, on any axis
    reason: str = ""


def point_of(name: str, record: Record, verdict: Verdict | None, workload: Workload) -> Point:
    """The point of a measured cell."""
    load = next((load for load in record.loads.values() if load.valid), None)
    ledger = record.ledger
    memory = None
    if ledger is not None and ledger.weight_bytes is not None and ledger.kv_bytes_per_token is not None:
        memory = ledger.weight_bytes + ledger.kv_bytes_per_token * workload.context * workload.concurrency
    checks = verdict.checks if verdict else []
    return Point(
        name=name,
        model=record.cell.model,
        gpu=record.cell.gpu,
        is_baseline=record.cell.is_baseline,
        status=verdict.status if verdict else "BASELINE" if record.cell.is_baseline else "FAILED",
        releasable=verdict is not None and verdict.exit_code == 0,
        increase=next((c.estimate for c in checks if c.estimate and "perplexity" in c.metric), None),
        memory_bytes=memory,
        speed=load.output_tokens_per_second if load else None,
        speed_low=load.output_tokens_per_second_low if load else None,
        speed_high=load.output_tokens_per_second_high if load else None,
        caution=next((text.removeprefix("note: ") for text in verdict.reasons if CONTEXT_WORDS in text), "")
        if verdict
        else "",
    )


def front(points: Sequence[Point], quality: PairInterval) -> list[Placed]:
    """Place every point among those of its model and GPU, in the order given."""
    placed: dict[int, Placed] = {}
    for members in _by_place(points).values():
        indices = [i for i in members if _missing(points[i]) == []]
        for i in members:
            missing = _missing(points[i])
            if missing:
                placed[i] = Placed(points[i], "unplaced", reason=f"{', '.join(missing)} not measured")
        signs = {(i, j): _compare(points[i], points[j], quality) for i in indices for j in indices if i != j}
        reach = _reach(indices, signs)
        for i in indices:
            by = [j for j in indices if j != i and _dominates(signs[j, i])]
            tied = [points[j].name for j in indices if j != i and not any(signs[i, j])]
            beaten = any(j in reach[i] for j in indices if i not in reach[j])
            names = [points[j].name for j in by if i not in reach[j]] or [points[j].name for j in by]
            placed[i] = Placed(points[i], "dominated" if beaten else "front", names if beaten else [], tied)
    return [placed[i] for i in range(len(points))]


def _by_place(points: Sequence[Point]) -> dict[tuple[str, str], list[int]]:
    places: dict[tuple[str, str], list[int]] = {}
    for i, point in enumerate(points):
        places.setdefault((point.model, point.gpu), []).append(i)
    return places


def _missing(point: Point) -> list[str]:
    known = {
        "quality": point.is_baseline or point.increase is not None,
        "memory": point.memory_bytes is not None,
        "speed": point.speed is not None,
    }
    return [axis for axis in AXES if not known[axis]]


def _compare(a: Point, b: Point, quality: PairInterval) -> tuple[int, int, int]:
    """Per axis: 1 = a is better than b beyond noise, -1 = worse, 0 = tied."""
    return _quality_sign(a, b, quality), _memory_sign(a, b), _speed_sign(a, b)


def _quality_sign(a: Point, b: Point, quality: PairInterval) -> int:
    interval = quality(a.name, b.name)
    if interval is None:
        return 0
    low, high = interval
    return 1 if high < 0.0 else -1 if low > 0.0 else 0


def _memory_sign(a: Point, b: Point) -> int:
    assert a.memory_bytes is not None
    assert b.memory_bytes is not None
    return (a.memory_bytes < b.memory_bytes) - (a.memory_bytes > b.memory_bytes)


def _speed_sign(a: Point, b: Point) -> int:
    a_low, a_high = _range(a)
    b_low, b_high = _range(b)
    return (a_low > b_high) - (b_low > a_high)


def _range(point: Point) -> tuple[float, float]:
    assert point.speed is not None
    half = SPEED_NOISE / 2
    low = point.speed if point.speed_low is None else min(point.speed, point.speed_low)
    high = point.speed if point.speed_high is None else max(point.speed, point.speed_high)
    return min(low, point.speed * (1 - half)), max(high, point.speed * (1 + half))


def _dominates(signs: tuple[int, int, int]) -> bool:
    return max(signs) > 0 and min(signs) >= 0


def _reach(indices: Sequence[int], signs: dict[tuple[int, int], tuple[int, int, int]]) -> dict[int, set[int]]:
    """For each point, all that dominate it, directly or through others."""
    above = {i: {j for j in indices if j != i and _dominates(signs[j, i])} for i in indices}
    reach: dict[int, set[int]] = {}
    for i in indices:
        found, todo = set[int](), list(above[i])
        while todo:
            j = todo.pop()
            if j not in found:
                found.add(j)
                todo.extend(above[j])
        reach[i] = found
    return reach


@dataclass(frozen=True)
class Recommendation:
    """One cell per model and GPU, and why. `name` is the baseline's where no scheme may ship; None where nothing can be said."""

    model: str
    gpu: str
    name: str | None
    text: str


def recommendations(placed: Sequence[Placed], workload: Workload) -> list[Recommendation]:
    """One for each model and GPU, in the order given."""
    places: dict[tuple[str, str], list[Placed]] = {}
    for item in placed:
        places.setdefault((item.point.model, item.point.gpu), []).append(item)
    return [_recommend(model, gpu, items, workload) for (model, gpu), items in places.items()]


def _recommend(model: str, gpu: str, items: Sequence[Placed], workload: Workload) -> Recommendation:
    baseline = next((item.point for item in items if item.point.is_baseline), None)
    if baseline is None:
        return Recommendation(
            model, gpu, None, f"{model} on {gpu}: no baseline was measured, so nothing can be advised."
        )
    candidates = [item for item in items if item.place == "front" and item.point.releasable]
    gains = {item.point.name: _gain(item.point, baseline) for item in candidates}
    best = max(candidates, key=lambda item: gains[item.point.name], default=None)
    if best is None or gains[best.point.name] <= 1.0 + SPEED_NOISE:
        return Recommendation(model, gpu, baseline.name, _keep_baseline(model, gpu, items))
    return Recommendation(model, gpu, best.point.name, _ship(model, gpu, best, baseline, items, workload))


def _gain(point: Point, baseline: Point) -> float:
    """Memory saved times speed won: 2 = half the memory at the same speed, or twice the speed in the same memory."""
    assert point.memory_bytes is not None
    assert point.speed is not None
    memory = (baseline.memory_bytes or point.memory_bytes) / point.memory_bytes
    return memory * (point.speed / baseline.speed if baseline.speed else 1.0)


def _ship(model: str, gpu: str, best: Placed, baseline: Point, items: Sequence[Placed], workload: Workload) -> str:
    point = best.point
    parts = [f"{model} on {gpu}: ship {point.name}."]
    if point.increase is not None and point.increase.value is not None:
        parts.append(f"It is within the budget (perplexity {_percent(point.increase)} over the baseline).")
    parts.append(_against(point, baseline, workload))
    if point.caution:
        parts.append(f"But {point.caution}.")
    rivals = [
        item.point for item in items if item.point.releasable and item is not best and item.point.name not in best.tied
    ]
    if best.tied:
        parts.append(f"It cannot be told apart from {_listed(best.tied)}, on any axis.")
    if rivals:
        parts.append(f"{_listed([rival.name for rival in rivals])} pass too and bring less of memory times speed.")
    refused = [item.point.name for item in items if item.point.status in ("FAIL", "INVALID", "SUSPECT")]
    if refused:
        parts.append(f"Not to be shipped: {_listed(refused)}.")
    return " ".join(parts)


def _against(point: Point, baseline: Point, workload: Workload) -> str:
    assert point.memory_bytes is not None
    text = []
    if baseline.memory_bytes:
        share = 1.0 - point.memory_bytes / baseline.memory_bytes
        load = f"{workload.concurrency} requests of {workload.context:,} tokens"
        text.append(f"it needs {abs(share):.0%} {'less' if share >= 0 else 'more'} memory for {load}")
    if point.speed is not None and baseline.speed:
        tied = _speed_sign(point, baseline) == 0
        text.append("is as fast" if tied else f"runs at {point.speed / baseline.speed:.2f} times the speed")
    return f"Against the baseline {' and '.join(text)}." if text else ""


def _keep_baseline(model: str, gpu: str, items: Sequence[Placed]) -> str:
    undecided = [item.point.name for item in items if item.point.status == "INCONCLUSIVE"]
    unmeasured = [item.point.name for item in items if item.point.releasable and item.place == "unplaced"]
    passing = [item.point.name for item in items if item.point.releasable and item.place != "unplaced"]
    if passing:
        many = len(passing) > 1
        why = (
            f"{_listed(passing)} {'pass and save' if many else 'passes and saves'} neither memory nor time worth having"
        )
    elif unmeasured:
        why = f"{_listed(unmeasured)} pass, but memory or speed was not measured, so they cannot be placed"
    elif undecided:
        why = "no scheme passes yet"
    else:
        why = "no scheme passes the gate"
    more = f" Undecided: {_listed(undecided)}; more documents would tell (gate.extend=true)." if undecided else ""
    return f"{model} on {gpu}: keep the unquantised model; {why}.{more}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _percent(estimate: Estimate) -> str:
    value = f"{100 * (estimate.value or 0.0):+.2f} %"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{100 * estimate.low:+.2f}, {100 * estimate.high:+.2f}]"
