"""Do stored activation scales still hold what new text brings? Seen in the 16-bit source, layer by layer.

A static scale s of an E4M3 input holds values up to 448 s; what lies beyond saturates. Dynamic scales and scales of weights
do not depend on text, so there is nothing in them that could drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalq.errors import MeasurementError
from evalq.quantize.make import load
from evalq.quantize.rounding import E4M3_MAX
from evalq.quantize.tensors import checkpoint_tensors

INPUT_SCALE = ".input_scale"


@dataclass(frozen=True)
class Saturation:
    """One layer: its stored range, the largest input on the new text, and the share of inputs beyond the range."""

    module: str
    stored_range: float
    largest: float
    share_beyond: float


def stored_scales(checkpoint: Path) -> dict[str, float]:
    """Module -> static input scale of a checkpoint; empty where no scale depends on text."""
    return {
        name.removesuffix(INPUT_SCALE): float(load(info).float().reshape(-1)[0])
        for name, info in checkpoint_tensors(checkpoint).items()
        if name.endswith(INPUT_SCALE)
    }


def saturation(source: Path, scales: dict[str, float], windows: Sequence[Sequence[int]]) -> list[Saturation]:
    """Run the 16-bit source over token windows and compare its layers' inputs with the stored ranges.

    Errors: MeasurementError(checkpoint) when transformers cannot run the source or it lacks a layer.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True).eval()
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise MeasurementError(
            f"{source} cannot be run ({first_line}); give another model.path", "checkpoint"
        ) from error
    modules = dict(model.named_modules())
    missing = [name for name in scales if name not in modules]
    if missing:
        raise MeasurementError(
            f"{source} has no layer {missing[0]}, which the checkpoint has a scale for", "checkpoint"
        )
    seen: dict[str, list[float]] = {name: [0.0, 0.0, 0.0] for name in scales}  # largest, beyond, all

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: tuple[Any, ...]) -> None:
            values = inputs[0].detach().float().abs()
            tally = seen[name]
            tally[0] = max(tally[0], float(values.max()))
            tally[1] += float((values > E4M3_MAX * scales[name]).sum())
            tally[2] += values.numel()

        return hook

    for name in scales:
        modules[name].register_forward_pre_hook(watch(name))
    with torch.inference_mode():
        for row in windows:
            model(torch.tensor([list(row)]), use_cache=False)
    return [
        Saturation(name, E4M3_MAX * scales[name], largest, beyond / count if count else 0.0)
        for name, (largest, beyond, count) in seen.items()
    ]
