"""A model's facts from a Hugging Face config.json: parameters by part (exact), what its KV cache holds, how it splits.

One code path serves conf/model and any config.json. An architecture that is not in ARCHITECTURES is refused: a guess
about its weights would look like a fact.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from evalq.config import ModelConfig, nearest
from evalq.errors import ConfigError
from evalq.facts import vision
from evalq.facts.modules import PARTS, Module, experts_per_layer, head_dim, kv_heads, text_modules

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# architecture -> prefix of the language model's names, prefix of lm_head
ARCHITECTURES: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("model.", ""),
    "MistralForCausalLM": ("model.", ""),
    "Qwen2ForCausalLM": ("model.", ""),
    "Qwen3ForCausalLM": ("model.", ""),
    "Qwen3MoeForCausalLM": ("model.", ""),
    "Gemma3ForCausalLM": ("model.", ""),
    "GptOssForCausalLM": ("model.", ""),
    "DeepseekV3ForCausalLM": ("model.", ""),
    "DeepseekV32ForCausalLM": ("model.", ""),
    "Qwen3VLForConditionalGeneration": ("model.language_model.", ""),
    "Qwen3VLMoeForConditionalGeneration": ("model.language_model.", ""),
    "KimiK25ForConditionalGeneration": ("language_model.model.", "language_model."),
}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class ModelFacts:
    """What the planner knows about a model. Sizes in elements, lengths in tokens."""

    identity: str  # hash of the config that the facts are from: equal identity = equal facts
    architecture: str
    modules: tuple[Module, ...]
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of the widest feed-forward network that is not an expert; 0 = none
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention: str  # gqa | mla | sparse-mla (mla with an indexer)
    latent_dim: int  # cached per token and layer by mla: latent + rotary part
    rope_dim: int  # of latent_dim, the rotary part
    index_dim: int  # cached per token and layer by the indexer; 0 = none
    windows: tuple[int | None, ...]  # sliding window of each layer, None = full attention
    vocab_size: int
    max_positions: int | None
    tied: bool  # the output head is the embedding table
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    has_vision: bool
    not_loaded_layers: int  # next-token-prediction layers that the published checkpoint has and the engine leaves out
    quantization: Mapping[str, Any] | None  # the checkpoint's own quantization_config

    def parameters(self) -> int:
        return sum(module.parameters for module in self.modules)

    def parameters_by_part(self) -> dict[str, int]:
        """Parameters of each part, parts without any left out."""
        totals = dict.fromkeys(PARTS, 0)
        for module in self.modules:
            totals[module.part] += module.parameters
        return {part: count for part, count in totals.items() if count}

    def active_parameters(self) -> int:
        """Parameters a token's matrix products read: the chosen experts only, no embeddings, norms or vision."""
        share = self.experts_per_token / self.num_experts if self.num_experts else 1.0
        total = 0.0
        for module in self.modules:
            if module.part in ("attention", "indexer", "mlp", "router", "head"):
                total += module.parameters
            elif module.part == "experts":
                total += module.parameters * share
        if self.tied:
            total += self.vocab_size * self.hidden_size
        return round(total)


def model_facts(arch: Mapping[str, Any]) -> ModelFacts:
    """Facts from the keys of a config.json. Errors: ConfigError for an unknown architecture or a missing key."""
    return _facts_cached(json.dumps(arch, sort_keys=True, default=str))


def facts_of(model: ModelConfig) -> ModelFacts:
    """Facts of a configured model: the config.json of its `path`, else its `arch`. Reads at most that one file."""
    if model.path and (Path(model.path) / "config.json").is_file():
        return model_facts(read_config(Path(model.path)))
    if model.arch:
        return model_facts(model.arch)
    if model.path:
        return model_facts(read_config(Path(model.path)))
    raise ConfigError(f"model {model.name} has no arch; add the keys of its config.json, or give model.path=FOLDER")


def read_config(path: Path) -> dict[str, Any]:
    """A config.json, by its own path or its folder's. Errors: ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no model config at {file}; give a config.json or the folder that holds one") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no readable config.json ({error}); fetch it again") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds no mapping; a model's config.json starts with an opening brace")
    return data


@lru_cache(maxsize=64)
def _facts_cached(text: str) -> ModelFacts:
    return _build(json.loads(text), hashlib.sha256(text.encode()).hexdigest())


def _build(arch: dict[str, Any], identity: str) -> ModelFacts:
    architecture = str((arch.get("architectures") or ["(none)"])[0])
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture!r} is not known: {nearest(architecture, tuple(ARCHITECTURES))}")
    text = _text_part(arch)
    missing = [key for key in _NEEDED if not text.get(key)]
    if missing:
        raise ConfigError(f"the config of {architecture} lacks {', '.join(missing)}; give the model's own config.json")
    try:
        return _assemble(arch, text, architecture, identity)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the config of {architecture} cannot be read ({error!r}); give the model's own config.json"
        ) from error


def _text_part(arch: dict[str, Any]) -> dict[str, Any]:
    """The language model's keys, with what wrappers keep outside of text_config."""
    text = dict(arch.get("text_config") or arch)
    # A wrapper's own tie_word_embeddings is what its weights follow; the nested default may differ.
    if "tie_word_embeddings" in arch:
        text["tie_word_embeddings"] = arch["tie_word_embeddings"]
    return text


def _assemble(arch: dict[str, Any], text: dict[str, Any], architecture: str, identity: str) -> ModelFacts:
    prefix, head_prefix = ARCHITECTURES[architecture]
    inner = str((text.get("architectures") or [architecture])[0])
    if architecture.startswith("Gemma3"):
        text.setdefault("tie_word_embeddings", True)  # the class's own default
    modules = [*text_modules(text, inner, prefix, head_prefix), *_vision_modules(arch, architecture)]
    latent = int(text.get("kv_lora_rank") or 0)
    rope = int(text.get("qk_rope_head_dim") or 0) if latent else 0
    index = int(text.get("index_head_dim") or 0) if text.get("index_topk") else 0
    return ModelFacts(
        identity=identity,
        architecture=architecture,
        modules=tuple(modules),
        num_layers=int(text["num_hidden_layers"]),
        hidden_size=int(text["hidden_size"]),
        intermediate_size=int(text.get("intermediate_size") or 0),
        num_heads=int(text["num_attention_heads"]),
        num_kv_heads=kv_heads(text),
        head_dim=head_dim(text),
        attention="gqa" if not latent else "sparse-mla" if index else "mla",
        latent_dim=latent + rope,
        rope_dim=rope,
        index_dim=index,
        windows=_windows(text),
        vocab_size=int(text["vocab_size"]),
        max_positions=text.get("max_position_embeddings"),
        tied=bool(text.get("tie_word_embeddings", False)),
        num_experts=experts_per_layer(text),
        experts_per_token=int(text.get("num_experts_per_tok") or 0),
        moe_intermediate_size=int(text.get("moe_intermediate_size") or 0),
        has_vision="vision_config" in arch,
        not_loaded_layers=int(text.get("num_nextn_predict_layers") or 0),
        quantization=arch.get("quantization_config") or text.get("quantization_config"),
    )


def _vision_modules(arch: dict[str, Any], architecture: str) -> list[Module]:
    if "vision_config" not in arch:
        return []
    build = vision.kimi if architecture.startswith("Kimi") else vision.qwen3_vl
    return list(build(arch["vision_config"]))


def _windows(text: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Sliding window of each layer: from layer_types, from Gemma's pattern, else one window for all or none."""
    count = int(text["num_hidden_layers"])
    window = text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return (None,) * count
    types = text.get("layer_types")
    if types:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in types)
    pattern = text.get("sliding_window_pattern")
    if pattern:
        return tuple(None if (i + 1) % int(pattern) == 0 else int(window) for i in range(count))
    return (int(window),) * count
