"""Content hashes of checkpoints, and the manifest that marks a folder as complete."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from evalq.errors import MeasurementError, RecordError
from evalq.quantize.store import Progress
from evalq.quantize.tensors import CONFIG_FILE, weight_files
from evalq.records import file_sha256, parse_json, write_text

MANIFEST_FILE = "evalq_manifest.json"
MANIFEST_VERSION = 1
HASH_CACHE_FILE = ".evalq_hashes.json"
SIDE_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")


def text_sha256(text: str) -> str:
    """Hex sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def weights_hash(folder: Path, progress: Progress | None = None, trust_cache: bool = True) -> str:
    """sha256 over the safetensors files' contents and config.json; file hashes are kept beside, by size and mtime.

    trust_cache=False reads every byte again: who can change a file can also change what is kept beside it.
    Errors: as evalq.quantize.tensors.weight_files.
    """
    files = [*weight_files(folder), folder / CONFIG_FILE]
    cached = _read_hash_cache(folder) if trust_cache else {}
    hashes: dict[str, dict[str, Any]] = {}
    for number, file in enumerate(files):
        if progress is not None:
            progress(number, len(files), f"hashing {file.name}")
        stat = file.stat()
        stamp = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        known = cached.get(file.name)
        same = isinstance(known, dict) and all(known.get(key) == value for key, value in stamp.items())
        hashes[file.name] = {**stamp, "sha256": known["sha256"] if same and known else file_sha256(file)}
    if hashes != cached:
        _write_hash_cache(folder, hashes)
    return text_sha256(json.dumps([[name, entry["sha256"]] for name, entry in hashes.items()]))


def _read_hash_cache(folder: Path) -> dict[str, Any]:
    try:
        cached = json.loads((folder / HASH_CACHE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cached if isinstance(cached, dict) else {}


def _write_hash_cache(folder: Path, hashes: dict[str, dict[str, Any]]) -> None:
    try:
        write_text(folder / HASH_CACHE_FILE, json.dumps(hashes, indent=1))
    except OSError:
        return  # a read-only checkpoint is hashed again next time


def side_files(folder: Path) -> list[Path]:
    """Tokenizer, generation settings and the like: what travels with the weights unchanged."""
    skip = (CONFIG_FILE, MANIFEST_FILE, HASH_CACHE_FILE)
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix in SIDE_SUFFIXES and file.name not in skip and "safetensors" not in file.name
    )


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Write the marker of a complete folder: `facts`, and bytes and sha256 of every file. Call it last."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        for file in sorted(folder.iterdir())
        if file.name not in (MANIFEST_FILE, HASH_CACHE_FILE)
    }
    manifest = {"manifest_version": MANIFEST_VERSION, **facts, "files": files}
    write_text(folder / MANIFEST_FILE, json.dumps(manifest, indent=1, allow_nan=False) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that evalq made. Errors: MeasurementError(checkpoint) when there is no whole one."""
    file = folder / MANIFEST_FILE
    try:
        manifest = parse_json(file.read_text(encoding="utf-8"), str(file))
        good = manifest["manifest_version"] == MANIFEST_VERSION and all(
            Path(name).name == name and isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)
            for name, entry in manifest["files"].items()
        )
    except (OSError, UnicodeDecodeError, RecordError, KeyError, TypeError, AttributeError) as error:
        raise MeasurementError(
            f"{folder} has no readable {MANIFEST_FILE}, so evalq did not make it completely; make it anew",
            kind="checkpoint",
        ) from error
    if not good:
        raise MeasurementError(f"{file} is of another version; make the checkpoint anew", kind="checkpoint")
    return dict(manifest)


def problems_of(folder: Path, contents: bool) -> list[str]:
    """Differences between a folder and its manifest: sizes only, or with `contents` the bytes as well."""
    try:
        manifest = read_manifest(folder)
    except MeasurementError as error:
        return [str(error)]
    problems = []
    for name, entry in manifest["files"].items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"]:
            problems.append(f"{file} has {'no' if size is None else size} bytes and should have {entry['bytes']}")
        elif contents and file_sha256(file) != entry["sha256"]:
            problems.append(f"{file} is not the file that was written")
    return problems


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """Check sizes and sha256 of every file against the manifest, and return the manifest.

    Errors: MeasurementError(checkpoint) naming the files that differ.
    """
    problems = problems_of(folder, contents=True)
    if problems:
        raise MeasurementError(
            f"damaged checkpoint: {'; '.join(problems)}; delete the folder and make it anew", "checkpoint"
        )
    return read_manifest(folder)
