"""What a search found, on disk: search.json, search.md, the recipe as a scheme's YAML, the heat map as SVG."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalq.config import QuantConfig
from evalq.quantize.sensitivity import Sensitivity
from evalq.quantize.units import Unit
from evalq.records import write_text
from evalq.report.heatmap import heat_map_svg
from evalq.search.proof import Proof

MIB = 1024**2


@dataclass(frozen=True)
class Tried:
    """One candidate that was proved on the engine (or could not be)."""

    name: str
    uniform: bool
    kv_cache_dtype: str
    weight_bytes: int  # whole model, by the planner
    cost: float  # of the objective: bytes, or seconds per decoding step
    kld_nats: float  # sum of damages by fake quantisation
    counts: dict[str, int]  # option -> units
    proof: Proof
    on_front: bool = False
    tied_with: str = ""  # a point of the front whose increase is not told apart from this one's


@dataclass(frozen=True)
class Outcome:
    """The answer of a search. `exit_code` is that of the final verdict."""

    model: str
    gpu: str
    objective: str
    method: str
    status: str  # PASS, FAIL, INCONCLUSIVE ...: of the final verdict; FAIL when nothing passed the search
    exit_code: int
    summary: str
    best: str | None
    best_weight_bytes: int | None
    baseline_weight_bytes: int
    smallest_uniform: str | None  # the smallest uniform scheme that passed on the search's documents
    smallest_uniform_bytes: int | None
    search_documents: int
    final_documents: int
    looks: list[int]
    final: list[Proof]
    final_number: int  # which series of last verdicts on any of the kept documents, from 1; 0 without one
    final_confidence: float | None  # of its intervals: stricter for every further series (evalq.judge.repeated)
    tried: list[Tried]
    left_out: dict[str, str]  # option -> why it was no choice
    engine_seconds: float  # measured in this run; stored records cost nothing
    sensitivity_seconds: float
    grid_cells: int
    grid_engine_seconds: float
    solver_gap: float  # largest share by which a better allocation could be cheaper
    notes: list[str]


def with_front(tried: Sequence[Tried]) -> list[Tried]:
    """Mark the points that none beats in both cost and increase, and those that noise alone keeps off the front."""
    measured = [one for one in tried if one.proof.estimate is not None and one.proof.estimate.value is not None]
    front = [one for one in measured if not any(_beats(other, one) for other in measured)]
    result = []
    for one in tried:
        tie = next((f.name for f in front if f is not one and one in measured and _beats(f, one) and _tied(f, one)), "")
        result.append(dataclasses.replace(one, on_front=one in front, tied_with=tie))
    return result


def _value(one: Tried) -> float:
    assert one.proof.estimate is not None
    return one.proof.estimate.value or 0.0


def _beats(one: Tried, other: Tried) -> bool:
    no_worse = one.cost <= other.cost and _value(one) <= _value(other)
    return no_worse and (one.cost < other.cost or _value(one) < _value(other))


def _tied(one: Tried, other: Tried) -> bool:
    """Whether the intervals of the increase overlap."""
    first, second = one.proof.estimate, other.proof.estimate
    if first is None or second is None or None in (first.low, first.high, second.low, second.high):
        return False
    return bool(first.low <= second.high and second.low <= first.high)  # type: ignore[operator]


def remove_outcome(folder: Path) -> None:
    """Take away what an earlier search left, recipe included: its answer must not stand when this one has another, or none."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        best = json.loads((folder / "search.json").read_text(encoding="utf-8")).get("best")
        if best and Path(str(best)).name == best:
            (folder / f"{best}.yaml").unlink(missing_ok=True)
    for file in (folder / "search.json", folder / "search.md", *folder.glob("heat-*.svg")):
        file.unlink(missing_ok=True)


def write_outcome(
    folder: Path, outcome: Outcome, recipe: QuantConfig | None, units: Sequence[Unit], table: Sensitivity
) -> None:
    """Everything a person or a later step reads, into `folder`."""
    heat = heat_map(units, table)
    document = {**dataclasses.asdict(outcome), "heat_map": heat}
    write_text(folder / "search.json", json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    write_text(folder / "search.md", markdown(outcome, heat))
    for option, rows in heat["values"].items():
        title = f"{option}: divergence when only this group is quantised, nats per token (fake quantisation)"
        write_text(folder / f"heat-{option}.svg", heat_map_svg(title, heat["layers"], heat["kinds"], rows))
    if recipe is not None:
        write_text(folder / f"{recipe.name}.yaml", recipe_yaml(recipe, outcome))


def heat_map(units: Sequence[Unit], table: Sensitivity) -> dict[str, Any]:
    """layers x kinds per option: nats per token, None where a group has no such option; and how the values came about."""
    layers = sorted({unit.layer for unit in units})
    kinds = list(dict.fromkeys(unit.kind for unit in units))
    names = {(unit.layer, unit.kind): unit.name for unit in units}
    options = list(dict.fromkeys(damage.option for damage in table.damages))
    found = {(damage.unit, damage.option): damage for damage in table.damages}

    def value(option: str, layer: int, kind: str) -> float | None:
        damage = found.get((names.get((layer, kind), ""), option))
        return damage.kld_nats if damage else None

    return {
        "layers": layers,
        "kinds": kinds,
        "unit": "nats per token",
        "how": {o: sorted({d.how for d in table.damages if d.option == o}) for o in options},
        "tokens": table.tokens,
        "device": table.device,
        "values": {o: [[value(o, layer, kind) for kind in kinds] for layer in layers] for o in options},
    }


def markdown(outcome: Outcome, heat: dict[str, Any]) -> str:
    """The result for people."""
    hours = outcome.engine_seconds / 3600
    grid = outcome.grid_engine_seconds / 3600
    lines = [
        f"# Search: {outcome.model} on {outcome.gpu}, objective {outcome.objective}, method {outcome.method}",
        "",
        f"**{outcome.status}** {outcome.summary}",
        "",
        "| scheme | weights MiB | increase on the search's documents | expected (fake), nats | verdict | front |",
        "|---|---|---|---|---|---|",
        *(_row(one) for one in sorted(outcome.tried, key=lambda one: (one.cost, one.name))),
        "",
        f"Search: {outcome.search_documents} documents, looks {outcome.looks}; final verdict: the next "
        f"{outcome.final_documents} documents, which no step of the search has scored.",
        *(f"Final: {proof.summary}" for proof in outcome.final),
        *_how_final(outcome),
        f"Engine: {hours:.3f} hours; a grid of every option for every kind of group ({outcome.grid_cells} cells on all these "
        f"documents) would take {grid:.1f} hours. Sensitivity: {outcome.sensitivity_seconds:.0f} s.",
        f"Allocations are within {outcome.solver_gap:.2%} of the best that the model of adding damages allows.",
        *(f"Left out: {name}: {why}" for name, why in outcome.left_out.items()),
        *outcome.notes,
        "",
        "## Sensitivity (nats per token, fake quantisation)",
    ]
    for option, rows in heat["values"].items():
        lines += [
            "",
            f"{option} ({', '.join(heat['how'][option])})",
            "",
            "| layer | " + " | ".join(heat["kinds"]) + " |",
        ]
        lines.append("|---" * (len(heat["kinds"]) + 1) + "|")
        for layer, row in zip(heat["layers"], rows, strict=True):
            cells = ["-" if value is None else f"{value:.2e}" for value in row]
            lines.append(f"| {layer if layer >= 0 else 'outside'} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _how_final(outcome: Outcome) -> list[str]:
    """At which confidence the answer was given, and why."""
    if outcome.final_confidence is None:
        return []
    return [
        f"Confidence of the last verdict: {100 * outcome.final_confidence:.10g} %. It is of series {outcome.final_number} on these "
        "documents; each further one is stricter, so that all together have the gate's error rate. Other documents "
        "(tasks.perplexity_from, another data set) have all of it."
    ]


def _row(one: Tried) -> str:
    estimate = one.proof.estimate
    increase = "-"
    if estimate is not None and None not in (estimate.value, estimate.low, estimate.high):
        increase = f"{estimate.value:+.2%} [{estimate.low:+.2%}, {estimate.high:+.2%}], {one.proof.documents} documents"
    front = "front" if one.on_front else f"tied with {one.tied_with}" if one.tied_with else ""
    words = (
        f"{one.proof.status} with a warning"
        if one.proof.status == "PASS" and not one.proof.passed
        else one.proof.status
    )
    return f"| {one.name} | {one.weight_bytes / MIB:.1f} | {increase} | {one.kld_nats:.4f} | {words} | {front} |"


def recipe_yaml(recipe: QuantConfig, outcome: Outcome) -> str:
    """The scheme as a file of conf/quant: commit it there and run it with +quant=NAME."""
    import yaml

    data = dataclasses.asdict(recipe)
    data["groups"] = {
        name: {part: _compact(args) if isinstance(args, dict) else args for part, args in group.items()}
        for name, group in data["groups"].items()
    }
    keys = ("name", "origin", "kv_cache_dtype", "kv_scale_source", "groups", "ignore", "method", "clip_search", "needs")
    body = yaml.safe_dump(
        {"defaults": ["base_quant", "_self_"], **{key: data[key] for key in keys}}, sort_keys=False, width=120
    )
    size = (outcome.best_weight_bytes or 0) / MIB
    passes = [proof for proof in outcome.final if proof.status == "PASS"]  # the last is the recipe's
    warned = bool(passes) and not passes[-1].passed
    verdict = f"{outcome.status}{' with a warning (within the limit, above the target)' if warned else ''}"
    return (
        f"# {recipe.name}: found by evalq search for {outcome.model} on {outcome.gpu}, objective {outcome.objective}.\n"
        f"#\n# Weights  {size:.1f} MiB of {outcome.baseline_weight_bytes / MIB:.1f} MiB in 16 bit\n"
        f"# Verdict  {verdict} on {outcome.final_documents} documents that the search never saw\n"
        f"# Run      python -m evalq +model={outcome.model} +quant={recipe.name}   (with this file in conf/quant)\n{body}"
    )


def _compact(args: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in args.items() if value is not None}
