"""A tiny Llama-like checkpoint, written by the safetensors library, and schemes to round it with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from evalq.config import QuantArgs, QuantConfig, QuantGroup

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file

HIDDEN, INTERMEDIATE, LAYERS = 64, 128, 2
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}


def tiny_tensors() -> dict[str, torch.Tensor]:
    """embed_tokens, norms and two layers of projections; tied head, so no lm_head; normal weights, bfloat16."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": normal(100, HIDDEN), "model.norm.weight": normal(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = normal(HIDDEN)
        for name, shape in SHAPES.items():
            tensors[f"{prefix}{name}.weight"] = normal(*shape)
    return tensors


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """A complete folder: weights, config.json, tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"model_type": "llama", "tie_word_embeddings": True, "hidden_size": HIDDEN, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def shard(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Cut the checkpoint of a folder in two files with an index."""
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


INT8 = QuantArgs(8, "int", "channel")
INT8_INPUT = QuantArgs(8, "int", "token", dynamic=True)
FP8 = QuantArgs(8, "float", "channel")
FP8_INPUT = QuantArgs(8, "float", "token", dynamic=True)


def int4(group_size: int = 32) -> QuantArgs:
    return QuantArgs(4, "int", "group", group_size=group_size)


def scheme(name: str = "test", ignore: list[str] | None = None, **groups: QuantGroup) -> QuantConfig:
    return QuantConfig(
        name=name, origin="evalq", kv_cache_dtype="bfloat16", groups=groups, ignore=ignore or ["lm_head"]
    )


def w4a16(**kwargs: int) -> QuantConfig:
    return scheme("w4a16", linear=QuantGroup(["Linear"], int4(**kwargs), None))


def int8() -> QuantConfig:
    return scheme("int8", linear=QuantGroup(["Linear"], INT8, INT8_INPUT))


def fp8() -> QuantConfig:
    return scheme("fp8", linear=QuantGroup(["Linear"], FP8, FP8_INPUT))


def mixed() -> QuantConfig:
    return scheme(
        "mixed",
        attention=QuantGroup(["re:.*self_attn[.](q|k|v|o)_proj$"], INT8, INT8_INPUT),
        feed_forward=QuantGroup(["re:.*mlp[.](gate|up)_proj$"], int4(), None),
    )


SCHEMES: dict[str, Callable[[], QuantConfig]] = {"w4a16": w4a16, "int8": int8, "fp8": fp8, "mixed": mixed}
