"""The parts of a language model, from the words of its config.json: one Module for each kind of weight, with its shape.

Names are those of the published checkpoints, with {layer} for the layer's number, so that a scheme's patterns match.
Shapes are (out_features, in_features), as torch.nn.Linear stores them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PARTS = ("attention", "indexer", "mlp", "experts", "router", "embeddings", "head", "norms", "vision")


@dataclass(frozen=True)
class Module:
    """One kind of weight and how often it occurs."""

    name: str  # module name, {layer} where there is one per layer, expert 0 for all experts
    part: str  # one of PARTS
    kind: str  # class name, which a scheme's targets may name: Linear, Embedding, Norm, Router, Parameter
    shape: tuple[int, ...]  # (out_features, in_features) for Linear
    bias: int = 0  # elements
    layers: tuple[int, ...] = ()  # layers that have it; empty = once in the model
    experts: int = 1  # copies per layer
    split: str = "whole"  # what tensor parallelism divides: rows (out) | kv_rows | columns (in) | vocab | whole
    buffers: int = 0  # float32 elements that are stored and are no parameters in transformers

    @property
    def copies(self) -> int:
        return max(1, len(self.layers)) * self.experts

    @property
    def parameters_each(self) -> int:
        return math.prod(self.shape) + self.bias

    @property
    def parameters(self) -> int:
        return self.parameters_each * self.copies


Text = Mapping[str, Any]


def head_dim(text: Text) -> int:
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def kv_heads(text: Text) -> int:
    return int(text.get("num_key_value_heads") or text["num_attention_heads"])


def sparse_layers(text: Text) -> tuple[int, ...]:
    """Layers whose feed-forward network is a mixture of experts."""
    count = int(text["num_hidden_layers"])
    if not experts_per_layer(text):
        return ()
    types = text.get("mlp_layer_types")
    if types:
        return tuple(i for i, kind in enumerate(types) if kind == "sparse")
    first = int(text.get("first_k_dense_replace") or 0)
    step = int(text.get("decoder_sparse_step") or text.get("moe_layer_freq") or 1)
    dense = set(text.get("mlp_only_layers") or ())
    # Qwen counts layers from one, DeepSeek from zero; with a step of 1, the only one published, both agree.
    return tuple(i for i in range(count) if i >= first and (i + 1) % step == 0 and i not in dense)


def experts_per_layer(text: Text) -> int:
    for key in ("n_routed_experts", "num_experts", "num_local_experts"):
        if text.get(key):
            return int(text[key])
    return 0


def text_modules(text: Text, architecture: str, prefix: str, head_prefix: str) -> Iterator[Module]:
    """Every weight of the language model. `prefix` is "model." or what a vision-language wrapper puts before it."""
    hidden, vocab = int(text["hidden_size"]), int(text["vocab_size"])
    layers = tuple(range(int(text["num_hidden_layers"])))
    yield Module(f"{prefix}embed_tokens", "embeddings", "Embedding", (vocab, hidden), split="vocab")
    if text.get("kv_lora_rank"):
        yield from _latent_attention(text, f"{prefix}layers.{{layer}}.self_attn.", layers)
    else:
        yield from _grouped_attention(text, architecture, f"{prefix}layers.{{layer}}.self_attn.", layers)
    yield from _feed_forward(text, architecture, f"{prefix}layers.{{layer}}.mlp.", layers)
    yield from _norms(architecture, f"{prefix}layers.{{layer}}.", hidden, layers)
    yield Module(f"{prefix}norm", "norms", "Norm", (hidden,))
    if not text.get("tie_word_embeddings", False):
        yield Module(f"{head_prefix}lm_head", "head", "Linear", (vocab, hidden), split="vocab")


def _grouped_attention(text: Text, architecture: str, prefix: str, layers: tuple[int, ...]) -> Iterator[Module]:
    hidden, size = int(text["hidden_size"]), head_dim(text)
    q, kv = int(text["num_attention_heads"]) * size, kv_heads(text) * size
    # Qwen2 has biases on q, k and v whatever its config says; the others say it in attention_bias.
    on_qkv = architecture.startswith("Qwen2") or bool(text.get("attention_bias"))
    on_o = bool(text.get("attention_bias")) and not architecture.startswith("Qwen2")

    def linear(name: str, out: int, into: int, split: str, bias: bool) -> Module:
        return Module(prefix + name, "attention", "Linear", (out, into), out if bias else 0, layers, split=split)

    yield linear("q_proj", q, hidden, "rows", on_qkv)
    yield linear("k_proj", kv, hidden, "kv_rows", on_qkv)
    yield linear("v_proj", kv, hidden, "kv_rows", on_qkv)
    yield linear("o_proj", hidden, q, "columns", on_o)
    if architecture.startswith(("Qwen3", "Gemma3")):
        for name in ("q_norm", "k_norm"):
            yield Module(prefix + name, "norms", "Norm", (size,), layers=layers)
    if architecture.startswith("GptOss"):
        yield Module(prefix + "sinks", "attention", "Parameter", (int(text["num_attention_heads"]),), layers=layers)


def _latent_attention(text: Text, prefix: str, layers: tuple[int, ...]) -> Iterator[Module]:
    """Multi-head latent attention: keys and values are rebuilt from one vector per token

    Source: DeepSeek-V2 paper, section 2.1.
    """
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    rank, rope, nope = int(text["kv_lora_rank"]), int(text["qk_rope_head_dim"]), int(text["qk_nope_head_dim"])
    value, q_rank = int(text["v_head_dim"]), text.get("q_lora_rank")
    bias = bool(text.get("attention_bias"))

    def linear(name: str, out: int, into: int, split: str = "whole", biased: bool = False) -> Module:
        return Module(prefix + name, "attention", "Linear", (out, into), out if biased else 0, layers, split=split)

    if q_rank:
        yield linear("q_a_proj", int(q_rank), hidden, biased=bias)
        yield Module(prefix + "q_a_layernorm", "norms", "Norm", (int(q_rank),), layers=layers)
        yield linear("q_b_proj", heads * (nope + rope), int(q_rank), "rows")
    else:
        yield linear("q_proj", heads * (nope + rope), hidden, "rows")
    yield linear("kv_a_proj_with_mqa", rank + rope, hidden, biased=bias)
    yield Module(prefix + "kv_a_layernorm", "norms", "Norm", (rank,), layers=layers)
    yield linear("kv_b_proj", heads * (nope + value), rank, "rows")
    yield linear("o_proj", hidden, heads * value, "columns", bias)
    if text.get("index_topk"):
        yield from _indexer(text, prefix + "indexer.", layers)


def _indexer(text: Text, prefix: str, layers: tuple[int, ...]) -> Iterator[Module]:
    """DeepSeek V3.2's lightning indexer, which picks the tokens that attention reads; whole on every GPU."""
    hidden, heads, size = int(text["hidden_size"]), int(text["index_n_heads"]), int(text["index_head_dim"])
    yield Module(prefix + "wq_b", "indexer", "Linear", (heads * size, int(text["q_lora_rank"])), layers=layers)
    yield Module(prefix + "wk", "indexer", "Linear", (size, hidden), layers=layers)
    yield Module(prefix + "weights_proj", "indexer", "Linear", (heads, hidden), layers=layers)
    yield Module(prefix + "k_norm", "norms", "Norm", (size,), bias=size, layers=layers)


def _feed_forward(text: Text, architecture: str, prefix: str, layers: tuple[int, ...]) -> Iterator[Module]:
    hidden = int(text["hidden_size"])
    sparse = sparse_layers(text)
    dense = tuple(i for i in layers if i not in set(sparse))
    if dense:
        bias = bool(text.get("mlp_bias"))
        yield from _gated(prefix, "mlp", hidden, int(text["intermediate_size"]), dense, bias=bias)
    if not sparse:
        return
    width = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    count = experts_per_layer(text)
    biased = architecture.startswith("GptOss")
    # DeepSeek's routers carry one float32 correction per expert, a buffer in transformers.
    corrections = count if text.get("topk_method") == "noaux_tc" or architecture.startswith("DeepseekV3") else 0
    router = "router" if biased else "gate"
    yield Module(
        prefix + router, "router", "Router", (count, hidden), count if biased else 0, sparse, buffers=corrections
    )
    yield from _gated(f"{prefix}experts.0.", "experts", hidden, width, sparse, count, biased)
    if text.get("n_shared_experts"):
        yield from _gated(f"{prefix}shared_experts.", "mlp", hidden, width * int(text["n_shared_experts"]), sparse)


def _gated(
    prefix: str, part: str, hidden: int, width: int, layers: tuple[int, ...], experts: int = 1, bias: bool = False
) -> Iterator[Module]:
    for name in ("gate_proj", "up_proj"):
        yield Module(prefix + name, part, "Linear", (width, hidden), width * bias, layers, experts, "rows")
    yield Module(prefix + "down_proj", part, "Linear", (hidden, width), hidden * bias, layers, experts, "columns")


def _norms(architecture: str, prefix: str, hidden: int, layers: tuple[int, ...]) -> Iterator[Module]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if architecture.startswith("Gemma3"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in names:
        yield Module(prefix + name, "norms", "Norm", (hidden,), layers=layers)
