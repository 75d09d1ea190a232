"""The checkpoint of a cell: the 16-bit source, and the one that the engine loads, made from it where the scheme asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from evalq.config import RunConfig, needs_calibration
from evalq.errors import ConfigError, MissingExtraError
from evalq.measure.launch import Watcher
from evalq.preparation import Places, Prepared, baseline_scheme, is_dummy

if TYPE_CHECKING:
    from evalq.quantize.calibration import CalibrationText


Progress = Callable[[int, int, str], None]


def source_folder(cell: Prepared, watcher: Watcher) -> Path:
    """The 16-bit checkpoint that the cell starts from; with dummy weights, a folder with its config.json alone."""
    from evalq.quantize import source_checkpoint

    if is_dummy(cell):
        from evalq.quantize.shapes import shape_checkpoint

        return shape_checkpoint(cell.config.model, baseline_scheme(cell.config), cell.places.models)

    watcher.stage("source", "finding the checkpoint")
    return source_checkpoint(cell.config.model, cell.places.models, watcher.progress)


def cell_checkpoint(cell: Prepared, source: Path, watcher: Watcher) -> Path:
    """The checkpoint that the engine loads: the source itself, or one made by evalq."""
    if cell.config.quant.origin != "evalq":
        return source
    if is_dummy(cell):
        from evalq.quantize.shapes import shape_checkpoint

        return shape_checkpoint(cell.config.model, cell.config.quant, cell.places.checkpoints)
    from evalq.quantize import add_kv_scales, has_computed_scales, make_checkpoint

    quant = cell.config.quant
    watcher.stage("checkpoint", f"making the {quant.name} checkpoint")
    if needs_calibration(quant):
        made = calibrated_checkpoint(cell.config, source, cell.places, watcher.progress)
    else:
        made = make_checkpoint(source, quant, cell.places.checkpoints, watcher.progress) if quant.groups else source
    if has_computed_scales(quant):
        return add_kv_scales(made, source, cell.places.checkpoints, watcher.progress)
    return made


def checked_calibration(config: RunConfig, source: Path) -> CalibrationText:
    """The calibration text, when it shares nothing with the evaluation documents. Errors: ConfigError, MeasurementError."""
    from evalq.measure.documents import evaluation_documents
    from evalq.quantize.calibration import calibration_text
    from evalq.quantize.contamination import Document, check_contamination

    text = calibration_text(config.calibration, config.data)
    documents = [Document(*pair) for pair in evaluation_documents(config)]
    check_contamination(text.texts, text.source, documents, source)
    return text


def calibration_windows(config: RunConfig, source: Path, samples: int, length_tokens: int) -> list[list[int]]:
    """Token ids of the calibration text, cut into windows of equal length. Errors: ConfigError, MeasurementError."""
    from evalq.quantize.compressor import windows

    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("cutting calibration text into tokens", "transformers", "measure") from error
    text = checked_calibration(config, source)
    job = {"samples": samples, "length_tokens": length_tokens, "bos": config.model.bos, "texts": list(text.texts)}
    try:
        return windows(AutoTokenizer.from_pretrained(source, local_files_only=True), job)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def calibrated_checkpoint(
    config: RunConfig, source: Path, places: Places, progress: Progress | None, out: Path | None = None
) -> Path:
    """A checkpoint made by llm-compressor, from text that shares nothing with the evaluation documents.

    Errors: ConfigError (contaminated, too little text), MeasurementError (environment, checkpoint, hub, disk).
    """
    from evalq.quantize.calibrated import Order, make_calibrated

    order = Order(source, config.quant, config.model, config.calibration, checked_calibration(config, source))
    return make_calibrated(order, places.checkpoints, places.root / "environments", progress, out)
