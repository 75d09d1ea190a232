"""The smallest folder that counts as a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path


def tiny_safetensors(folder: Path, **files: str) -> Path:
    """The smallest folder that counts as a checkpoint: one tensor of two zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    for name, text in {"config.json": "{}", "tokenizer.json": "{}", **files}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
