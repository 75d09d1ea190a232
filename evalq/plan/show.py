"""The planner's answers as text and as plain data for JSON. Bytes inside, GiB only here."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from evalq.facts.gpus import GIB
from evalq.plan.answer import Answer
from evalq.plan.emit import engine_command


def gib(nbytes: int | float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / GIB:,.2f} GiB"


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns as wide as their longest entry, two spaces apart."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def one_cell(answer: Answer, visible: str | None = None) -> str:
    """The answer for one cell: facts, ledger, capacity, roofline, rules."""
    parts = [_title(answer), _ledger(answer), _capacity(answer)]
    if answer.roofline is not None:
        parts.append(_roofline(answer))
    if visible:
        parts.append("What the gate can see\n" + textwrap.indent(visible, "  "))
    parts.append(_rules(answer))
    return "\n\n".join(parts)


def _title(answer: Answer) -> str:
    facts, settings = answer.facts, answer.settings
    parts = ", ".join(f"{part} {count:,}" for part, count in facts.parameters_by_part().items())
    heads = (
        f"{facts.num_heads} heads, {facts.num_kv_heads} KV heads of {facts.head_dim}"
        if facts.attention == "gqa"
        else f"{facts.num_heads} heads, {facts.latent_dim} latent values per token and layer"
    )
    lines = [
        f"{answer.model} x {answer.quant} x {answer.gpu}: {'feasible' if answer.feasible else 'REFUSED'} "
        f"on {answer.gpu_facts.counted(answer.gpus)}, TP {settings.tensor_parallel_size}, PP {settings.pipeline_parallel_size}",
        f"  parameters  {facts.parameters():,}: {parts}",
        f"  attention   {facts.attention}, {facts.num_layers} layers, {heads}",
    ]
    if facts.not_loaded_layers:
        lines.append(
            f"  left out    {facts.not_loaded_layers} next-token-prediction layer(s) of the published checkpoint"
        )
    return "\n".join(lines)


def _ledger(answer: Answer) -> str:
    memory = answer.memory
    elsewhere = f"{gib(answer.weight_bytes)} on all GPUs, {gib(answer.checkpoint_bytes)} on disk"
    rows = [
        ("weights", gib(memory.weights), elsewhere),
        ("MLA copies", gib(memory.absorbed), "16-bit up-projections that the engine keeps for decoding"),
        ("workspace", gib(memory.working), "the larger of activations and logits of one step"),
        ("communication", gib(memory.communication), "stated margin, several GPUs only"),
        ("graphs", gib(memory.graphs), "stated margin, none when enforce_eager"),
        ("context", gib(memory.context), "stated margin"),
        ("KV pool", gib(memory.kv_pool), f"{answer.kv_pool_tokens:,} tokens"),
    ]
    if memory.total is not None:
        used = f"utilisation {answer.settings.memory_utilization} of {gib(memory.total)}"
        rows.append(("sum", gib(memory.budget), used))
    shown = [row for row in rows if row[1] != gib(0)]
    return table(shown, ("Fullest GPU", "bytes", "note"))


def _capacity(answer: Answer) -> str:
    settings = answer.settings
    smallest = answer.smallest_tp
    enough = "more than 64 GPUs" if smallest is None else answer.gpu_facts.counted(smallest)
    lines = [
        "Capacity",
        f"  KV per token         {answer.kv_bytes_per_token:,} B on all GPUs ({settings.kv_cache_dtype})",
        f"  KV per request       {gib(answer.kv_bytes_per_request)} at {answer.context:,} tokens",
        f"  largest context      {answer.largest_context:,} tokens, one request alone",
        f"  largest concurrency  {answer.largest_concurrency:,} requests of {answer.context:,} tokens in the pool; "
        f"the scheduler takes max_num_seqs={settings.max_num_seqs:,}",
        f"  smallest TP          {enough} for the weights and the KV asked for",
    ]
    if answer.kv_bytes_asked is not None:
        fits = "fits" if answer.largest_concurrency >= (answer.concurrency or 0) else "does NOT fit"
        lines.append(
            f"  asked for            {answer.concurrency:,} requests: {gib(answer.kv_bytes_asked)} of KV, {fits}"
        )
    if settings.offload_gib:
        lines.append(
            f"  host memory          {settings.offload_gib:g} GiB for offload, {answer.offload_tokens:,} tokens"
        )
    return "\n".join(lines)


def _roofline(answer: Answer) -> str:
    bound = answer.roofline
    assert bound is not None  # asked for only then
    return (
        "Upper bounds from the device's peaks (no program reaches them)\n"
        f"  prefill  {bound.prefill_tokens_per_second:,.0f} tokens/s\n"
        f"  decode   {bound.decode_tokens_per_second:,.0f} tokens/s at {bound.concurrency:,} requests of "
        f"{bound.context:,} tokens, bound by {bound.decode_bound_by}"
    )


def _rules(answer: Answer) -> str:
    if not answer.violations:
        return "Rules: none broken"
    lines = ["Rules"]
    for violation in answer.violations:
        lines.append(f"  {violation.severity:<7}  {violation.rule}: {violation.message}")
        lines.append(f"           do: {violation.remedy}")
        lines.append(f"           source: {violation.source}")
    return "\n".join(lines)


def matrix(answers: list[Answer]) -> str:
    """One line per cell."""
    rows = []
    for answer in answers:
        rules = [v.rule for v in answer.violations if v.severity == "error"] or [v.rule for v in answer.violations]
        rows.append(
            (
                answer.model,
                answer.quant,
                answer.gpu,
                "yes" if answer.feasible else "NO",
                str(answer.gpus),
                gib(answer.weight_bytes),
                f"{answer.kv_bytes_per_token:,}",
                f"{answer.kv_pool_tokens:,}",
                f"{answer.largest_context:,}",
                f"{answer.largest_concurrency:,}",
                " ".join(rules),
            )
        )
    header = ("model", "quant", "gpu", "runs", "GPUs", "weights", "KV B/token", "pool tokens", "largest context",
              f"requests of {answers[0].context:,}", "rules")  # fmt: skip
    return table(rows, header)


def as_data(answer: Answer) -> dict[str, Any]:
    """The answer for JSON: bytes, tokens, whole sentences."""
    memory, settings, bound = answer.memory, answer.settings, answer.roofline
    command = engine_command(answer.config, answer.gpu_facts, settings)
    return {
        "model": answer.model,
        "quant": answer.quant,
        "gpu": answer.gpu,
        "feasible": answer.feasible,
        "gpus": answer.gpus,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "parameters": answer.facts.parameters(),
        "parameters_by_part": answer.facts.parameters_by_part(),
        "predicted": {
            "weight_bytes": answer.weight_bytes,
            "checkpoint_bytes": answer.checkpoint_bytes,
            "kv_bytes_per_token": answer.kv_bytes_per_token,
            "kv_pool_tokens": answer.kv_pool_tokens,
            "kv_pool_bytes": answer.kv_pool_tokens * answer.kv_bytes_per_token,
        },
        "fullest_gpu_bytes": {
            "total": memory.total,
            "budget": memory.budget,
            "weights": memory.weights,
            "mla_copies": memory.absorbed,
            "activations": memory.activations,
            "logits": memory.logits,
            "communication": memory.communication,
            "graphs": memory.graphs,
            "context": memory.context,
            "kv_pool": memory.kv_pool,
            "kv_per_token": memory.kv_per_token,
        },
        "context_tokens": answer.context,
        "concurrency_asked": answer.concurrency,
        "kv_bytes_per_request": answer.kv_bytes_per_request,
        "kv_bytes_asked": answer.kv_bytes_asked,
        "largest_context_tokens": answer.largest_context,
        "largest_concurrency": answer.largest_concurrency,
        "smallest_tp": answer.smallest_tp,
        "upper_bound": None
        if bound is None
        else {
            "prefill_tokens_per_second": bound.prefill_tokens_per_second,
            "decode_tokens_per_second": bound.decode_tokens_per_second,
            "decode_bound_by": bound.decode_bound_by,
            "concurrency": bound.concurrency,
        },
        "violations": [
            {"rule": v.rule, "severity": v.severity, "message": v.message, "remedy": v.remedy, "source": v.source}
            for v in answer.violations
        ],
        "command": {"env": command.env, "argv": command.argv},
    }
