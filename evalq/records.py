"""What one cell measured, on disk: record.json (strict, versioned, no NaN) with Parquet tables beside it.

A record folder holds

    record.json         the Record below
    documents.parquet   one row per perplexity document (DOCUMENT_SCHEMA)
    items.parquet       one row per task item and metric (ITEM_SCHEMA)
    tokens.parquet      one row per scored token of the perplexity documents (TOKEN_SCHEMA); optional
    texts.parquet       what each item asked, and how each document begins (TEXT_SCHEMA); optional
    pieces.parquet      the text of each token id in tokens.parquet (PIECE_SCHEMA); optional
    engine.log  config.yaml  verdict.json (written later, by the judge)  record.seal (where EVALQ_SEAL_KEY is set)

Tables are referred to by name and sha256, so a table that was swapped or cut is found. Reading a record never runs code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from evalq.errors import RecordError
from evalq.kvrecord import KvReport, generation_schema, kv_token_schema, needle_schema
from evalq.loads.results import LoadResult

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
RECORD_FILE = "record.json"
VERDICT_FILE = "verdict.json"
ESTIMATES_FILE = "estimates.json"  # every paired estimate against the baseline (evalq.judge.estimates)
SEAL_FILE = "record.seal"  # an HMAC over record.json, where the measuring machine holds a key (evalq.judge.seal)
TABLES = ("documents", "items", "tokens", "texts", "pieces", "kv_tokens", "needles", "generations")
JUDGED_TABLES = ("documents", "items")  # what a verdict is made from; the others are for people and for fidelity

Scalar = str | int | float | bool | None
STATUSES = ("complete", "invalid", "failed")
VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "INVALID", "SUSPECT")


@dataclass(frozen=True)
class Cell:
    """Names of the cell: model x gpu x quant x engine."""

    model: str
    quant: str
    gpu: str
    engine: str
    is_baseline: bool


@dataclass(frozen=True)
class TaskScores:
    """Aggregate scores of one task; the rows behind them are in documents.parquet or items.parquet."""

    task: str
    kind: str  # "perplexity" or "choice" or "other"
    dataset: str  # e.g. "embedded", "HellaSwag-1000", "hub:EleutherAI/wikitext_document_level@<revision>"
    dataset_hash: str  # sha256 over the items, in order
    n: int  # documents or items scored
    left_out: int  # documents or items that were asked for and not scored
    truncated: int  # prompts that did not fit in the window
    window_tokens: int  # 1 context token + scored tokens, at most
    metrics: dict[str, float | None]
    metric_reasons: dict[str, str]  # metric -> why it is None
    harness_version: str  # "lm-eval 0.4.13"
    task_version: str
    seconds: float
    scored_tokens: int


@dataclass(frozen=True)
class Load:
    """One throughput or latency measurement."""

    name: str  # conf/load entry or "offline"
    requests: int
    input_tokens_per_request: int
    output_tokens_per_request: int
    concurrency: int
    repeats: int
    output_tokens_per_second: float | None
    output_tokens_per_second_low: float | None  # lowest repeat
    output_tokens_per_second_high: float | None  # highest repeat
    total_tokens_per_second: float | None
    request_latency_p50_seconds: float | None
    request_latency_p99_seconds: float | None
    valid: bool
    reasons: list[str]  # why the figure is not valid


@dataclass(frozen=True)
class Ledger:
    """Memory, item by item, as the engine itself reports it. Bytes; per GPU where a GPU is named."""

    weight_bytes: int | None  # parameters and buffers of the loaded model, all ranks
    weight_bytes_by_dtype: dict[str, int]
    checkpoint_bytes: int | None  # safetensors on disk
    kv_bytes_per_token: int | None  # all layers, all ranks
    kv_pool_tokens: int | None
    kv_pool_bytes: int | None
    kv_dtype: str | None  # as found in the pool's tensors
    peak_bytes: int | None  # highest allocation seen by the process (GPU) or its resident set (CPU)
    peak_source: str  # "torch.cuda.max_memory_allocated" or "resident set"
    predicted: dict[str, int | None] = field(default_factory=dict)  # planner's figures under the same names
    activation_bytes: int | None = None  # highest that a profiled step took beside weights and pool, the fullest rank
    graph_bytes: int | None = None  # captured graphs, the fullest rank
    driver_bytes: int | None = None  # what the driver says is used on the device, by anyone; never a figure to compare


@dataclass(frozen=True)
class LayerKind:
    """Layers alike in all that is listed; `name` has * for the layer's number."""

    name: str
    layers: int
    kernel: str  # method, scheme and kernel classes that the engine chose
    expected: str  # dtype and shape by the scheme, e.g. "int8 [576, 576], 8-bit activations"
    found: str
    note: str = ""  # what differs, in words; "weight-only fallback: ..." where the kernel drops the activations' bits


@dataclass(frozen=True)
class Applied:
    """Whether the scheme was really applied, from the engine's own state."""

    ok: bool
    problems: list[str]
    kv_dtype_requested: str
    kv_dtype_effective: str
    kv_scale_source: str  # "none", "default 1.0", "checkpoint", "computed"
    linear_methods: dict[str, int]  # class name of the layer's kernel -> number of layers
    parameter_dtypes: dict[str, int]  # dtype -> number of parameters tensors
    attention_backend: str
    layers: list[LayerKind] = field(default_factory=list)  # every kind of layer: expected against found


@dataclass(frozen=True)
class Calibration:
    """The text that a checkpoint was calibrated with, and what did it."""

    method: str  # one of config.METHODS
    domain: str  # what the text is about, in words
    source: str
    text_sha256: str
    samples: int  # windows used
    length_tokens: int  # of each window
    seed: int
    options: str  # JSON
    device: str  # that calibrated, not the one that was measured
    seconds: float
    versions: dict[str, str]


@dataclass(frozen=True)
class CheckpointId:
    """The checkpoint that the engine loaded."""

    location: str  # relative to the run's root where it lies there, else the folder's name or the hub's id
    weights_sha256: str  # evalq.quantize.weights_hash: safetensors files and config.json
    checkpoint_bytes: int | None


@dataclass(frozen=True)
class Failure:
    kind: str  # one of errors.FAILURE_KINDS
    message: str
    stage: str


@dataclass(frozen=True)
class Record:
    """All that one cell measured. `fingerprint` holds what must be equal for two records to be comparable."""

    schema_version: int
    record_id: str
    run_id: str  # chosen by the parent; proves that the worker answered this request and no other
    status: str  # one of STATUSES
    created_at: str  # ISO 8601, UTC
    cell: Cell
    config_hash: str  # effective config of the cell
    reuse_key: str  # equal key = the same measurement; a stored baseline with this key is used again
    fingerprint: dict[str, Scalar]
    engine_settings: dict[str, Scalar]  # as the engine reports them
    applied: Applied | None
    tasks: dict[str, TaskScores]
    loads: dict[str, Load]
    ledger: Ledger | None
    stage_seconds: dict[str, float]
    environment: dict[str, str]  # package versions, device, driver, platform
    notes: list[str]
    failure: Failure | None
    tables: dict[str, str]  # table name -> sha256 of its Parquet file
    calibration: Calibration | None = None  # None: the checkpoint was not calibrated by evalq
    checkpoint: CheckpointId | None = None  # None in older records and for random weights
    divergence_from: str = ""  # reuse_key of the baseline that the exact columns of tokens.parquet compare with
    kv: KvReport | None = None  # what was found out about the KV cache; None in records of baselines and older ones
    load_results: dict[str, LoadResult] = field(default_factory=dict)  # conf/load entry -> all its figures
    loads_missing: list[str] = field(default_factory=list)  # asked for and not measured (yet): the run was cut off


@dataclass(frozen=True)
class Estimate:
    """A named statistical result. Units are those of `name`; `low` and `high` bound the interval at `confidence`."""

    name: str
    value: float | None
    low: float | None
    high: float | None
    confidence: float
    n: int
    method: str
    left_out: int = 0
    note: str = ""


@dataclass(frozen=True)
class Check:
    """One line of a verdict: an estimate against its limit."""

    metric: str
    required: bool
    status: str  # one of VERDICTS
    estimate: Estimate | None
    target: float | None
    limit: float | None
    reason: str  # in words
    p_fail: float | None = None  # one-sided p of "the true increase is within the limit"; for Holm over a sweep


@dataclass(frozen=True)
class Verdict:
    """The judge's answer. Only status PASS with exit_code 0 releases."""

    schema_version: int
    status: str  # one of VERDICTS
    exit_code: int
    warning: bool  # PASS above target but within limit
    summary: str  # one sentence
    reasons: list[str]
    checks: list[Check]
    baseline_id: str | None
    candidate_id: str | None
    policy: dict[str, Scalar]
    allowed_differences: list[str]
    evalq_version: str
    created_at: str
    inputs: dict[str, str] = field(default_factory=dict)  # sha256 of record.json of both sides and of the policy file


T = TypeVar("T")


def to_json(value: Any) -> str:
    """Strict JSON of a dataclass, keys in field order. Errors: ValueError for NaN or infinity."""
    return json.dumps(dataclasses.asdict(value), allow_nan=False, indent=1, ensure_ascii=False)


def from_mapping(cls: type[T], data: Any, where: str = "record") -> T:
    """Build dataclass `cls` from parsed JSON; unknown, missing or mistyped fields raise RecordError naming them."""
    built = _convert(cls, data, where)
    return typing.cast(T, built)


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, value, where)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _convert_union(kind, value, where)
    if origin is list:
        _expect(isinstance(value, list), where, "a list", value)
        return [_convert(typing.get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        _expect(isinstance(value, dict), where, "a mapping", value)
        return {key: _convert(typing.get_args(kind)[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is type(None):
        _expect(value is None, where, "null", value)
        return None
    if kind is float:
        _expect(isinstance(value, int | float) and not isinstance(value, bool), where, "a number", value)
        _expect(_is_finite(value), where, "a finite number", value)
        return float(value)
    if kind is int:
        _expect(isinstance(value, int) and not isinstance(value, bool), where, "a whole number", value)
        return value
    _expect(isinstance(value, kind), where, kind.__name__, value)
    if kind is str:
        _expect(_is_writable(value), where, "text without half characters (lone surrogates)", value)
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _is_writable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _convert_dataclass(cls: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "a mapping", value)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise RecordError(f"{where} has unknown fields {', '.join(unknown)}; written by another version of evalq?")
    missing = [
        name
        for name, f in fields.items()
        if name not in value and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise RecordError(f"{where} lacks the fields {', '.join(missing)}; the file is incomplete")
    return cls(**{name: _convert(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _convert_union(kind: Any, value: Any, where: str) -> Any:
    choices = typing.get_args(kind)
    if value is None and type(None) in choices:
        return None
    for choice in choices:
        if choice is not type(None):
            try:
                return _convert(choice, value, where)
            except RecordError:
                continue
    raise RecordError(f"{where} is {value!r:.80}, which is none of {kind}")


def _expect(ok: bool, where: str, wanted: str, value: Any) -> None:
    if not ok:
        raise RecordError(f"{where} is {value!r:.80}; expected {wanted}")


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number that a record may hold")


def parse_json(text: str, where: str) -> Any:
    """Parse strict JSON (no NaN, no Infinity). Errors: RecordError with the place."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where} is not valid JSON ({error}); make the record anew") from error


def read_record(path: Path | str) -> Record:
    """Read a record from its folder or its record.json. Errors: RecordError in one sentence."""
    file = Path(path)
    file = file / RECORD_FILE if file.is_dir() else file
    data = _read_mapping(file, "record")
    record = from_mapping(Record, data, str(file))
    if record.status not in STATUSES:
        raise RecordError(f"{file}: status {record.status!r} is not one of {', '.join(STATUSES)}")
    return record


def read_estimates(folder: Path) -> tuple[str, list[Estimate]]:
    """Baseline id and estimates of estimates.json; nothing where there is none. Errors: RecordError for a damaged one."""
    file = folder / ESTIMATES_FILE
    if not file.is_file():
        return "", []
    data = _read_mapping(file, "estimates")
    return str(data.get("baseline_id", "")), from_mapping(list[Estimate], data.get("estimates"), f"{file} estimates")


def read_verdict(path: Path | str) -> Verdict:
    """Read a verdict from its folder or its verdict.json. Errors: RecordError in one sentence."""
    file = Path(path)
    file = file / VERDICT_FILE if file.is_dir() else file
    if file.name != VERDICT_FILE:  # the seal is of verdict.json, whatever lies beside it
        raise RecordError(f"{file} is no verdict; give the folder of an earlier --out or its {VERDICT_FILE}")
    return from_mapping(Verdict, _read_mapping(file, "verdict"), str(file))


def _read_mapping(file: Path, what: str) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RecordError(f"no {what} at {file}; give a record folder, or measure one first") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{what} {file} cannot be read: {error}") from error
    data = parse_json(text, str(file))
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise RecordError(f"{file} has schema version {version!r}; this evalq reads {SCHEMA_VERSION}; make it anew")
    return typing.cast(dict[str, Any], data)


def write_text(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of it (fsync, then rename)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename = str(path)  # a full disk names no file by itself, and the temporary one says nothing
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def document_schema() -> pa.Schema:
    """documents.parquet: sums over one document. nll_nats is the sum of -ln p over its scored tokens."""
    import pyarrow as pa

    return pa.schema(
        [
            ("task", pa.string()),
            ("doc_id", pa.int64()),
            ("doc_hash", pa.string()),
            ("nll_nats", pa.float64()),
            ("tokens", pa.int64()),
            ("words", pa.int64()),
            ("bytes", pa.int64()),
            ("truncated", pa.int64()),
        ]
    )


def item_schema() -> pa.Schema:
    """items.parquet: one row per item and metric. answer = index of the chosen ending, gold = the right one."""
    import pyarrow as pa

    return pa.schema(
        [
            ("task", pa.string()),
            ("item_id", pa.int64()),
            ("item_hash", pa.string()),
            ("cluster", pa.string()),  # items from one source share it; empty = its own cluster
            ("metric", pa.string()),
            ("value", pa.float64()),
            ("answer", pa.int64()),
            ("gold", pa.int64()),
            ("choice_logprobs", pa.list_(pa.float64())),
        ]
    )


def token_schema() -> pa.Schema:
    """tokens.parquet: one row per scored token. `exact` columns are null where only the top k is known."""
    import pyarrow as pa

    return pa.schema(
        [
            ("task", pa.string()),
            ("doc_id", pa.int32()),
            ("position", pa.int32()),  # of the predicted token in its document
            ("window_position", pa.int32()),  # number of tokens of context it was predicted from
            ("token_id", pa.int32()),
            ("logprob", pa.float32()),
            ("top1_id", pa.int32()),
            ("top1_logprob", pa.float32()),
            ("entropy_nats", pa.float32()),  # null unless the scorer computes it
            ("topk_ids", pa.list_(pa.int32())),  # null unless asked for
            ("topk_logprobs", pa.list_(pa.float32())),
            # Over the whole vocabulary, against the baseline that Record.divergence_from names; null where not measured.
            ("exact_kld_nats", pa.float32()),  # KL(baseline || this record)
            ("exact_reverse_kld_nats", pa.float32()),  # KL(this record || baseline)
            ("base_entropy_nats", pa.float32()),  # of the baseline's distribution
        ]
    )


def text_schema() -> pa.Schema:
    """texts.parquet: what an item asked and what could be answered, for people; a document's beginning has no choices."""
    import pyarrow as pa

    return pa.schema(
        [
            ("task", pa.string()),
            ("id", pa.int64()),  # item_id or doc_id
            ("prompt", pa.string()),
            ("choices", pa.list_(pa.string())),
            ("response", pa.string()),  # what the model wrote, for tasks that generate; else null
        ]
    )


def piece_schema() -> pa.Schema:
    """pieces.parquet: the text of a token id; a token that is part of a character reads as U+FFFD."""
    import pyarrow as pa

    return pa.schema([("token_id", pa.int32()), ("piece", pa.string())])


SCHEMAS = {
    "documents": document_schema,
    "items": item_schema,
    "tokens": token_schema,
    "texts": text_schema,
    "pieces": piece_schema,
    "kv_tokens": kv_token_schema,
    "needles": needle_schema,
    "generations": generation_schema,
}


def read_table(folder: Path | str, record: Record, name: str) -> pa.Table | None:
    """Read a table of a record folder after checking its sha256; None when the record has no such table.

    Errors: RecordError when the file is missing, was changed since the record was written, or has other columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if name not in record.tables:
        return None
    folder = Path(folder)
    file = (folder if folder.is_dir() else folder.parent) / f"{name}.parquet"
    try:
        if not file.is_file():
            raise RecordError(f"record {record.record_id} names a table {name} and {file} is missing; measure it anew")
        if file_sha256(file) != record.tables[name]:
            raise RecordError(
                f"{file} is not the table that record {record.record_id} was written with; measure it anew"
            )
        with pq.ParquetFile(file) as opened:  # pq.read_table would import pandas where it is installed
            table = opened.read()
    except PermissionError as error:
        raise RecordError(f"{file} may not be read ({error.strerror}); give this user the right to read it") from error
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{file} is not readable Parquet ({error}); measure it anew") from error
    wanted = SCHEMAS[name]()
    known = table.schema.names
    if known != [name for name in wanted.names if name in known] or not _required(name) <= set(known):
        raise RecordError(f"{file} has columns {known}; expected {wanted.names}")
    for one in table.schema:
        if one.type != wanted.field(one.name).type:
            raise RecordError(f"{name} of a record have {one.name} as {one.type}; measure it anew")
    for added in (one for one in wanted if one.name not in known):  # written before the column existed
        table = table.append_column(added, pa.nulls(len(table), added.type))
    return table.select(wanted.names)


ADDED_COLUMNS = {"tokens": {"exact_reverse_kld_nats", "base_entropy_nats"}}  # later than the first records


def _required(table: str) -> set[str]:
    return set(SCHEMAS[table]().names) - ADDED_COLUMNS.get(table, set())


def write_record(folder: Path, record: Record, tables: dict[str, pa.Table]) -> Record:
    """Write tables, then record.json, into `folder`; returns the record with the tables' hashes filled in.

    record.json comes last and by rename: a folder without it is not a record.
    """
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    hashes = {}
    for name, table in tables.items():
        file = folder / f"{name}.parquet"
        temporary = file.with_name(f".{file.name}.tmp")
        pq.write_table(table.cast(SCHEMAS[name]()), temporary, compression="zstd")
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, file)
        hashes[name] = file_sha256(file)
    complete = dataclasses.replace(record, tables=hashes)
    write_text(folder / RECORD_FILE, to_json(complete) + "\n")
    return complete
