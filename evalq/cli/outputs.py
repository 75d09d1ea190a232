"""Outputs for a review: from the engine, exactly as the records' cells were measured, or from files."""

from __future__ import annotations

import dataclasses
import json
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalq.errors import ConfigError, MeasurementError, RecordError
from evalq.records import Record, from_mapping, parse_json

if TYPE_CHECKING:
    from evalq.config import RunConfig
    from evalq.measure.launch import Watcher

Located = tuple[Record, Path]
EMBEDDED = Path(__file__).resolve().parents[1] / "data" / "embedded" / "review_prompts.jsonl"


def read_prompts(file: Path | None, limit: int | None) -> list[str]:
    """Prompts of a text file (one a line) or a .jsonl file of {"prompt": ...}; evalq's own without one. Errors: ConfigError."""
    file = file or EMBEDDED
    prompts = _lines(file, "prompt") if file.suffix == ".jsonl" else _text(file).splitlines()
    kept = [prompt.strip() for prompt in prompts if prompt.strip()][:limit]
    if len(set(kept)) != len(kept):
        raise ConfigError(f"{file} holds a prompt twice; each may be asked once")
    if len(kept) < 2:
        raise ConfigError(f"{file} holds {len(kept)} prompts; a review needs 2 or more, and 40 to see anything small")
    return kept


def read_outputs(file: Path) -> tuple[list[str], list[str]]:
    """Prompts and outputs of a .jsonl file of {"prompt": ..., "output": ...}. Errors: ConfigError."""
    return _lines(file, "prompt"), _lines(file, "output")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _lines(file: Path, key: str) -> list[str]:
    found = []
    for number, line in enumerate(_text(file).splitlines(), 1):
        if line.strip():
            try:
                value = json.loads(line)[key]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f'{file}, line {number}: no "{key}"; each line is one JSON object with it') from error
            if not isinstance(value, str):
                raise ConfigError(f'{file}, line {number}: "{key}" is no text')
            found.append(value)
    return found


def generate(
    located: Located, prompts: Sequence[str], output_tokens: int, root: Path, watcher: Watcher
) -> dict[str, Any]:
    """Start the record's own cell once more and let it write; {"chat_template": ..., "outputs": [...]}.

    Errors: RecordError when the cell is not the measured one any more; ConfigError, MeasurementError as a measurement.
    """
    from evalq.checkpoints import cell_checkpoint, source_folder
    from evalq.identity import cell_names, checkpoint_id, identity_of
    from evalq.measure.launch import WORKER, run_worker
    from evalq.measure.outputs import OUTPUTS_FILE
    from evalq.measure.spec import WorkerSpec
    from evalq.preparation import prepare

    record, folder = located
    config = _without_scoring(recorded_config(record, folder), root)
    cell = prepare(config)
    source = source_folder(cell, watcher)
    checkpoint = cell_checkpoint(cell, source, watcher)
    loaded = checkpoint_id(cell, checkpoint)
    if (
        record.checkpoint is not None
        and loaded is not None
        and loaded.weights_sha256 != record.checkpoint.weights_sha256
    ):
        raise RecordError(
            f"the checkpoint at {checkpoint} is not the one that record {record.record_id} was measured on"
        )
    cell.places.records.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cell.places.records, prefix=".review-") as work:
        spec = WorkerSpec(
            run_id=secrets.token_hex(16),
            record_id=f"review-of-{record.record_id}",
            cell=cell_names(cell),
            config=dataclasses.asdict(cell.config),
            checkpoint=str(checkpoint),
            checkpoint_bytes=None,
            identity=identity_of(cell, source),
            config_hash=record.config_hash,
            reuse_key=record.reuse_key,
            work_dir=work,
            is_cpu=cell.is_cpu,
            predicted={},
            prompts=list(prompts),
            output_tokens=output_tokens,
        )
        limits = (cell.config.engine.start_timeout_seconds, cell.config.engine.stall_timeout_seconds)
        made = run_worker(spec, watcher, *limits, WORKER)
        if made.status != "complete":
            problems = "; ".join(made.applied.problems) if made.applied else "unknown"
            raise MeasurementError(f"the scheme was not applied, so its outputs are none of it: {problems}", "engine")
        data = parse_json((Path(work) / OUTPUTS_FILE).read_text(encoding="utf-8"), OUTPUTS_FILE)
    return dict(data)


def recorded_config(record: Record, folder: Path) -> RunConfig:
    """The config that a record was measured with. Errors: RecordError when config.yaml is another one."""
    import yaml

    from evalq.config import RunConfig, config_hash

    file = folder / "config.yaml"
    try:
        config = from_mapping(RunConfig, yaml.safe_load(file.read_text(encoding="utf-8")), str(file))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecordError(
            f"{file} cannot be read ({error}); measure the record anew, or give outputs from files"
        ) from error
    if config_hash(config) != record.config_hash:
        raise RecordError(
            f"{file} is not the config that record {record.record_id} was measured with (or another evalq measured it); "
            "measure it anew, or give outputs from files"
        )
    return config


def _without_scoring(config: RunConfig, root: Path) -> RunConfig:
    """The same cell with one document to score, which shows that the engine works; the rest is generation."""
    from evalq.config import KvConfig

    tasks = dataclasses.replace(config.tasks, perplexity=True, perplexity_limit=1, keep_tokens=False, topk=0)
    tasks = dataclasses.replace(tasks, divergence="none", hellaswag=False, truthfulqa=False, extra=[])
    load = dataclasses.replace(config.load, enabled=False)
    paths = dataclasses.replace(config.paths, root=str(root))
    return dataclasses.replace(config, tasks=tasks, load=load, paths=paths, kv=KvConfig())
