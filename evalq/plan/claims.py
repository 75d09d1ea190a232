"""What the two source articles say, beside what the planner computes: arithmetic only, nothing measured."""

from __future__ import annotations

from typing import NamedTuple

from evalq.config import RunConfig
from evalq.plan.answer import Answer, Ask, plan
from evalq.plan.compose import compose, parse
from evalq.plan.memory import kv_bytes_per_token


class Claim(NamedTuple):
    source: str  # article A or B
    says: str
    computes: str


def _cell(*overrides: str) -> RunConfig:
    request = parse(list(overrides))
    return compose(request, request.cells()[0])


def claims() -> list[Claim]:
    """The rows that arithmetic can answer; quality and speed need a measurement."""
    return [*_kv_claims(), *_weight_claims(), *_mixed_claims()]


def _kv_claims() -> list[Claim]:
    wide = plan(_cell("model=llama3.1-405b", "quant=baseline", "gpu=mi325x"), Ask(context=32768, concurrency=1000))
    narrow = plan(_cell("model=llama3.1-405b", "quant=fp8-kv", "gpu=mi325x"), Ask(context=32768, concurrency=1000))
    facts = wide.facts
    per_token = kv_bytes_per_token(facts, "bfloat16")
    formula = f"2 x {facts.num_layers} x {facts.num_kv_heads} x {facts.head_dim} x 2"
    half = narrow.kv_bytes_per_token / wide.kv_bytes_per_token
    return [
        Claim("A", "Llama-3.1-405B, BF16 KV: 26.2 MB per token", f"{formula} = {per_token:,} B = 0.516 MB per token"),
        Claim("A", "at 32K: 819 GB", f"{wide.kv_bytes_per_request / 1e9:.1f} GB ({32768:,} x {per_token:,} B)"),
        Claim("A", "1,000 requests of 32K: 800 TB", f"{(wide.kv_bytes_asked or 0) / 1e12:.1f} TB"),
        Claim("A", "FP8 KV halves KV memory", f"{half:.2f} of the bytes per token (Llama-3.1-405B)"),
    ]


def _weight_claims() -> list[Claim]:
    rows = []
    ask = Ask(context=32768, concurrency=64)
    for model in ("llama3.1-405b", "llama3-8b"):
        asked = ask if model == "llama3.1-405b" else Ask(context=8192, concurrency=64)
        before = plan(_cell(f"model={model}", "quant=baseline", "gpu=mi325x"), asked)
        after = plan(_cell(f"model={model}", "quant=fp8-weights-kv", "gpu=mi325x"), asked)
        total = before.weight_bytes + (before.kv_bytes_asked or 0)
        saved = 1.0 - (after.weight_bytes + (after.kv_bytes_asked or 0)) / total
        rows.append(
            Claim(
                "A",
                "FP8 weights and FP8 KV save 60-70 % of all memory",
                f"{100 * saved:.1f} % of weights and KV ({model}, {asked.concurrency} requests of {asked.context:,}); "
                f"two bytes become one, so never above 50 %",
            )
        )
    return rows


def _mixed_claims() -> list[Claim]:
    before = plan(_cell("model=llama3-70b", "quant=baseline", "gpu=a100-80g"))
    after = plan(_cell("model=llama3-70b", "quant=mixed-4-8", "gpu=a100-80g"))
    saved = 1.0 - after.checkpoint_bytes / before.checkpoint_bytes
    small = plan(_cell("model=llama3-8b", "quant=baseline", "gpu=a100-40g"))
    return [
        Claim("B", "Llama-3-70B needs 140 GB in 16 bit", f"{before.checkpoint_bytes / 1e9:.1f} GB of weights"),
        Claim(
            "B",
            "mixed-4-8 saves 35 % of memory (70B)",
            f"{100 * saved:.1f} % of the weights ({after.checkpoint_bytes / 1e9:.1f} GB)",
        ),
        Claim("B", "70B on two A100-80GB", f"{_gpus_of(before, '16 bit')}; {_gpus_of(after, 'mixed-4-8')}"),
        Claim("B", "8B on an A100-40GB or better", f"fits, with {small.kv_pool_tokens:,} tokens of KV cache"),
        Claim("B", "estimate_memory(model=..., seq_len=...)", "no such call exists; this command is it"),
    ]


def _gpus_of(answer: Answer, what: str) -> str:
    enough = answer.smallest_tp
    return f"{what}: {'more than 64 GPUs' if enough is None else answer.gpu_facts.counted(enough)}"
