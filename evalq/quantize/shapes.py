"""Checkpoints without weights: config.json alone, for memory and speed with engine.load_format=dummy. Never for quality."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from evalq.config import ModelConfig, QuantConfig
from evalq.errors import ConfigError
from evalq.facts.models import facts_of
from evalq.facts.schemes import assign
from evalq.quantize.compressed import quantization_config
from evalq.records import write_text


def shape_checkpoint(model: ModelConfig, quant: QuantConfig, root: Path) -> Path:
    """A folder with the model's config.json and, for a scheme made by evalq, its quantization_config.

    Errors: ConfigError when the config has no arch.
    """
    if not model.arch:
        raise ConfigError(
            f"model {model.name} has no arch, which dummy weights are shaped by; give model.arch, or load_format=auto"
        )
    config: dict[str, Any] = dict(model.arch)
    config.setdefault("torch_dtype", model.dtype)
    if quant.origin == "evalq":
        config["quantization_config"] = quantization_config(quant, _left_alone(model, quant))
    text = json.dumps(config, indent=2) + "\n"
    folder = root / f"shapes-{model.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    write_text(folder / "config.json", text)
    return folder


def _left_alone(model: ModelConfig, quant: QuantConfig) -> list[str]:
    """Patterns of the linear modules outside every group: older engines raise when a module matches no target."""
    names = [
        item.module.name
        for item in assign(facts_of(model), quant)
        if item.module.kind == "Linear" and item.scheme is None and item.module.name not in quant.ignore
    ]
    return [
        "re:.*" + name.split("{layer}", 1)[-1].replace(".", "[.]") + "$" if "{layer}" in name else name
        for name in names
    ]
