"""The model card of a checkpoint: what it is, what it costs, how that was measured, and what is not known. Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from evalq.records import Estimate, Record, Verdict

CARD_FILE = "model_card.md"
GIB = 1 << 30
SHOWN = 40  # estimates, at most


def model_card(record: Record, verdict: Verdict | None, estimates: Sequence[Estimate], config: dict[str, Any]) -> str:
    """Card of the checkpoint that a record was measured on. `config` is the composed config beside the record."""
    model, quant = _part(config, "model"), _part(config, "quant")
    base = model.get("hub_id") or record.fingerprint.get("model_id") or record.cell.model
    head = {
        "base_model": base,
        "library_name": "vllm",
        "tags": ["compressed-tensors" if quant.get("groups") else "vllm", record.cell.quant],
        "evalq": {"record": record.record_id, "verdict": verdict.status if verdict else "none"},
    }
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    parts = [
        f"---\n{front}---",
        f"# {record.cell.model}, scheme {record.cell.quant}",
        f"**{verdict.status}.** {verdict.summary}" if verdict else "Not judged against a baseline.",
        "## What it is\n\n" + _list(_what(record, model, quant, base)),
        _groups(quant),
        _quality(record, estimates),
        "## Memory and speed\n\n" + _list(_costs(record)),
        "## How it was measured\n\n" + _list(_how(record, verdict)),
        "## Limits\n\n" + _list(_limits(record, verdict, model, quant)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _part(config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {' '.join(line.split())}" for line in lines)


def _what(record: Record, model: dict[str, Any], quant: dict[str, Any], base: Any) -> list[str]:
    made = {
        "checkpoint": "the checkpoint as it is",
        "engine": f"quantized by the engine when it loads ({quant.get('engine_quantization')})",
        "evalq": f"made by evalq: {quant.get('method')}"
        + (", with a search of the clipping range" if quant.get("clip_search") else ""),
    }
    lines = [f"base model: {base}" + (f", revision {model['revision']}" if model.get("revision") else "")]
    lines.append(f"sha256 of the 16-bit weights it starts from: {record.fingerprint.get('weights_hash', 'unknown')}")
    lines.append(f"weights: {made.get(str(quant.get('origin')), 'unknown')}")
    lines.append(
        f"KV cache: {quant.get('kv_cache_dtype', 'unknown')}, scales: {quant.get('kv_scale_source', 'unknown')}"
    )
    if quant.get("ignore"):
        lines.append(f"left in 16 bit: {', '.join(map(str, quant['ignore']))}")
    return lines


def _groups(quant: dict[str, Any]) -> str:
    groups = quant.get("groups")
    if not isinstance(groups, dict) or not groups:
        return ""
    lines = ["| group | layers | weights | activations |", "|---|---|---|---|"]
    for name, group in groups.items():
        cells = [
            name,
            ", ".join(map(str, group.get("targets", []))),
            _args(group.get("weights")),
            _args(group.get("input_activations")),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _args(args: dict[str, Any] | None) -> str:
    if not args:
        return "16 bit"
    group = f" of {args['group_size']}" if args.get("group_size") else ""
    kind = "symmetric" if args.get("symmetric", True) else "asymmetric"
    return f"{args.get('num_bits')} bit {args.get('type')}, per {args.get('strategy')}{group}, {kind}" + (
        ", dynamic" if args.get("dynamic") else ""
    )


def _quality(record: Record, estimates: Sequence[Estimate]) -> str:
    lines = ["## Quality", "", "| task | metric | value | n |", "|---|---|---:|---:|"]
    for task, scores in record.tasks.items():
        for metric, value in scores.metrics.items():
            if not metric.endswith("_stderr"):
                lines.append(f"| {task} | {metric} | {'none' if value is None else f'{value:.4f}'} | {scores.n:,} |")
    if estimates:
        lines += [
            "",
            "Against the 16-bit baseline, paired:",
            "",
            "| estimate | value | interval | n |",
            "|---|---:|---|---:|",
        ]
    lines += [_estimate_line(estimate) for estimate in estimates[:SHOWN]]
    return "\n".join(lines)


def _estimate_line(e: Estimate) -> str:
    value = "none" if e.value is None else f"{e.value:.5g}"
    bounds = "none" if e.low is None or e.high is None else f"{e.low:.5g} to {e.high:.5g} ({e.confidence:.0%})"
    return f"| {e.name} | {value} | {bounds} | {e.n:,} |"


def _costs(record: Record) -> list[str]:
    ledger, lines = record.ledger, []
    if ledger is not None and ledger.weight_bytes is not None:
        lines.append(f"weights as loaded: {ledger.weight_bytes / GIB:.3f} GiB")
    if ledger is not None and ledger.kv_bytes_per_token is not None:
        lines.append(f"KV cache: {ledger.kv_bytes_per_token:,} bytes per token, found as {ledger.kv_dtype}")
    for load in record.loads.values():
        if load.valid and load.output_tokens_per_second is not None:
            lengths = f"{load.input_tokens_per_request} in / {load.output_tokens_per_request} out"
            lines.append(
                f"{load.name}: {load.output_tokens_per_second:,.1f} output tokens/s, {load.requests} requests of {lengths}"
            )
    return lines or ["not measured"]


def _how(record: Record, verdict: Verdict | None) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in record.environment.items() if name != "device")
    lines = [f"device: {record.fingerprint.get('gpu', record.cell.gpu)}", f"versions: {versions}"]
    for scores in record.tasks.values():
        left = f", {scores.left_out} left out" if scores.left_out else ""
        lines.append(f"{scores.task}: {scores.n:,} of {scores.dataset}{left}, window {scores.window_tokens} tokens")
    if verdict is not None:
        lines.append(
            "policy: " + ", ".join(f"{key} {value}" for key, value in verdict.policy.items() if value not in ("", None))
        )
        lines.append(f"baseline record: {verdict.baseline_id}")
    return [*lines, f"record {record.record_id} of {record.created_at}"]


def _limits(record: Record, verdict: Verdict | None, model: dict[str, Any], quant: dict[str, Any]) -> list[str]:
    notes = [str(note) for part in (model, quant) for note in part.get("notes") or []]
    reasons = (
        [reason for reason in verdict.reasons if reason.startswith(("note:", "advice:", "allowed"))] if verdict else []
    )
    known = [*notes, *record.notes, *reasons]
    return [*known, "nothing is said about tasks, languages, lengths or devices other than those above"]
