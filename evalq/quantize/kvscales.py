"""A checkpoint with measured KV scales: the weights as they are (or as another scheme made them), and k_scale, v_scale tensors.

The scale of a layer is the largest absolute key (or value) over 448, the largest E4M3 value, so that nothing of the
calibration text saturates. Written as compressed-tensors' kv_cache_scheme, which vLLM reads.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from evalq.config import QuantConfig
from evalq.errors import MeasurementError
from evalq.quantize.hashing import problems_of, read_manifest, side_files, text_sha256, weights_hash, write_manifest
from evalq.quantize.kvmeasure import WINDOW, calibration_text
from evalq.quantize.store import Progress, locked, new_folder
from evalq.quantize.tensors import CONFIG_FILE, INDEX_FILE, checkpoint_tensors, read_config, weight_files
from evalq.records import write_text

KV_SCALES_VERSION = "1"  # raise it when the same text would give other scales
SCALES_FILE = "kv_scales.safetensors"
REPORT_FILE = "quantization_report.json"
E4M3_MAX = 448.0
TIMEOUT_SECONDS = 3600.0
MEASURE = [sys.executable, "-m", "evalq.quantize.kvmeasure"]  # a process of its own, which gives its memory back
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def has_computed_scales(quant: QuantConfig) -> bool:
    """Whether a scheme asks for scales that evalq measures."""
    return quant.kv_scale_source == "computed"


def add_kv_scales(folder: Path, source: Path, out_root: Path, progress: Progress | None = None) -> Path:
    """The checkpoint in `folder` with KV scales of the model in `source` (16 bit), made or found under `out_root`.

    Errors: MeasurementError(checkpoint) when the model cannot be measured, (disk) when there is no room.
    """
    key = text_sha256(json.dumps([weights_hash(folder), weights_hash(source), scales_text_hash(), KV_SCALES_VERSION]))
    target = out_root / key[:20]
    if _whole(target, key):
        return target
    with locked(target, progress):
        if _whole(target, key):
            return target
        if progress is not None:
            progress(0, 1, "measuring keys and values over calibration text")
        return write_kv_scales(folder, measured_scales(source), target, key)


def scales_text_hash() -> str:
    """Of the text, and how it is cut, over which KV scales are measured."""
    return text_sha256(json.dumps([calibration_text(), WINDOW]))


def _whole(folder: Path, key: str) -> bool:
    try:
        return read_manifest(folder).get("key") == key and not problems_of(folder, contents=False)
    except MeasurementError:
        return False


def measured_scales(source: Path) -> dict[str, Any]:
    """{"tokens", "k": scale by layer, "v": scale by layer}, from a process of its own. Errors: MeasurementError(checkpoint)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "largest.json"
        command = [*MEASURE, str(source), str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise _unmeasured(source, f"no answer after {TIMEOUT_SECONDS:g} s") from error
        if done.returncode != 0 or not out.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise _unmeasured(source, lines[-1][:300] if lines else f"exit code {done.returncode}")
        largest = json.loads(out.read_text(encoding="utf-8"))
    return {"tokens": largest["tokens"], "k": _scales(source, largest["k"]), "v": _scales(source, largest["v"])}


def _scales(source: Path, largest: list[float]) -> list[float]:
    if not largest or not all(math.isfinite(value) and value > 0.0 for value in largest):
        raise _unmeasured(source, "a layer's keys or values are all 0 or not finite")
    return [value / E4M3_MAX for value in largest]


def _unmeasured(source: Path, why: str) -> MeasurementError:
    return MeasurementError(
        f"the keys and values of {source} could not be measured ({why}); use quant=fp8-kv, whose scales are 1.0",
        "checkpoint",
    )


def scale_names(folder: Path, layers: int) -> list[str]:
    """Name of each layer's attention module in the checkpoint. Errors: MeasurementError(checkpoint)."""
    modules = {
        name.removesuffix(".k_proj" + suffix)
        for name in checkpoint_tensors(folder)
        for suffix in (".weight", ".weight_packed")
        if name.endswith(f".k_proj{suffix}")
    }
    ordered = sorted(modules, key=_layer_number)
    if len(ordered) != layers:
        raise MeasurementError(
            f"{folder} has {len(ordered)} attention layers with a k_proj and the model cached {layers}; "
            "KV scales can be computed for models with plain or grouped-query attention only",
            "checkpoint",
        )
    return ordered


def _layer_number(module: str) -> tuple[int, ...]:
    return tuple(int(part) for part in module.split(".") if part.isdigit())


def write_kv_scales(folder: Path, scales: dict[str, Any], target: Path, key: str) -> Path:
    """The checkpoint in `folder` with these scales, as the new folder `target` whose manifest holds `key`.

    scales: {"tokens": of the text they are from, "k": one per layer, "v": one per layer}. Errors: MeasurementError(checkpoint)
    when the layers do not match, (disk) when there is no room.
    """
    import torch
    from safetensors.torch import save_file

    names = scale_names(folder, len(scales["k"]))
    tensors = {}
    for name, k, v in zip(names, scales["k"], scales["v"], strict=True):
        tensors[f"{name}.k_scale"] = torch.tensor(k, dtype=torch.float32)
        tensors[f"{name}.v_scale"] = torch.tensor(v, dtype=torch.float32)
    weights, side = weight_files(folder), side_files(folder)
    with new_folder(target, sum(file.stat().st_size for file in [*weights, *side])) as made:
        for file in [*weights, *side]:
            if file.name != INDEX_FILE:
                shutil.copyfile(file, made / file.name)
        save_file(tensors, made / SCALES_FILE, metadata={"format": "pt"})
        _write_index(folder, made, list(tensors))
        config = {**read_config(folder), "quantization_config": _quantization_config(folder)}
        write_text(made / CONFIG_FILE, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        write_text(made / REPORT_FILE, json.dumps(_report(folder, scales, names), indent=1, allow_nan=False) + "\n")
        write_manifest(made, {"kind": "kv scales", "key": key})
    return target


def _write_index(folder: Path, made: Path, added: list[str]) -> None:
    files = {info.name: info.file.name for info in checkpoint_tensors(folder).values()}
    size = sum(file.stat().st_size for file in made.glob("*.safetensors"))
    weight_map = {**files, **dict.fromkeys(added, SCALES_FILE)}
    write_text(
        made / INDEX_FILE, json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=1) + "\n"
    )


def _quantization_config(folder: Path) -> dict[str, Any]:
    """That of the weights, where they are quantised, with the KV scheme; else one without any group."""
    own = read_config(folder).get("quantization_config")
    if own is not None:
        return {**own, "kv_cache_scheme": SCHEME}
    linear = sorted(
        {name.removesuffix(".weight") for name in checkpoint_tensors(folder) if name.endswith("_proj.weight")}
    )
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": [*linear, "lm_head"],
        "kv_cache_scheme": SCHEME,
    }


def _report(folder: Path, scales: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """What was measured, beside what the weights' own report says."""
    file = folder / REPORT_FILE
    own = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"groups": {}, "layers": {}}
    layers = {name: {"k_scale": k, "v_scale": v} for name, k, v in zip(names, scales["k"], scales["v"], strict=True)}
    measured = {
        "version": KV_SCALES_VERSION,
        "text_hash": scales_text_hash(),
        "tokens": scales["tokens"],
        "layers": layers,
    }
    return {
        **own,
        "recipe_hash": text_sha256(json.dumps([own.get("recipe_hash"), scales_text_hash()])),
        "kv_scales": measured,
    }
