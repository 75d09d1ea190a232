"""The 16-bit checkpoint that everything starts from: a folder of one's own, a package's GGUF, or the hub."""

from __future__ import annotations

from pathlib import Path

from evalq.config import ModelConfig
from evalq.errors import ConfigError
from evalq.quantize.hub import hub_checkpoint
from evalq.quantize.packaged import packaged_checkpoint
from evalq.quantize.store import Progress
from evalq.quantize.tensors import check_folder


def source_checkpoint(model: ModelConfig, models_dir: Path, progress: Progress | None = None) -> Path:
    """Folder of the model's 16-bit checkpoint: config.json, safetensors, tokenizer; made or fetched when needed.

    Errors: ConfigError (no such folder, pickled weights, unknown package or hub id), MeasurementError (checkpoint, hub,
    disk).
    """
    if model.path:
        folder = Path(model.path).expanduser()
        if folder.is_file():
            raise ConfigError(f"model.path={model.path} is a file; give the folder that holds config.json and weights")
        folder = folder.resolve()
    elif model.source == "package":
        folder = packaged_checkpoint(model, models_dir, progress)
    elif model.source == "hub":
        folder = hub_checkpoint(model)
    else:
        raise ConfigError(f"model {model.name} needs model.path=/your/checkpoint")
    check_folder(folder)
    return folder
