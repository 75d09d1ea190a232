"""Why the figures may be compared: fingerprints, proof that each scheme was applied, environment, provenance."""

from __future__ import annotations

import itertools

from evalq.records import Record
from evalq.report.page.blocks import Block, Chart, Fold, Table, Text, Word
from evalq.report.page.charts import COLOURS, GREY, stacked_bars
from evalq.report.page.costs import cells_of
from evalq.report.page.view import Candidate, Group
from evalq.report.words import ABSENT


def comparability_section(group: Group) -> list[Block]:
    """What is equal, what differs, and what the engine says about each scheme."""
    rows = [(one.name, *_compared(one, group.baseline)) for one in group.candidates]
    caption = "Fingerprints against the baseline's"
    blocks: list[Block] = []
    if rows:
        blocks.append(Table(caption, ("scheme", "comparable", "differences"), rows))
    blocks += _data_table(group)
    blocks.append(_applied_table(group))
    blocks += _layers(group)
    shown = group.baseline or (group.candidates[0].record if group.candidates else None)
    if shown is not None and shown.fingerprint:
        fields = [(name, str(value)) for name, value in sorted(shown.fingerprint.items())]
        table = Table(f"Fingerprint of {shown.cell.quant}, n={len(fields)} fields", ("field", "value"), fields)
        blocks.append(Fold("Every field that must be equal", [table]))
    return blocks


def _compared(one: Candidate, baseline: Record | None) -> tuple[Word, str]:
    if baseline is None:
        return Word("no baseline", "fail"), "there is no baseline among these records"
    if one.record.failure is not None:
        return Word("failed", "fail"), one.record.failure.message
    if not one.differences:
        return Word("yes", "pass"), f"none in {len(one.record.fingerprint)} fields"
    allowed = one.verdict.allowed_differences if one.verdict else []
    excused = all(item in allowed for item in one.differences)
    return Word("allowed" if excused else "no", "warn" if excused else "fail"), "; ".join(one.differences)


def _data_table(group: Group) -> list[Block]:
    shown = group.baseline or (group.candidates[0].record if group.candidates else None)
    tasks = shown.tasks.values() if shown else []
    rows = [
        (
            t.task,
            t.dataset,
            f"{t.n:,}",
            f"{t.left_out}",
            f"{t.truncated}",
            f"{t.window_tokens:,}",
            f"{t.scored_tokens:,}",
            t.harness_version,
            t.dataset_hash[:12],
        )
        for t in tasks
    ]
    columns = ("task", "data", "n", "left out", "truncated", "window tokens", "scored tokens", "harness", "data hash")
    return [Table("What was scored", columns, rows, frozenset({2, 3, 4, 5, 6}))] if rows else []


def _applied_table(group: Group) -> Table:
    rows = []
    for name, record in cells_of(group):
        applied = record.applied
        if applied is None:
            rows.append((name, Word("not known", "fail"), ABSENT, ABSENT, ABSENT, ABSENT))
            continue
        word = Word("yes", "pass") if applied.ok else Word("no", "fail")
        kernels = ", ".join(
            f"{kernel.rsplit('/', 1)[-1]} x {count}" for kernel, count in applied.linear_methods.items()
        )
        problems = "; ".join(applied.problems)
        rows.append(
            (
                name,
                word,
                applied.kv_dtype_effective,
                applied.kv_scale_source,
                applied.attention_backend,
                problems or kernels,
            )
        )
    columns = ("scheme", "applied", "KV cache found", "KV scales", "attention", "kernels, or what is wrong")
    return Table("Proof that each scheme was applied, from the engine's own state", columns, rows)


def _layers(group: Group) -> list[Block]:
    """Every kind of layer: what the scheme says, and what the engine loaded."""
    rows = [
        (
            f"{name}: {kind.name}",
            str(kind.layers),
            kind.expected,
            kind.found,
            kind.kernel.rsplit("/", 1)[-1],
            kind.note or ABSENT,
        )
        for name, record in cells_of(group)
        for kind in (record.applied.layers if record.applied else [])
    ]
    columns = ("scheme and layer", "n layers", "expected", "found", "kernel", "note")
    table = Table("Layers of each scheme, expected against found", columns, rows, frozenset({1}))
    return [Fold(f"Layer by layer: n={len(rows)} kinds of layers", [table])] if rows else []


def environment_section(group: Group, command: str) -> list[Block]:
    """Versions, devices, time by stage, record ids."""
    cells = cells_of(group)
    names = list(dict.fromkeys(key for _, record in cells for key in record.environment))
    rows = []
    for key in names:
        values = list(dict.fromkeys(record.environment.get(key, ABSENT) for _, record in cells if record.environment))
        rows.append((key, values[0] if len(values) == 1 else "; ".join(values)))
    blocks: list[Block] = [Text(f"Command: {command}")] if command else []
    blocks.append(Table("Environment of the measurements", ("what", "value"), rows))
    return [*blocks, *_seconds(cells), *_calibrations(cells), _provenance(cells)]


def _calibrations(cells: list[tuple[str, Record]]) -> list[Block]:
    """The text that calibrated checkpoints were made with."""
    rows = [
        (
            name,
            c.method,
            f"{c.domain} ({c.source})",
            f"{c.samples:,} x {c.length_tokens:,} tokens",
            c.device,
            f"{c.seconds:.0f}",
            ", ".join(f"{package} {version}" for package, version in c.versions.items()),
        )
        for name, record in cells
        if (c := record.calibration) is not None
    ]
    columns = ("scheme", "method", "text", "n", "made on", "seconds", "versions")
    return [Table("Calibration of the checkpoints", columns, rows, frozenset({5}))] if rows else []


def _seconds(cells: list[tuple[str, Record]]) -> list[Block]:
    stages = list(dict.fromkeys(stage for _, record in cells for stage in record.stage_seconds))
    if not stages:
        return []
    drawn = [
        {"name": name, "part": stage, "rank": stages.index(stage), "value": record.stage_seconds.get(stage, 0.0)}
        for name, record in cells
        for stage in stages
    ]
    totals = [
        {
            "name": name,
            "value": sum(record.stage_seconds.values()),
            "label": f"{sum(record.stage_seconds.values()):.0f} s",
        }
        for name, record in cells
    ]
    rows = [(name, *(f"{record.stage_seconds.get(stage, 0.0):.1f}" for stage in stages)) for name, record in cells]
    table = Table(
        "Wall seconds by stage (n=1 run each)", ("scheme", *stages), rows, frozenset(range(1, len(stages) + 1))
    )
    colours = dict(zip(stages, itertools.cycle((*COLOURS, GREY))))
    said = (
        "Stacked bars of wall seconds, one per scheme: " + ", ".join(f"{t['name']} {t['label']}" for t in totals) + "."
    )
    return [Chart("Where the time went, wall seconds", said, stacked_bars(drawn, "seconds", colours, totals), table)]


def _provenance(cells: list[tuple[str, Record]]) -> Table:
    rows = [
        (
            name,
            record.record_id,
            record.status,
            record.created_at,
            record.config_hash[:12],
            record.checkpoint.weights_sha256[:12] if record.checkpoint else ABSENT,
            "; ".join(record.notes) or ABSENT,
        )
        for name, record in cells
    ]
    return Table(
        "Records behind this report", ("scheme", "record", "status", "made at", "config", "weights", "notes"), rows
    )
