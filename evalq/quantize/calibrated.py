"""Checkpoints by calibrated methods: llm-compressor does the work in its own environment; here is all around it.

The source's config.json, tokenizer and dtypes stay as they are, the result is checked tensor by tensor against the scheme,
and the folder appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalq.config import CalibrationConfig, ModelConfig, QuantConfig
from evalq.errors import ConfigError, MeasurementError
from evalq.quantize.calibration import CalibrationText
from evalq.quantize.compressed import Stored, quantization_config, storage_format
from evalq.quantize.hashing import problems_of, read_manifest, side_files, text_sha256, write_manifest
from evalq.quantize.isolated import constraints_file, die_with_parent, end_group, isolated_python
from evalq.quantize.make import REPORT_FILE, Job, plan_job, recipe, recipe_hash
from evalq.quantize.scheme import linear_modules
from evalq.quantize.store import Progress, locked, new_folder
from evalq.quantize.tensors import CONFIG_FILE, checkpoint_tensors
from evalq.records import Calibration, from_mapping, write_text

CALIBRATOR_VERSION = "2"  # raise it when the same recipe and text would give other bytes
PROGRAM = Path(__file__).with_name("compressor.py")
KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Order:
    """What is to be made: a scheme of a source, from a text, for a model's dtype and BOS rule."""

    source: Path
    quant: QuantConfig
    model: ModelConfig
    calibration: CalibrationConfig
    text: CalibrationText

    def facts(self) -> dict[str, Any]:
        """What decides the bytes beside source and recipe; batch size decides memory and speed only."""
        given = self.calibration
        return {
            "text_sha256": self.text.sha256,
            "samples": given.samples,
            "length_tokens": given.length_tokens,
            "seed": given.seed,
            "options": given.options,
            "bos": self.model.bos,
            "dtype": self.model.dtype,
            "kv_scales": wants_kv_scales(self.quant),
            "constraints_sha256": text_sha256(constraints_file().read_text(encoding="utf-8")),
            "calibrator_version": CALIBRATOR_VERSION,
        }


def wants_kv_scales(quant: QuantConfig) -> bool:
    """Whether the scales of an FP8 KV cache are to be measured and stored in the checkpoint."""
    return quant.kv_scale_source == "checkpoint" and quant.kv_cache_dtype == "fp8_e4m3"


def make_calibrated(
    order: Order, out_root: Path, environments: Path, progress: Progress | None = None, out: Path | None = None
) -> Path:
    """Make, or find, the checkpoint under `out_root`, named by content, or in exactly `out`.

    Errors: ConfigError (scheme, text), MeasurementError (environment, checkpoint, disk).
    """
    job = plan_job(order.source, order.quant, progress)
    key = text_sha256(json.dumps([job.key, order.facts()], sort_keys=True))
    target = out or out_root / key[:20]
    if _whole(target, key):
        return target
    if out is not None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise MeasurementError(f"{out} exists and is not this checkpoint; choose another folder or remove it", "disk")
    with locked(target, progress):
        if not _whole(target, key):
            python = isolated_python(environments, progress)
            with new_folder(target, sum(info.nbytes for info in job.tensors.values())) as folder:
                facts = run_program(python, job_document(order, folder), target.parent / f"{target.name}.log", progress)
                _finish(job, order, key, folder, facts)
    return target


def _whole(target: Path, key: str) -> bool:
    try:
        found = read_manifest(target).get("key")
    except MeasurementError:
        return False
    return found == key and not problems_of(target, contents=False)


def job_document(order: Order, folder: Path) -> dict[str, Any]:
    """What compressor.py reads."""
    quant, given = order.quant, order.calibration
    groups = {
        name: {
            "targets": list(group.targets),
            "weights": dataclasses.asdict(group.weights) if group.weights else None,
            "input_activations": dataclasses.asdict(group.input_activations) if group.input_activations else None,
        }
        for name, group in quant.groups.items()
    }
    return {
        "source": str(order.source),
        "output": str(folder),
        "groups": groups,
        "ignore": list(quant.ignore),
        "method": quant.method,
        "options": given.options,
        "kv_cache": KV_CACHE if wants_kv_scales(quant) else None,
        "texts": list(order.text.texts),
        "samples": given.samples,
        "length_tokens": given.length_tokens,
        "batch_size": given.batch_size,
        "seed": given.seed,
        "bos": order.model.bos,
        "dtype": order.model.dtype,
    }


def run_program(python: Path, job: dict[str, Any], log: Path, progress: Progress | None) -> dict[str, Any]:
    """Run compressor.py to its end and return what it reports. Errors: ConfigError, MeasurementError(environment)."""
    import os

    with tempfile.TemporaryDirectory(prefix="evalq-calibrate-") as folder, open(log, "w", encoding="utf-8") as errors:
        file = Path(folder) / "job.json"
        write_text(file, json.dumps(job, allow_nan=False))
        process = subprocess.Popen(
            [str(python), "-P", str(PROGRAM), str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=die_with_parent,
            env={**{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}, **OFFLINE},
        )
        try:
            last = _follow(process, progress)
            code = process.wait()
        finally:
            end_group(process)
    if code == 0 and last.get("event") == "done":
        return last
    raise _failed(last, code, job["method"], log)


def _follow(process: subprocess.Popen[str], progress: Progress | None) -> dict[str, Any]:
    """Tell progress; returns the last event that is none: done or failure."""
    last: dict[str, Any] = {}
    assert process.stdout is not None
    for line in process.stdout:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict):
            continue
        if event.get("event") == "progress" and progress is not None:
            progress(int(event["done"]), int(event["total"]), str(event["stage"]))
        elif event.get("event") in ("done", "failure"):
            last = event
    return last


def _failed(last: dict[str, Any], code: int, method: str, log: Path) -> ConfigError | MeasurementError:
    message = str(last.get("message", f"its process ended with exit code {code} and no word"))
    if "calibration.samples" in message:
        return ConfigError(message.partition(": ")[2])
    if code == -9:
        message += " (the kernel kills processes that run out of memory with signal 9)"
    return MeasurementError(
        f"llm-compressor did not make the checkpoint with quant.method={method} ({message}); its output is in {log}: "
        "correct the scheme or calibration.options, or use another quant.method",
        "environment",
    )


def _finish(job: Job, order: Order, key: str, folder: Path, facts: dict[str, Any]) -> None:
    """Check what was made, and put the source's config, its small files, report and manifest beside it."""
    expected = {item.name: item for item in job.stored()}
    check_tensors(folder, expected, order)
    for stray in folder.iterdir():
        if stray.suffix != ".safetensors" and not stray.name.endswith(".index.json"):
            stray.unlink()
    for file in side_files(order.source):
        shutil.copyfile(file, folder / file.name)
    left = [name for name in linear_modules(job.tensors.values()) if name not in job.layers]
    unlisted = [name for name in left if name not in order.quant.ignore]
    made = quantization_config(order.quant, unlisted)
    if wants_kv_scales(order.quant):
        made["kv_cache_scheme"] = KV_CACHE
    config = {**job.config, "quantization_config": made}
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    write_text(folder / REPORT_FILE, json.dumps(_report(job, order, facts), indent=1, allow_nan=False) + "\n")
    write_manifest(folder, {"kind": "quantized", "key": key, "source_hash": job.source_hash})


def check_tensors(folder: Path, expected: dict[str, Stored], order: Order) -> None:
    """Every announced tensor is there with its dtype and shape; only scales may come on top.

    Errors: MeasurementError(checkpoint) naming the first that differs.
    """
    found = checkpoint_tensors(folder)
    for name, stored in expected.items():
        info = found.get(name)
        if info is None or (info.dtype, info.shape) != (stored.dtype, stored.shape):
            what = "nothing" if info is None else f"{info.dtype} {list(info.shape)}"
            raise MeasurementError(
                f"llm-compressor stored {what} as {name} and the scheme {order.quant.name} is {stored.dtype} "
                f"{list(stored.shape)}; use another quant.method for this scheme",
                "checkpoint",
            )
    strange = [name for name in found if name not in expected and not name.endswith(("_scale", "_zero_point"))]
    if strange:
        raise MeasurementError(
            f"llm-compressor stored {strange[0]}, which no part of the scheme asks for", "checkpoint"
        )


def _report(job: Job, order: Order, facts: dict[str, Any]) -> dict[str, Any]:
    groups = {
        name: {
            "format": storage_format(group),
            "layers": sum(1 for layer in job.layers.values() if layer.group == name),
            "weights": sum(
                layer.info.shape[0] * layer.info.shape[1] for layer in job.layers.values() if layer.group == name
            ),
        }
        for name, group in order.quant.groups.items()
    }
    calibration = Calibration(
        method=order.quant.method,
        domain=order.calibration.domain,
        source=order.text.source,
        text_sha256=order.text.sha256,
        samples=int(facts["windows"]),
        length_tokens=order.calibration.length_tokens,
        seed=order.calibration.seed,
        options=json.dumps(order.calibration.options, sort_keys=True),
        device=str(facts["device"]),
        seconds=float(facts["seconds"]),
        versions={str(name): str(version) for name, version in facts["versions"].items()},
    )
    return {
        "recipe_hash": recipe_hash(order.quant),
        "recipe": recipe(order.quant),
        "source_hash": job.source_hash,
        "calibration": dataclasses.asdict(calibration),
        "facts": order.facts(),
        "groups": groups,
        "kept": [name for name in job.tensors if name.removesuffix(".weight") not in job.layers],
    }


def calibration_of(folder: Path) -> Calibration | None:
    """How a checkpoint was calibrated; None for one that was not."""
    try:
        report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        given = report.get("calibration")
    except (OSError, ValueError, AttributeError):
        return None
    return from_mapping(Calibration, given, str(folder / REPORT_FILE)) if given else None
