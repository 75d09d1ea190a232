"""Recalibration drift: a stored checkpoint scored again on new text, and whether its scales still fit it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalq import checkpoints
from evalq.config import RunConfig, parse_share
from evalq.errors import EXIT_INCONCLUSIVE, EXIT_PASS, EXIT_QUALITY_FAIL, ConfigError
from evalq.judge.drift import Drift, drift
from evalq.judge.pairs import DocumentPairs, Tables, document_pairs
from evalq.measure import data
from evalq.measure.launch import WORKER
from evalq.pipeline import measure
from evalq.preparation import Prepared, as_baseline, prepare
from evalq.quantize.hashing import text_sha256
from evalq.quantize.saturation import Saturation, saturation, stored_scales
from evalq.records import write_text
from evalq.report.progress import QuietWatcher

EXIT_CODES = {"FITS": EXIT_PASS, "DRIFTED": EXIT_QUALITY_FAIL, "INCONCLUSIVE": EXIT_INCONCLUSIVE}
WINDOWS, WINDOW_TOKENS = 8, 512  # of new text, for the ranges of static scales


@dataclass(frozen=True)
class Answer:
    """What `evalq drift` says. `scales`: layers with static scales, the fullest first; empty where none depends on text."""

    drift: Drift
    scales: list[Saturation]
    scales_note: str
    records: list[str]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.drift.status]


def check_drift(
    config: RunConfig, text: Path, column: str, watcher: QuietWatcher, command: Sequence[str] = WORKER
) -> Answer:
    """Measure baseline and checkpoint on the config's own documents (stored records will do) and on new text.

    Errors: ConfigError for text that cannot be used; EvalqError of a measurement.
    """
    tasks = dataclasses.replace(config.tasks, hellaswag=False, truthfulqa=False, extra=[], perplexity=True)
    load = dataclasses.replace(config.load, enabled=False)
    known = prepare(dataclasses.replace(config, tasks=tasks, load=load))
    file = _documents(text, column, known.places.root / "drift")
    new_data = dataclasses.replace(known.config.data, perplexity_file=str(file))
    unseen = prepare(dataclasses.replace(known.config, data=new_data))
    pairs, records = [], []
    for cell in (known, unseen):
        found, folders = _pairs(cell, watcher, command)
        pairs.append(found)
        records.extend(folders)
    gate = config.gate
    try:
        answer = drift(pairs[0], pairs[1], gate.metric, parse_share(gate.target, "gate.target"), gate.confidence)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    scales, note = _scales(known, file, watcher)
    return Answer(answer, scales, note, records)


def _pairs(cell: Prepared, watcher: QuietWatcher, command: Sequence[str]) -> tuple[DocumentPairs, list[str]]:
    watcher.cell(f"{cell.config.model.name} baseline")
    baseline = measure(as_baseline(cell), watcher, command, reuse=True)
    watcher.cell(cell.name)
    candidate = measure(cell, watcher, command, reuse=True)
    tables = [Tables.read(one.record, one.folder) for one in (baseline, candidate)]
    return document_pairs(tables[0], tables[1], data.PERPLEXITY), [str(one.folder) for one in (baseline, candidate)]


def _documents(text: Path, column: str, folder: Path) -> Path:
    """New text as the perplexity task reads it: JSON lines with `page`. Errors: ConfigError."""
    try:
        lines = text.read_text(encoding="utf-8").splitlines()
        rows: list[Any] = [json.loads(line) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"{text} cannot be read as JSON lines ({error}); give one object a line, with its text"
        ) from error
    missing = next((n for n, row in enumerate(rows, start=1) if not isinstance(row, dict) or not row.get(column)), None)
    if missing is not None or not rows:
        raise ConfigError(f"{text} line {missing or 1} has no text in {column!r}; name the column with --column")
    pages = "".join(json.dumps({"page": str(row[column])}) + "\n" for row in rows)
    file = folder / f"{text.stem}-{text_sha256(pages)[:12]}.jsonl"
    write_text(file, pages)
    return file


def _scales(cell: Prepared, file: Path, watcher: QuietWatcher) -> tuple[list[Saturation], str]:
    """The ranges of static scales against the new text, fullest layers first."""
    source = checkpoints.source_folder(cell, watcher)
    scales = stored_scales(checkpoints.cell_checkpoint(cell, source, watcher))
    if not scales:
        return [], (
            "no scale of this checkpoint depends on text (scales of weights, and activations scaled while running), so there "
            "is nothing to recalibrate on a schedule; what new text can change is what the rounding costs"
        )
    if cell.config.quant.method == "smoothquant":
        return (
            [],
            "the ranges of smoothed layers cannot be seen in the 16-bit source; the perplexity above tells of them",
        )
    watcher.stage("scales", "comparing static scales with the new text")
    found = saturation(source, scales, _windows(source, file, cell.config.model.bos))
    found.sort(key=lambda one: one.largest / one.stored_range, reverse=True)
    over = sum(1 for one in found if one.largest > one.stored_range)
    worst = found[0]
    return found, (
        f"{over} of {len(found)} static scales are exceeded on the new text; the fullest is {worst.module}: largest input "
        f"{worst.largest:.4g}, range {worst.stored_range:.4g}, {worst.share_beyond:.2e} of the values beyond"
    )


def _windows(source: Path, file: Path, bos: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    start = [tokenizer.bos_token_id] if bos == "always" and tokenizer.bos_token_id is not None else []
    pages = [json.loads(line)["page"] for line in file.read_text(encoding="utf-8").splitlines()[:WINDOWS]]
    return [
        start + tokenizer(page, add_special_tokens=False)["input_ids"][: WINDOW_TOKENS - len(start)] for page in pages
    ]
