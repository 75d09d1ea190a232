"""Calibration text: where it comes from, in a seeded order, and what the record says about it."""

from __future__ import annotations

import gzip
import json
import os
import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalq.config import CalibrationConfig, DataConfig
from evalq.errors import ConfigError, MeasurementError, MissingExtraError
from evalq.quantize.hashing import text_sha256

EMBEDDED = Path(__file__).parent.parent / "data" / "embedded"
CHARACTERS_PER_TOKEN = 10  # more than any vocabulary needs on average: what lies beyond is never read


@dataclass(frozen=True)
class CalibrationText:
    """Texts in the order in which they are used. `sha256` is over all of them."""

    texts: tuple[str, ...]
    source: str

    @property
    def sha256(self) -> str:
        return text_sha256(json.dumps(self.texts, ensure_ascii=True))


def calibration_text(calibration: CalibrationConfig, data: DataConfig) -> CalibrationText:
    """Texts of the configured source, shuffled by its seed, as many as the windows can need.

    Errors: ConfigError (no such file or column, no text), MeasurementError(hub).
    """
    if calibration.source == "hub":
        rows, source = _hub_rows(calibration)
    else:
        file = _file(calibration, data)
        rows, source = _file_rows(file), file.name if calibration.source == "embedded" else str(calibration.file)
    texts = [text for row in rows if (text := _text(row, calibration.columns, source).strip())]
    if not texts:
        raise ConfigError(f"calibration: {source} holds no text; choose another calibration=NAME or calibration.file")
    random.Random(calibration.seed).shuffle(texts)
    enough = calibration.samples * calibration.length_tokens * CHARACTERS_PER_TOKEN
    return CalibrationText(tuple(_until(texts, enough)), source)


def _until(texts: Iterable[str], characters: int) -> list[str]:
    kept: list[str] = []
    for text in texts:
        if characters <= 0:
            break
        kept.append(text)
        characters -= len(text)
    return kept


def _text(row: dict[str, Any], columns: list[str], source: str) -> str:
    missing = [name for name in columns if name not in row]
    if missing:
        raise ConfigError(
            f"calibration.columns={columns}: {source} has no column {missing[0]}; it has {', '.join(sorted(row))}"
        )
    return "\n\n".join(str(row[name]) for name in columns)


def _file(calibration: CalibrationConfig, data: DataConfig) -> Path:
    name = Path(str(calibration.file)).expanduser()
    if calibration.source == "embedded":
        return EMBEDDED / name
    if name.is_absolute():
        return name
    root = data.root or os.environ.get("EVALQ_DATA")
    if not root:
        raise ConfigError(
            f"calibration.file={calibration.file} is relative and there is no data folder; give data.root=/folder, set "
            "EVALQ_DATA, or give a whole path"
        )
    return Path(root).expanduser() / name


def _file_rows(file: Path) -> Iterable[dict[str, Any]]:
    if not file.is_file():
        raise ConfigError(f"calibration text is missing: no file {file}; put it there, or choose another calibration=")
    opener = gzip.open if file.suffix == ".gz" else open
    rows = []
    try:
        with opener(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_row(line, f"{file} line {number}"))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); put the calibration text there again") from error
    return rows


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); each line holds one object") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a JSON object; each line holds one")
    return row


def _hub_rows(calibration: CalibrationConfig) -> tuple[Iterable[dict[str, Any]], str]:
    """Rows of a hub data set, from the local cache or fetched. Errors: MissingExtraError, MeasurementError(hub)."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("calibration text from the hub", "datasets", "measure") from error
    name = f"hub:{calibration.hub_id}@{calibration.revision or 'main'} {calibration.hub_split}"
    try:
        rows = datasets.load_dataset(
            calibration.hub_id, calibration.hub_config, split=calibration.hub_split, revision=calibration.revision
        )
    except Exception as error:  # the client raises its own, requests' and the file system's errors
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise MeasurementError(
            f"the calibration set {name} could not be read ({first_line}); connect, correct calibration.hub_id, or use "
            "calibration=embedded or a file of your own",
            "hub",
        ) from error
    return rows, name
