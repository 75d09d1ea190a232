"""What a record and its verdict become in MLflow: metrics with units in their names, params, tags, datasets. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from evalq.errors import RecordError
from evalq.plan.quantiles import share_interval
from evalq.records import (
    ESTIMATES_FILE,
    JUDGED_TABLES,
    RECORD_FILE,
    SEAL_FILE,
    TABLES,
    VERDICT_FILE,
    Estimate,
    Record,
    TaskScores,
    Verdict,
    file_sha256,
    read_estimates,
    read_verdict,
)
from evalq.tracking.system import SYSTEM_FILE

CONFIG_FILE = "config.yaml"
SAMPLES_FILE = "load-samples.jsonl"
ARTIFACT_FOLDER = "record"
ARTIFACT_FILES = (
    RECORD_FILE,
    VERDICT_FILE,
    SEAL_FILE,
    ESTIMATES_FILE,
    CONFIG_FILE,
    "engine.log",
    SYSTEM_FILE,
    "load-engine.log",
    SAMPLES_FILE,
    *(f"{name}.parquet" for name in TABLES),
)
PARAM_SECTIONS = ("model", "quant", "gpu", "engine", "data", "tasks", "load", "gate")
SKIPPED_PARAMS = ("model.arch.", "model.notes", "quant.notes")  # equal in all cells, or prose; whole in config.yaml
PARAM_LIMIT = 500  # characters; the smallest limit among MLflow's servers
TAG_LIMIT = 2000  # characters shown; MLflow's own limit is higher
GIB = 1 << 30
KV_TOKENS = 32_768  # cached tokens at which weights and KV are added up, so that a KV scheme shows on one axis
WEIGHTS_AND_KV = f"memory/weights_and_kv_of_{KV_TOKENS}_tokens_gib"
CONFIDENCE = 0.95
FIDELITY = re.compile(r"(mean_kld|kld_|exact_kld|same_top1|(mean_|rms_)?correct_probability_change)")
PERPLEXITY_INCREASE = re.compile(r"(word_|byte_|token_)?perplexity_increase")


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Metrics that are numbers, and the reason for each that is not."""

    values: dict[str, float]
    invalid: dict[str, str]


def metrics_of(record: Record, verdict: Verdict | None, estimates: Sequence[Estimate] = ()) -> Metrics:
    """All metrics of one cell by name; what is missing, NaN or infinite goes to `invalid` with a reason.

    The verdict's own estimates stand above those of `estimates`: they carry the interval that decided.
    """
    values: dict[str, float] = {}
    invalid: dict[str, str] = {}
    for name, value, reason in _all_metrics(record, verdict, estimates):
        key = re.sub(r"[^A-Za-z0-9_\-./:]", "_", name)[:250]
        if value is None:
            invalid[key] = reason or "not measured"
        elif not math.isfinite(value):
            invalid[key] = reason or f"not a finite number ({value})"
        else:
            values[key] = float(value)
    return Metrics(values, {key: reason for key, reason in invalid.items() if key not in values})


def _all_metrics(
    record: Record, verdict: Verdict | None, estimates: Sequence[Estimate]
) -> Iterator[tuple[str, float | None, str]]:
    yield from _quality(record)
    yield from _memory(record)
    yield from _load(record)
    yield from _load_levels(record)
    yield from _times(record)
    for estimate in estimates:
        yield from _estimate(estimate, "", own_name=True)
    for check in verdict.checks if verdict else []:
        if check.estimate is not None:
            yield from _estimate(check.estimate, check.reason)


def _quality(record: Record) -> Iterator[tuple[str, float | None, str]]:
    for task, scores in record.tasks.items():
        for metric, value in scores.metrics.items():
            yield f"quality/{task}_{metric}", value, scores.metric_reasons.get(metric, "")
            yield from _share_interval(f"quality/{task}_{metric}", value, scores)
        yield f"quality/{task}_n", scores.n, ""


def _share_interval(name: str, value: float | None, scores: TaskScores) -> Iterator[tuple[str, float | None, str]]:
    """Exact interval of a share of items, each right or wrong; what is no whole number of items has none."""
    right = None if value is None or not math.isfinite(value) else value * scores.n
    if scores.kind != "choice" or name.endswith("_stderr") or right is None or not 0 <= right <= scores.n:
        return
    if abs(right - round(right)) < 1e-6:
        low, high = share_interval(round(right), scores.n, CONFIDENCE)
        yield f"{name}_low", low, ""
        yield f"{name}_high", high, ""


def _memory(record: Record) -> Iterator[tuple[str, float | None, str]]:
    ledger = record.ledger
    if ledger is None:
        return
    for name in (
        "weight_bytes",
        "checkpoint_bytes",
        "kv_bytes_per_token",
        "kv_pool_tokens",
        "kv_pool_bytes",
        "peak_bytes",
    ):
        value: int | None = getattr(ledger, name)
        yield f"memory/{name}", value, "the engine did not report it"
        if name in ("weight_bytes", "kv_pool_bytes", "peak_bytes") and value is not None:
            yield f"memory/{name.removesuffix('_bytes')}_gib", value / GIB, ""
    if ledger.weight_bytes is not None and ledger.kv_bytes_per_token is not None:
        yield WEIGHTS_AND_KV, (ledger.weight_bytes + KV_TOKENS * ledger.kv_bytes_per_token) / GIB, ""


def _load(record: Record) -> Iterator[tuple[str, float | None, str]]:
    names = (
        "output_tokens_per_second",
        "output_tokens_per_second_low",
        "output_tokens_per_second_high",
        "total_tokens_per_second",
        "request_latency_p50_seconds",
        "request_latency_p99_seconds",
    )
    for key, load in record.loads.items():
        prefix = "load/" if len(record.loads) == 1 else f"load/{key}_"
        reason = "; ".join(load.reasons) or "not measured"
        for name in names:
            value: float | None = getattr(load, name) if load.valid else None
            yield f"{prefix}{name}", value, reason


def _load_levels(record: Record) -> Iterator[tuple[str, float | None, str]]:
    """Every figure of every level, and the device's health as shares: load/<load>/<level>/<figure>."""
    for name, result in record.load_results.items():
        for level in result.levels:
            prefix = f"load/{name}/{level.label.replace('/', ' per ')}"
            reason = "; ".join(level.reasons)
            for figure, spread in level.figures.items():
                yield f"{prefix}/{figure}", spread.value if level.valid else None, reason
            yield (
                f"{prefix}/percent_of_bound",
                level.percent_of_bound if level.valid else None,
                reason or "no bound known",
            )
        for kind, seconds in result.start_seconds.items():
            yield f"load/{name}/start_{kind}_seconds", seconds, ""
        for check in result.health.checks if result.health else []:
            yield f"load/{name}/health_{check.name.replace(' ', '_')}_share", check.value, check.meaning


SYSTEM_METRICS = {  # as MLflow names its own system metrics, where it has one
    "compute_busy": ("utilization_percentage", 100.0),
    "bandwidth_busy": ("memory_bandwidth_percentage", 100.0),
    "memory_used_bytes": ("memory_usage_megabytes", 1e-6),
    "power_watts": ("power_usage_watts", 1.0),
    "temperature_celsius": ("temperature_celsius", 1.0),
    "sm_clock_mhz": ("sm_clock_megahertz", 1.0),
    "transfer_bytes_per_second": ("host_link_megabytes_per_second", 1e-6),
}


def system_metrics_of(folder: Path) -> Iterator[tuple[str, float, int, int]]:
    """(name, value, Unix milliseconds, step) of the device's sensors during the load; nothing where there were none."""
    file = folder / SAMPLES_FILE
    if not file.is_file():
        return
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    offset = float(lines[0].get("wall_minus_monotonic", 0.0)) if lines else 0.0
    steps: dict[int, int] = {}
    for row in lines[1:]:
        gpu = int(row["gpu"])
        steps[gpu] = steps.get(gpu, -1) + 1
        for key, (name, factor) in SYSTEM_METRICS.items():
            value = row.get(key)
            if value is not None and math.isfinite(value):
                yield f"system/load_gpu_{gpu}_{name}", value * factor, int(1000 * (row["time"] + offset)), steps[gpu]


def _times(record: Record) -> Iterator[tuple[str, float | None, str]]:
    for stage, seconds in record.stage_seconds.items():
        yield f"time/{stage}_seconds", seconds, ""
    if record.stage_seconds:
        yield "time/total_seconds", sum(record.stage_seconds.values()), ""


def _estimate(estimate: Estimate, reason: str, own_name: bool = False) -> Iterator[tuple[str, float | None, str]]:
    name, scale = estimate_metric(estimate.name, own_name)
    for suffix, value in (("", estimate.value), ("_low", estimate.low), ("_high", estimate.high)):
        yield f"{name}{suffix}", None if value is None else value * scale, estimate.note or reason


def estimate_metric(name: str, own_name: bool = False) -> tuple[str, float]:
    """MLflow name of a judge's estimate, and the factor that turns its fraction into the unit in that name.

    The increase that the gate decides by is called the same whatever it counts, so that studies compare; own_name keeps
    word, byte and token increases apart.
    """
    if FIDELITY.match(name):
        return f"fidelity/{name}", 1.0
    if PERPLEXITY_INCREASE.fullmatch(name) and not own_name:
        return "quality/perplexity_increase_percent", 100.0
    if name.endswith("_share"):
        quantity = name.removesuffix("_share")
        prefix = "load" if "_per_second" in name or "latency" in name else "memory"
        return f"{prefix}/{quantity}_percent_of_baseline", 100.0
    for ending, unit in (("_increase", "_percent"), ("_flips", "_percent"), ("_difference", "_points")):
        if name.endswith(ending):
            return f"quality/{name}{unit}", 100.0
    return f"quality/{name}", 1.0


def params_of(record: Record, config: dict[str, Any] | None) -> dict[str, str]:
    """Params of one cell: its composed config, flattened, then what the engine reported.

    A value too long for MLflow is cut and says where it is whole; two long values that differ never look equal.
    """
    flat: dict[str, str] = {}
    for section in PARAM_SECTIONS:
        for key, value in _flatten(section, (config or {}).get(section)):
            if not key.startswith(SKIPPED_PARAMS):
                flat[key] = _shortened(value, CONFIG_FILE)
    for key, scalar in record.engine_settings.items():
        flat[f"engine_reported.{key}"] = _shortened(_as_text(scalar), RECORD_FILE)
    return {re.sub(r"[^A-Za-z0-9_\-. /:]", "_", key)[:250]: value for key, value in flat.items()}


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(f"{prefix}.{key}", item)
    elif value is not None and value != []:
        yield prefix, _as_text(value)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _shortened(text: str, file: str) -> str:
    if len(text) <= PARAM_LIMIT:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    pointer = f" ... [{len(text):,} characters, sha256 {digest}, whole in {ARTIFACT_FOLDER}/{file}]"
    return text[: PARAM_LIMIT - len(pointer)] + pointer


def tags_of(record: Record, verdict: Verdict | None, reused: bool, metrics: Metrics) -> dict[str, str]:
    """Tags that name the cell and say how it ended; `evalq.invalid.<metric>` says why a figure is missing."""
    cell = record.cell
    tags = {
        "evalq.kind": "cell",
        "evalq.record_id": record.record_id,
        "evalq.cell": f"{cell.model} / {cell.gpu} / {cell.quant} / {cell.engine}",
        "evalq.model": cell.model,
        "evalq.gpu": cell.gpu,
        "evalq.quant": cell.quant,
        "evalq.engine": cell.engine,
        "evalq.is_baseline": _yes(cell.is_baseline),
        "evalq.status": record.status,
        "evalq.verdict": _verdict_word(record, verdict),
        "evalq.reused": _yes(reused),
        "evalq.fingerprint": _fingerprint_digest(record),
        "mlflow.note.content": note_of(record, verdict, reused),
    }
    if record.failure is not None:
        tags["evalq.failure"] = f"{record.failure.kind} in {record.failure.stage}: {record.failure.message}"[:TAG_LIMIT]
    for name, reason in metrics.invalid.items():
        tags[f"evalq.invalid.{name}"[:250]] = reason[:TAG_LIMIT]
    return tags


def _fingerprint_digest(record: Record) -> str:
    """Short and equal for records that may be compared; the fingerprint itself is in record.json."""
    text = json.dumps(record.fingerprint, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _verdict_word(record: Record, verdict: Verdict | None) -> str:
    if verdict is not None:
        return f"{verdict.status} with a warning" if verdict.warning else verdict.status
    return "baseline" if record.cell.is_baseline else "none"


def note_of(record: Record, verdict: Verdict | None, reused: bool) -> str:
    """The run's description in the UI (Markdown): the verdict in words, then the record's notes."""
    lines = [f"**{verdict.status}** {verdict.summary}"] if verdict else []
    if record.cell.is_baseline:
        lines.append(
            "Baseline." + (" Measured once, for an earlier study; these are the same figures." if reused else "")
        )
    if record.failure is not None:
        lines.append(f"Failed in {record.failure.stage}: {record.failure.message}")
    lines += [f"- {note}" for note in record.notes]
    return "\n\n".join(lines)[:TAG_LIMIT]


def _yes(value: bool) -> str:
    return "true" if value else "false"


def run_status(record: Record) -> str:
    """MLflow's word for how the cell ended."""
    if record.failure is not None and record.failure.kind == "interrupted":
        return "KILLED"
    return "FINISHED" if record.status == "complete" else "FAILED"


def times_of(record: Record) -> tuple[int, int]:
    """Start and end of the cell, Unix milliseconds: a record is written when its last stage ends."""
    end = milliseconds(record.created_at)
    return end - int(1000 * sum(record.stage_seconds.values())), end


def milliseconds(iso: str) -> int:
    """Unix milliseconds of an ISO 8601 time. Errors: RecordError."""
    try:
        return int(datetime.fromisoformat(iso).timestamp() * 1000)
    except ValueError as error:
        raise RecordError(f"{iso!r} is not an ISO 8601 time; the record is damaged, measure it anew") from error


def verdict_beside(folder: Path) -> Verdict | None:
    """The verdict in a record folder, None where none was given yet. Errors: RecordError for a damaged one."""
    return read_verdict(folder) if (folder / VERDICT_FILE).is_file() else None


def estimates_beside(folder: Path, verdict: Verdict | None) -> list[Estimate]:
    """Paired estimates of a record folder; none when they are against another baseline than the verdict's."""
    baseline_id, estimates = read_estimates(folder)
    return estimates if verdict is None or verdict.baseline_id == baseline_id else []


def artifact_files(folder: Path) -> list[Path]:
    """Files of a record folder that go to MLflow, in a fixed order."""
    return [folder / name for name in ARTIFACT_FILES if (folder / name).is_file()]


def refuse_changed_tables(folder: Path, record: Record) -> None:
    """Errors: RecordError when a table is not the one the record was written with; such a record is not uploaded.

    Tables that no judge needs may be away: tokens are large, and are often not kept with a study.
    """
    for name, digest in record.tables.items():
        file = folder / f"{name}.parquet"
        if not file.is_file() and name not in JUDGED_TABLES:
            continue
        if not file.is_file() or file_sha256(file) != digest:
            raise RecordError(
                f"{file} is not the table that record {record.record_id} was written with; measure it anew"
            )


def content_digest(folder: Path) -> str:
    """sha256 over record, verdict and estimates: another digest means that the run in MLflow is out of date."""
    digest = hashlib.sha256()
    for name in (RECORD_FILE, VERDICT_FILE, ESTIMATES_FILE):
        file = folder / name
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:32]
