"""The vision encoders of the models evalq knows, part "vision", from their vision_config."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from evalq.facts.modules import Module

Vision = Mapping[str, Any]


def qwen3_vl(vision: Vision) -> Iterator[Module]:
    """Qwen3-VL's encoder: patches, learned positions, blocks, one merger and one more for each deep-stack layer."""
    hidden, width, depth = int(vision["hidden_size"]), int(vision["intermediate_size"]), int(vision["depth"])
    patch = int(vision["patch_size"])
    pixels = int(vision.get("in_channels", 3)) * int(vision["temporal_patch_size"]) * patch * patch
    blocks = tuple(range(depth))
    yield Module("model.visual.patch_embed.proj", "vision", "Conv", (hidden, pixels), hidden)
    positions = (int(vision["num_position_embeddings"]), hidden)
    yield Module("model.visual.pos_embed", "vision", "Embedding", positions)
    name = "model.visual.blocks.{layer}."
    yield from _block(
        (f"{name}norm1", f"{name}norm2"),
        (
            (f"{name}attn.qkv", 3 * hidden, hidden, "rows"),
            (f"{name}attn.proj", hidden, hidden, "columns"),
            (f"{name}mlp.linear_fc1", width, hidden, "rows"),
            (f"{name}mlp.linear_fc2", hidden, width, "columns"),
        ),
        hidden,
        blocks,
    )
    merged = hidden * int(vision["spatial_merge_size"]) ** 2
    mergers = [("model.visual.merger.", hidden)]
    for index, _ in enumerate(vision.get("deepstack_visual_indexes") or ()):
        mergers.append((f"model.visual.deepstack_merger_list.{index}.", merged))
    for prefix, normed in mergers:
        yield Module(prefix + "norm", "vision", "Norm", (normed,), normed)
        yield Module(prefix + "linear_fc1", "vision", "Linear", (merged, merged), merged, split="rows")
        out = int(vision["out_hidden_size"])
        yield Module(prefix + "linear_fc2", "vision", "Linear", (out, merged), out, split="columns")


def kimi(vision: Vision) -> Iterator[Module]:
    """Kimi-K2.5's encoder (MoonViT with a time axis) and its projector to the language model."""
    hidden, width = int(vision["vt_hidden_size"]), int(vision["vt_intermediate_size"])
    blocks = tuple(range(int(vision["vt_num_hidden_layers"])))
    patch = int(vision["patch_size"])
    yield Module("vision_tower.patch_embed.proj", "vision", "Conv", (hidden, 3 * patch * patch), hidden)
    grid = (int(vision["init_pos_emb_height"]), int(vision["init_pos_emb_width"]), hidden)
    yield Module("vision_tower.patch_embed.pos_emb", "vision", "Parameter", grid)
    name = "vision_tower.encoder.blocks.{layer}."
    yield from _block(
        (f"{name}norm0", f"{name}norm1"),
        (
            (f"{name}wqkv", 3 * hidden, hidden, "rows"),
            (f"{name}wo", hidden, hidden, "columns"),
            (f"{name}mlp.fc0", width, hidden, "rows"),
            (f"{name}mlp.fc1", hidden, width, "columns"),
        ),
        hidden,
        blocks,
    )
    yield Module("vision_tower.encoder.final_layernorm", "vision", "Norm", (hidden,), hidden)
    into = int(vision["mm_hidden_size"])
    merged = into * math.prod(int(side) for side in vision["merge_kernel_size"])
    text = int(vision["text_hidden_size"])
    yield Module("mm_projector.pre_norm", "vision", "Norm", (into,), into)
    yield Module("mm_projector.proj.0", "vision", "Linear", (merged, merged), merged)
    yield Module("mm_projector.proj.2", "vision", "Linear", (text, merged), text)


def _block(
    norms: tuple[str, ...],
    linears: tuple[tuple[str, int, int, str], ...],
    hidden: int,
    blocks: tuple[int, ...],
) -> Iterator[Module]:
    for name in norms:
        yield Module(name, "vision", "Norm", (hidden,), hidden, blocks)
    for name, out, into, split in linears:
        yield Module(name, "vision", "Linear", (out, into), out, blocks, split=split)
