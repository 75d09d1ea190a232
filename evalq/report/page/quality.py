"""Quality: perplexity and tasks with intervals, the A/A floor, and divergence by position."""

from __future__ import annotations

from evalq.records import Check, Estimate
from evalq.report.page.blocks import Block, Chart, Table, Text, Value
from evalq.report.page.charts import colour_of, interval_rows, lines_by
from evalq.report.page.verdicts import word_of
from evalq.report.page.view import Candidate, Group
from evalq.report.words import ABSENT, interval, percent


def names_of(group: Group) -> list[str]:
    return [one.name for one in group.candidates]


def inks(group: Group) -> dict[str, str]:
    """Scheme -> colour, the same in every chart."""
    scale = colour_of(names_of(group))
    return dict(zip(scale["domain"], scale["range"], strict=True))


def quality_section(group: Group) -> list[Block]:
    """Perplexity first, which decides; then the tasks, which advise."""
    records = [group.baseline, *(one.record for one in group.candidates)]
    if not any(record.tasks for record in records if record is not None):
        return []  # memory and speed only
    return [*_perplexity(group), *_tasks(group)]


def _bounds(estimate: Estimate | None) -> tuple[float, float, float] | None:
    if estimate is None or estimate.value is None or estimate.low is None or estimate.high is None:
        return None
    return estimate.value, estimate.low, estimate.high


def _perplexity(group: Group) -> list[Block]:
    colours = inks(group)
    drawn = []
    for one in group.candidates:
        bounds = _bounds(one.increase)
        if bounds:
            value, low, high = (100 * x for x in bounds)
            label = f"{value:+.2f} % [{low:+.2f}, {high:+.2f}]"
            drawn.append(
                {"name": one.name, "value": value, "low": low, "high": high, "label": label, "ink": colours[one.name]}
            )
    table = _perplexity_table(group)
    if not drawn:
        return [table, Text("No candidate has a perplexity that could be compared.", "note")]
    check = next(c for one in group.candidates for c in (one.verdict.checks if one.verdict else []) if c.estimate)
    lines = [(100 * v, name) for v, name in ((check.target, ""), (check.limit, "limit")) if v is not None]
    floor = _bounds(group.floor)
    band = None if floor is None else (100 * min(floor[1], -floor[2]), 100 * max(floor[2], -floor[1]))
    words = ", ".join(f"{row['name']} {row['label']}" for row in drawn)
    chart = Chart(
        "Perplexity increase over the baseline, with its interval",
        f"One row per scheme; dashed lines are target and limit. {words}.",
        interval_rows(drawn, "increase of perplexity, %", lines, band),
        table,
    )
    return [chart, _floor_text(group)]


def _floor_text(group: Group) -> Text:
    floor = group.floor
    if floor is None or floor.low is None or floor.high is None:
        return Text(
            "No A/A floor was measured: the engine's own noise is not known here (+experiment=aa measures it).", "note"
        )
    width = max(abs(floor.low), abs(floor.high))
    return Text(
        f"A/A floor: the baseline against itself in another order and other batches differs by {percent(floor.value, 4)} "
        f"[{100 * floor.low:+.4f}, {100 * floor.high:+.4f}], n={floor.n}; a difference within ±{width:.4%} is noise.",
        "note",
    )


def _perplexity_table(group: Group) -> Table:
    tasks = [("baseline", group.baseline.tasks)] if group.baseline else []
    tasks += [(one.name, one.record.tasks) for one in group.candidates]
    increases = {one.name: one for one in group.candidates}
    rows = []
    for name, scores in tasks:
        score = scores.get("wikitext")
        value = score.metrics.get("word_perplexity") if score else None
        one = increases.get(name)
        rows.append(
            (
                name,
                ABSENT if value is None else f"{value:.4f}",
                interval(one.increase) if one else "yardstick",
                f"{score.n:,}" if score else ABSENT,
                f"{score.left_out}" if score else ABSENT,
                one.increase.method if one and one.increase else ABSENT,
            )
        )
    columns = (
        "scheme",
        "word perplexity",
        "increase [interval]",
        "n documents",
        "left out",
        "how the interval was made",
    )
    return Table("Perplexity of each scheme", columns, rows, frozenset({1, 2, 3, 4}))


def _task_checks(one: Candidate) -> list[Check]:
    checks = one.verdict.checks if one.verdict else []
    return [c for c in checks if c.estimate is not None and c.estimate.name.endswith("_difference")]


def _tasks(group: Group) -> list[Block]:
    colours, drawn, rows = inks(group), [], []
    metrics = list(dict.fromkeys(c.metric for one in group.candidates for c in _task_checks(one)))
    for metric in metrics:
        for one in group.candidates:
            for check in (c for c in _task_checks(one) if c.metric == metric):
                bounds = _bounds(check.estimate)
                if bounds is None or check.estimate is None:
                    continue
                value, low, high = (100 * x for x in bounds)
                label = f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"
                drawn.append(
                    {
                        "task": f"{metric} (n={check.estimate.n:,})",
                        "name": one.name,
                        "value": value,
                        "low": low,
                        "high": high,
                        "label": label,
                        "ink": colours[one.name],
                    }
                )
                rows.append((f"{metric}: {one.name}", label, f"{check.estimate.n:,}", check.status, check.reason))
    if not drawn:
        return []
    table = Table(
        "Paired accuracy differences, candidate minus baseline, in percentage points",
        ("task and scheme", "difference [interval]", "n items", "against its margin", "in words"),
        rows,
        frozenset({1, 2}),
    )
    chart = Chart(
        "Task accuracy against the baseline, in points",
        "Paired differences with intervals, one block per task; all figures are in the table below.",
        interval_rows(drawn, "accuracy difference, points", [(0.0, "")], facet="task"),
        table,
    )
    return [
        chart,
        Text("Tasks advise; they decide only where the policy requires a margin.", "note"),
        _accuracies(group),
    ]


def _accuracies(group: Group) -> Table:
    """Plain accuracies of every cell."""
    base = group.baseline.tasks if group.baseline else {}
    names = [(task, metric) for task, score in base.items() if score.kind != "perplexity" for metric in score.metrics]
    cells = [("baseline", base), *((one.name, one.record.tasks) for one in group.candidates)]
    rows = []
    for name, scores in cells:
        values = (scores[task].metrics.get(metric) if task in scores else None for task, metric in names)
        rows.append((name, *(ABSENT if value is None else f"{value:.4f}" for value in values)))
    columns = ("scheme", *(f"{task} {metric} (n={base[task].n:,})" for task, metric in names))
    return Table("Accuracies as lm-eval counts them", columns, rows, frozenset(range(1, len(columns))))


def position_section(group: Group) -> list[Block]:
    """Divergence from the baseline by the length of context, and over all tokens."""
    found = [one for one in group.candidates if one.buckets]
    if not found:
        return []
    drawn, rows = [], []
    for one in found:
        for bucket, estimates in one.buckets.items():
            mean = next((e for e in estimates if e.name == "mean_kld_nats"), None)
            bounds = _bounds(mean)
            if mean is None or bounds is None:
                continue
            same = next((e for e in estimates if e.name == "same_top1"), None)
            rows.append((f"{one.name}, {bucket}", _nats(mean), interval_share(same), f"{mean.n:,}"))
            if bucket.startswith("context ") and bounds[1] > 0:
                short = bucket.removeprefix("context ").removesuffix(" tokens")
                drawn.append({"name": one.name, "x": short, "y": bounds[0], "low": bounds[1], "high": bounds[2]})
    table = Table(
        "Divergence from the baseline by bucket; n counts scored tokens",
        ("scheme and bucket", "mean KL divergence, nats [interval]", "same first choice [interval]", "n tokens"),
        rows,
        frozenset({1, 2, 3}),
    )
    note = next((e.note for one in found for e in one.fidelity if e.name == "mean_kld_nats"), "")
    blocks: list[Block] = [_fidelity_table(found)]
    if drawn:
        chart = Chart(
            "KL divergence from the baseline by tokens of context",
            "One line per scheme over buckets of context length, with intervals clustered by document.",
            lines_by(drawn, "tokens of context", "mean KL divergence, nats", colour_of(names_of(group)), ordinal=True),
            table,
        )
        blocks.insert(0, chart)
    return [*blocks, Text(f"About the KL divergence: {note}.", "note")] if note else blocks


def _fidelity_table(found: list[Candidate]) -> Table:
    kept = (
        "mean_kld_nats",
        "mean_reverse_kld_nats",
        "kld_nats_p50",
        "kld_nats_p99",
        "kld_nats_max",
        "same_top1",
        "rms_correct_probability_change",
    )
    rows = []
    for one in found:
        known = {e.name: e for e in one.fidelity}
        n = next((f"{e.n:,}" for e in one.fidelity), ABSENT)
        shown = [interval_share(known.get(name)) if name == "same_top1" else _nats(known.get(name)) for name in kept]
        values: list[Value] = [one.name, word_of(one), *shown, n]
        rows.append(values)
    columns = (
        "scheme",
        "verdict",
        "KL mean, nats",
        "reverse KL mean",
        "KL median",
        "KL 99 %",
        "KL largest",
        "same first choice",
        "RMS change of p",
        "n tokens",
    )
    return Table("Fidelity to the baseline over all scored tokens", columns, rows, frozenset(range(2, 10)))


def _nats(estimate: Estimate | None) -> str:
    if estimate is None or estimate.value is None:
        return ABSENT
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3g}"
    return f"{estimate.value:.3g} [{estimate.low:.3g}, {estimate.high:.3g}]"


def interval_share(estimate: Estimate | None) -> str:
    """A share that is no increase: without a sign."""
    if estimate is None or estimate.value is None:
        return ABSENT
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2%}"
    return f"{estimate.value:.2%} [{100 * estimate.low:.2f}, {100 * estimate.high:.2f}]"
