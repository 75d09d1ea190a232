"""Making a checkpoint: source folder + scheme -> compressed-tensors folder, kept by content, never half done."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalq.config import QuantConfig
from evalq.errors import MeasurementError
from evalq.quantize.compressed import Stored, quantization_config, round_layer, storage_format, stored_tensors
from evalq.quantize.hashing import problems_of, read_manifest, side_files, text_sha256, weights_hash, write_manifest
from evalq.quantize.scheme import Layer, assign_layers, linear_modules
from evalq.quantize.store import Progress, locked, new_folder
from evalq.quantize.tensors import CONFIG_FILE, TensorInfo, check_folder, read_config
from evalq.quantize.writer import CheckpointWriter
from evalq.records import file_sha256, write_text

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import torch

    from evalq.quantize.rounding import Rounded

QUANTIZER_VERSION = "1"  # raise it when the same recipe would give other bytes
REPORT_FILE = "quantization_report.json"
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Job:
    """All that is known before the first weight is read."""

    source: Path
    quant: QuantConfig
    tensors: Mapping[str, TensorInfo]
    layers: Mapping[str, Layer]
    config: dict[str, Any]
    source_hash: str
    key: str

    def stored(self) -> list[Stored]:
        """Every tensor of the result, in the order of the source."""
        result: list[Stored] = []
        for name, info in self.tensors.items():
            layer = self.layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
            result.extend(stored_tensors(layer) if layer else [Stored(name, info.dtype, info.shape)])
        return result


def recipe(quant: QuantConfig) -> dict[str, Any]:
    """The part of a scheme that decides the bytes of a checkpoint; the KV dtype is the engine's and not in it."""
    groups = {name: dataclasses.asdict(group) for name, group in quant.groups.items()}
    return {"groups": groups, "ignore": quant.ignore, "method": quant.method, "clip_search": quant.clip_search}


def recipe_hash(quant: QuantConfig) -> str:
    """sha256 of the recipe's canonical JSON."""
    return text_sha256(json.dumps(recipe(quant), sort_keys=True))


def plan_job(source: Path, quant: QuantConfig, progress: Progress | None = None) -> Job:
    """Check source and scheme against each other. Errors: ConfigError, MeasurementError(checkpoint)."""
    tensors = check_folder(source)
    config = read_config(source)
    layers = assign_layers(tensors, config, quant)
    source_hash = weights_hash(source, progress)
    side = [(file.name, file_sha256(file)) for file in side_files(source)]
    key = text_sha256(json.dumps([source_hash, side, recipe_hash(quant), QUANTIZER_VERSION]))
    return Job(source, quant, tensors, layers, config, source_hash, key)


def make_checkpoint(source: Path, quant: QuantConfig, out_root: Path, progress: Progress | None = None) -> Path:
    """Make, or find, the checkpoint of a scheme under `out_root`; the folder is named by content of weights and recipe.

    Errors: ConfigError (scheme does not fit the model), MeasurementError (checkpoint, disk).
    """
    job = plan_job(source, quant, progress)
    return _make(job, out_root / job.key[:20], progress)


def make_checkpoint_at(source: Path, quant: QuantConfig, folder: Path, progress: Progress | None = None) -> Path:
    """As make_checkpoint, into exactly `folder`. Errors: MeasurementError(disk) when other things are in it."""
    job = plan_job(source, quant, progress)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and _key_of(folder) != job.key:
        raise MeasurementError(
            f"{folder} exists and is not this checkpoint; choose another folder or remove it first", kind="disk"
        )
    return _make(job, folder, progress)


def _key_of(folder: Path) -> str | None:
    try:
        return str(read_manifest(folder).get("key"))
    except MeasurementError:
        return None


def _whole(folder: Path, key: str) -> bool:
    return _key_of(folder) == key and not problems_of(folder, contents=False)


def _make(job: Job, target: Path, progress: Progress | None, shard_bytes: int = SHARD_BYTES) -> Path:
    if _whole(target, job.key):
        return target
    with locked(target, progress):
        if _whole(target, job.key):  # another process made it while we waited
            return target
        stored = job.stored()
        side = side_files(job.source)
        needed = sum(item.nbytes for item in stored) + sum(file.stat().st_size for file in side)
        with new_folder(target, needed) as folder:
            _write_config(job, folder)
            report = _write_weights(job, CheckpointWriter(folder, stored, shard_bytes), progress)
            write_text(folder / REPORT_FILE, json.dumps(report, indent=1, allow_nan=False) + "\n")
            for file in side:
                shutil.copyfile(file, folder / file.name)
            write_manifest(folder, {"kind": "quantized", "key": job.key, "source_hash": job.source_hash})
    return target


def _write_config(job: Job, folder: Path) -> None:
    # Linear modules outside every group are named: older readers raise when a module matches no target.
    left = [name for name in linear_modules(job.tensors.values()) if name not in job.layers]
    unlisted = [name for name in left if name not in job.quant.ignore]
    config = {**job.config, "quantization_config": quantization_config(job.quant, unlisted)}
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _write_weights(job: Job, writer: CheckpointWriter, progress: Progress | None) -> dict[str, Any]:
    """Round or copy tensor by tensor; returns the report. Progress counts rounded weights."""
    from evalq.quantize.rounding import rounding_threads

    total = sum(layer.info.shape[0] * layer.info.shape[1] for layer in job.layers.values())
    done = 0
    costs: dict[str, Rounded] = {}
    with rounding_threads() as pool:
        for name, info in job.tensors.items():
            module = name.removesuffix(".weight")
            layer = job.layers.get(module) if name.endswith(".weight") else None
            if progress is not None:
                progress(done, total, f"rounding {module}" if layer else f"copying {name}")
            if layer is None:
                _copy(writer, info)
                continue
            costs[module] = _round(writer, layer, job.quant.clip_search, pool)
            done += info.shape[0] * info.shape[1]
    if progress is not None:
        progress(total, total, "writing to disk")
    return _report(job, costs)


def _copy(writer: CheckpointWriter, info: TensorInfo) -> None:
    try:
        writer.copy(info)
    except EOFError as error:
        raise MeasurementError(f"{info.file} became shorter while it was read; copy it again", "checkpoint") from error


def _round(writer: CheckpointWriter, layer: Layer, clip_search: bool, pool: Executor) -> Rounded:
    try:
        tensors, cost = round_layer(layer, load(layer.info), clip_search, pool)
    except ValueError as error:
        raise MeasurementError(
            f"the tensor {layer.info.name} of {layer.info.file} cannot be rounded: {error}; use a sound checkpoint",
            kind="checkpoint",
        ) from error
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    return dataclasses.replace(cost, codes=cost.codes[:0], scales=cost.scales[:0])  # keep the figures, not the weights


def load(info: TensorInfo) -> torch.Tensor:
    """One float tensor of a checkpoint, in its own dtype."""
    import torch

    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    return torch.frombuffer(info.read(), dtype=dtypes[info.dtype]).reshape(info.shape)


def _report(job: Job, costs: dict[str, Rounded]) -> dict[str, Any]:
    """What rounding cost: squared error over squared weights, per layer and per group (no unit)."""
    layers = {
        module: {
            "group": job.layers[module].group,
            "shape": list(job.layers[module].info.shape),
            "relative_squared_error": cost.relative_squared_error,
        }
        for module, cost in costs.items()
    }
    return {
        "quantizer_version": QUANTIZER_VERSION,
        "recipe_hash": recipe_hash(job.quant),
        "recipe": recipe(job.quant),
        "source_hash": job.source_hash,
        "groups": {name: _group_report(job, costs, name) for name in job.quant.groups},
        "layers": layers,
        "kept": [name for name in job.tensors if name.removesuffix(".weight") not in costs],
    }


def _group_report(job: Job, costs: dict[str, Rounded], group: str) -> dict[str, Any]:
    mine = {module: cost for module, cost in costs.items() if job.layers[module].group == group}
    norm = sum(cost.squared_norm for cost in mine.values())
    worst = max(mine, key=lambda module: mine[module].relative_squared_error)
    return {
        "format": storage_format(job.quant.groups[group]),
        "layers": len(mine),
        "weights": sum(job.layers[module].info.shape[0] * job.layers[module].info.shape[1] for module in mine),
        "relative_squared_error": sum(cost.squared_error for cost in mine.values()) / norm if norm else 0.0,
        "worst_layer": worst,
    }
