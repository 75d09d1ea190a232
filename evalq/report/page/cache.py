"""The KV cache: is the quantised cache read at all, what it costs by position, and which needles are found."""

from __future__ import annotations

from typing import Any

from evalq.report.page.blocks import Block, Chart, Table, Text, Word
from evalq.report.page.charts import colour_of, heat_map, lines_by
from evalq.report.page.quality import names_of
from evalq.report.page.view import CacheView, Candidate, Group
from evalq.report.words import ABSENT, interval

READS = {"yes": Word("yes", "pass"), "only across chunks": Word("only across chunks", "warn"), "no": Word("no", "fail")}
PATHS = {"decode": "Decode path: every step reads the cache", "long": "Long documents"}


def cache_section(group: Group) -> list[Block]:
    """Empty where no record asked about its cache."""
    found = [one for one in group.candidates if one.cache is not None]
    if not found:
        return []
    blocks: list[Block] = [*_sensitivity(found)]
    for path, title in PATHS.items():
        blocks += _path(group, found, path, title)
    blocks += _needles(found)
    blocks += _continuations(found)
    notes = [f"{one.name}: {note}" for one in found for note in (one.cache.missing if one.cache else [])]
    return [*blocks, *(Text(note, "note") for note in dict.fromkeys(notes))]


def _views(found: list[Candidate]) -> list[tuple[str, CacheView]]:
    return [(one.name, one.cache) for one in found if one.cache is not None]


def _sensitivity(found: list[Candidate]) -> list[Block]:
    rows = []
    for name, view in _views(found):
        s = view.report.sensitivity
        if s is None:
            continue
        moved = ", ".join(f"{state}: {value:.3g}" for state, value in s.moved_nats.items())
        words = (READS.get(s.prefill, Word(s.prefill)), READS.get(s.decode, Word(s.decode)))
        rows.append((name, s.kv_dtype, *words, s.attention_backend, f"{s.noise_nats:.3g}", moved, f"{s.tokens:,}"))
    if not rows:
        return []
    columns = (
        "scheme",
        "KV dtype",
        "prefill reads it",
        "decode reads it",
        "attention",
        "noise, nats",
        "moved by, nats per token",
        "n tokens",
    )
    table = Table("Do scores react when the cache is made absurd?", columns, rows, frozenset({5, 7}))
    text = "A scheme whose scores never read the quantised cache is judged blind, and INVALID for the gate."
    return [table, Text(text, "note")]


def _path(group: Group, found: list[Candidate], path: str, title: str) -> list[Block]:
    drawn: list[dict[str, Any]] = []
    rows = []
    for name, view in _views(found):
        for bucket in view.buckets.get(path, []):
            span = f"{bucket.low:,}-{bucket.high:,}"
            e = bucket.increase
            rows.append(
                (
                    f"{name}, {span}",
                    interval(e),
                    f"{bucket.mean_kld:.3g}",
                    f"{bucket.same_top1:.2%}",
                    f"{bucket.tokens:,}",
                )
            )
            if e is not None and e.value is not None and e.low is not None and e.high is not None:
                drawn.append({"name": name, "x": span, "y": 100 * e.value, "low": 100 * e.low, "high": 100 * e.high})
    if not rows:
        return []
    columns = (
        "scheme, tokens of context",
        "token perplexity [interval]",
        "KL, nats (or more)",
        "same first choice",
        "n tokens",
    )
    table = Table(f"{title}: by position", columns, rows, frozenset({1, 2, 3, 4}))
    if not drawn:
        return [table]
    return [
        Chart(
            f"{title}: perplexity increase by tokens of context, %",
            "One line per scheme over buckets of context, with intervals clustered by document.",
            lines_by(drawn, "tokens of context", "increase, %", colour_of(names_of(group)), ordinal=True, log_y=False),
            table,
        )
    ]


def _needles(found: list[Candidate]) -> list[Block]:
    grids: dict[str, dict[tuple[int, int], tuple[int, int]]] = {}
    for name, view in _views(found):
        if view.baseline_needles:
            grids.setdefault("baseline", view.baseline_needles)
        if view.needles:
            grids[name] = view.needles
    if not grids:
        return []
    drawn, rows = [], []
    for name, grid in grids.items():
        for (length, depth), (hit, asked) in sorted(grid.items()):
            share = hit / asked if asked else 0.0
            drawn.append({"name": name, "x": f"{length:,}", "y": depth, "value": share, "label": f"{hit}/{asked}"})
            rows.append((f"{name}, {length:,} tokens, {depth} % deep", f"{share:.0%}", f"{asked}"))
    table = Table("Needles named exactly", ("cell", "found", "n asked"), rows, frozenset({1, 2}))
    said = ", ".join(f"{name} {_share(grid)}" for name, grid in grids.items())
    chart = Chart(
        "Needle in a long text: found of asked, by length and depth",
        f"One grid per cell; the stronger the colour, the more were found. Together: {said}.",
        heat_map(drawn, "tokens of the text", "depth, %"),
        table,
    )
    return [chart]


def _share(grid: dict[tuple[int, int], tuple[int, int]]) -> str:
    hit, asked = sum(a for a, _ in grid.values()), sum(b for _, b in grid.values())
    return f"{hit} of {asked}"


def _continuations(found: list[Candidate]) -> list[Block]:
    checks = [
        (one.name, check.status, check.reason)
        for one in found
        for check in (one.verdict.checks if one.verdict else [])
        if check.metric.startswith(("generation", "needle", "decode"))
    ]
    if not checks:
        return []
    return [
        Table("What the gate says of it", ("scheme", "status", "in words"), [(n, s or ABSENT, r) for n, s, r in checks])
    ]
