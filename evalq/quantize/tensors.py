"""Tensors of a checkpoint folder, read from the headers of its safetensors files; no weight is loaded.

Format (safetensors): 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, data.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalq.errors import ConfigError, MeasurementError

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: `start` and `nbytes` say where its bytes lie in `file`."""

    name: str
    file: Path
    dtype: str  # safetensors' name, a key of ITEM_BYTES
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def read(self) -> bytearray:
        """The tensor's bytes. Errors: MeasurementError(checkpoint) when the file ends early."""
        data = bytearray(self.nbytes)
        with open(self.file, "rb") as file:
            file.seek(self.start)
            count = file.readinto(data)
        if count != self.nbytes:
            raise _damaged(self.file, f"ends inside the tensor {self.name}")
        return data


def _damaged(file: Path, what: str) -> MeasurementError:
    return MeasurementError(f"the checkpoint file {file} {what}; download or copy it again", kind="checkpoint")


def read_tensors(file: Path) -> list[TensorInfo]:
    """Tensors of one safetensors file. Errors: MeasurementError(checkpoint) when header and file size disagree."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise _damaged(file, f"({size} bytes) is truncated or no safetensors file")
            header = json.loads(handle.read(length))
    except OSError as error:
        raise _damaged(file, f"cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise _damaged(file, f"has a header that is no JSON ({error})") from error
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    tensors = [_tensor(file, name, entry, 8 + length) for name, entry in entries.items()]
    _check_layout(file, tensors, 8 + length, size)
    return tensors


def _tensor(file: Path, name: str, entry: Any, base: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = str(entry["dtype"]), tuple(map(int, entry["shape"])), entry["data_offsets"]
        info = TensorInfo(name, file, dtype, shape, base + int(start), int(end) - int(start))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(file, f"has no usable header entry for the tensor {name}") from error
    if min((0, *shape)) < 0 or (dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != info.nbytes):
        raise _damaged(
            file, f"gives the tensor {name} {info.nbytes} bytes, which is not what {dtype}{list(shape)} takes"
        )
    return info


def _check_layout(file: Path, tensors: list[TensorInfo], base: int, size: int) -> None:
    """The bytes of all tensors fill the file from the header to the end, without holes."""
    position = base
    for info in sorted(tensors, key=lambda t: (t.start, t.nbytes)):
        if info.start != position:
            raise _damaged(file, f"has overlapping tensors or a hole before {info.name}")
        position += info.nbytes
    if position != size:
        raise _damaged(file, f"is {size} bytes long and its header asks for {position}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint, by name. Errors: ConfigError, MeasurementError(checkpoint)."""
    if not folder.is_dir():
        raise ConfigError(f"no checkpoint folder at {folder}; give a folder with config.json and safetensors files")
    index = folder / INDEX_FILE
    if index.is_file():
        files = sorted(set(_weight_map(index).values()))
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise _damaged(index, f"names {missing[0]}, which is missing")
        return [folder / name for name in files]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    if any(file.suffix in PICKLE_SUFFIXES for file in folder.iterdir()):
        raise ConfigError(
            f"{folder} holds only pickled weights (.bin, .pt), which can run code when loaded; "
            "convert them to safetensors with save_pretrained and give that folder"
        )
    raise MeasurementError(f"{folder} holds no safetensors file; give a complete checkpoint", kind="checkpoint")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        mapping = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, f"is no readable index ({error})") from error
    if not mapping:
        raise _damaged(index, "lists no tensors")
    for file in mapping.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise _damaged(index, f"names {file!r}, which is not a safetensors file in the same folder")
    return mapping


def checkpoint_tensors(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint, in file order. Errors: as weight_files; a tensor the index lists and no file has."""
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        for info in read_tensors(file):
            if info.name in tensors:
                raise _damaged(file, f"repeats the tensor {info.name} of {tensors[info.name].file.name}")
            tensors[info.name] = info
    index = folder / INDEX_FILE
    if index.is_file():
        for name, file_name in _weight_map(index).items():
            if name not in tensors or tensors[name].file.name != file_name:
                raise _damaged(folder / file_name, f"lacks the tensor {name}, which {INDEX_FILE} places there")
    return tensors


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint. Errors: MeasurementError(checkpoint)."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise MeasurementError(f"{folder} has no {CONFIG_FILE}; give a complete checkpoint folder", kind="checkpoint")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(file, f"is no readable JSON ({error})") from error
    if not isinstance(config, dict):
        raise _damaged(file, "holds no JSON object")
    return config


def check_folder(folder: Path) -> dict[str, TensorInfo]:
    """Check that a checkpoint folder is complete and return its tensors.

    Errors: ConfigError (no such folder, pickled weights), MeasurementError(checkpoint) (missing or damaged part).
    """
    tensors = checkpoint_tensors(folder)
    read_config(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES) and not any(folder.glob("*.tiktoken")):
        raise MeasurementError(
            f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES[:3])}, ...); copy the model's tokenizer there",
            kind="checkpoint",
        )
    return tensors
