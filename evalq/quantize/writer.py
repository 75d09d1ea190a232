"""Writing safetensors files whose tensors are all known beforehand: one tensor in memory at a time, any order."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from evalq.quantize.compressed import Stored
from evalq.quantize.tensors import INDEX_FILE, ITEM_BYTES, TensorInfo
from evalq.records import write_text

if TYPE_CHECKING:
    import torch

COPY_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: file name and absolute offset in it."""

    file: str
    start: int
    stored: Stored


def split_shards(tensors: Iterable[Stored], shard_bytes: int) -> list[list[Stored]]:
    """Tensors in order, cut into files of at most `shard_bytes` (a single larger tensor gets a file of its own)."""
    shards: list[list[Stored]] = []
    size = 0
    for stored in tensors:
        if not shards or size + stored.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(stored)
        size += stored.nbytes
    return shards


class CheckpointWriter:
    """Safetensors files of a checkpoint, allocated in full at the start, so that a full disk shows at once.

    Errors: OSError (ENOSPC) when there is no room.
    """

    def __init__(self, folder: Path, tensors: Iterable[Stored], shard_bytes: int) -> None:
        self.folder = folder
        self.places: dict[str, Place] = {}
        shards = split_shards(tensors, shard_bytes)
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
            self._allocate(name, shard)
        if len(shards) > 1:
            self._write_index()

    def _allocate(self, name: str, shard: list[Stored]) -> None:
        # Wide items first: readers view the bytes as items, which asks for aligned offsets.
        ordered = sorted(shard, key=lambda stored: -ITEM_BYTES[stored.dtype])
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for stored in ordered:
            span = [offset, offset + stored.nbytes]
            entries[stored.name] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": span}
            offset = span[1]
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        with open(self.folder / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, 8 + len(header) + offset)
        start = 8 + len(header)
        for stored in ordered:
            self.places[stored.name] = Place(name, start, stored)
            start += stored.nbytes

    def _write_index(self) -> None:
        total = sum(place.stored.nbytes for place in self.places.values())
        weight_map = {name: place.file for name, place in self.places.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_text(self.folder / INDEX_FILE, json.dumps(index, indent=1) + "\n")

    def _open_at(self, place: Place) -> BinaryIO:
        file = open(self.folder / place.file, "r+b")  # noqa: SIM115 - the caller closes it
        file.seek(place.start)
        return file

    def copy(self, info: TensorInfo) -> None:
        """Copy a tensor's bytes from the source, unchanged and in blocks."""
        with self._open_at(self.places[info.name]) as target, open(info.file, "rb") as source:
            source.seek(info.start)
            left = info.nbytes
            while left:
                block = source.read(min(left, COPY_BLOCK_BYTES))
                if not block:
                    raise EOFError(info.name)
                target.write(block)
                left -= len(block)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor of the shape and size that were announced. Errors: ValueError when they differ."""
        import torch

        place = self.places[name]
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        if tuple(tensor.shape) != place.stored.shape or data.nbytes != place.stored.nbytes:
            raise ValueError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, announced as {place.stored}")
        with self._open_at(place) as file:
            file.write(data)
