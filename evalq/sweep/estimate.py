"""How long a sweep takes: from earlier records of the same device, else a lower bound from the roofline, else nothing is said."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evalq.errors import EvalqError, RecordError
from evalq.measure import data
from evalq.preparation import Prepared, as_baseline
from evalq.records import RECORD_FILE, Record, read_record
from evalq.sweep.check import Checked
from evalq.sweep.flow import groups_of
from evalq.sweep.jobs import Job

BYTES_PER_TOKEN = 4.0  # English text and the tokenizers of today's models, roughly; for the roofline's bound alone
ENDINGS = {data.HELLASWAG: 4}  # each item is scored once per ending; truthfulqa's file holds its endings in full


@dataclass(frozen=True)
class Cost:
    """Wall hours of one measurement and where the figure is from; None = nothing is known."""

    name: str
    model: str
    quant: str
    gpu: str
    gpus: int
    hours: float | None
    source: str  # "records", "records of X" (another scheme of the same model), "roofline: at least", "unknown"

    @property
    def gpu_hours(self) -> float | None:
        return None if self.hours is None or self.gpu == "cpu" else self.hours * self.gpus


def costs(checked: Checked) -> list[Cost]:
    """One for every measurement: the baseline of each group first, then its candidates."""
    known = _known(checked.cells)
    found: list[Cost] = []
    for group in groups_of(checked.cells):
        yardstick = as_baseline(group[0])
        found.append(_cost(yardstick.name, yardstick, known))
        found.extend(
            _cost(checked.of_cell[id(cell.config)].name, cell, known) for cell in group if not cell.is_baseline
        )
    return found


def total_hours(found: Sequence[Cost], workers: int) -> tuple[float, float, bool]:
    """Wall hours with so many cells at once, GPU-hours, and whether every measurement is in them."""
    hours = sum(cost.hours or 0.0 for cost in found)
    gpu_hours = sum(cost.gpu_hours or 0.0 for cost in found)
    return hours / max(1, workers), gpu_hours, all(cost.hours is not None for cost in found)


def _known(cells: Sequence[Prepared]) -> dict[tuple[str, str], dict[str, Record]]:
    """Newest complete record per (model, gpu) and scheme."""
    wanted = {(cell.config.model.name, cell.config.gpu.name) for cell in cells}
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for root in {cell.places.records for cell in cells}:
        for file in sorted(root.glob(f"[!.]*/{RECORD_FILE}")):
            with contextlib.suppress(RecordError, OSError):
                record = read_record(file)
                place = (record.cell.model, record.cell.gpu)
                if record.status == "complete" and place in wanted:
                    found.setdefault(place, {})[record.cell.quant] = record
    return found


def _cost(name: str, cell: Prepared, known: dict[tuple[str, str], dict[str, Record]]) -> Cost:
    config = cell.config
    names = (config.model.name, config.quant.name, config.gpu.name)
    records = known.get((config.model.name, config.gpu.name), {})
    gpus = Job("", "", cell).devices
    same = records.get(config.quant.name)
    if same is not None:
        return Cost(name, *names, gpus, _seconds_like(same, cell) / 3600, "records")
    if records:
        other, record = max(records.items(), key=lambda item: _seconds_like(item[1], cell))
        return Cost(name, *names, gpus, _seconds_like(record, cell) / 3600, f"records of {other}")
    bound = _roofline_seconds(cell)
    return Cost(
        name, *names, gpus, None if bound is None else bound / 3600, "roofline: at least" if bound else "unknown"
    )


def _seconds_like(record: Record, cell: Prepared) -> float:
    """What the record took, with its tasks' seconds scaled to the items that the cell wants."""
    scoring = sum(seconds for stage, seconds in record.stage_seconds.items() if stage.startswith("score "))
    rest = sum(record.stage_seconds.values()) - scoring
    wanted = data.wanted_tasks(cell.config)
    total = rest
    for task, limit in wanted.items():
        score = record.tasks.get(task)
        if score is not None and score.n:
            items = _items(cell, task, limit)
            total += score.seconds * (items if items is not None else score.n) / score.n
    return total


def _items(cell: Prepared, task: str, limit: int | None) -> int | None:
    source = cell.sources.get(task)
    if source is None or source.file is None:
        return limit
    count, _ = _size(source.task, source.file, source.identity)
    return count if limit is None else min(limit, count)


@functools.lru_cache(maxsize=64)
def _size(task: str, file: Path, identity: str) -> tuple[int, int]:
    """Items of a data file and their bytes of text."""
    rows = data.read_rows(data.Source(task, "", file, identity))
    return len(rows), sum(len(str(value)) for row in rows for value in row.values())


def _roofline_seconds(cell: Prepared) -> float | None:
    """Scoring and load at the device's peak; engine starts are not in it. None for a device without published peaks."""
    from evalq.plan.answer import Ask, plan

    with contextlib.suppress(EvalqError, OSError):
        answer = plan(cell.config, Ask(explicit=frozenset({"engine.tensor_parallel_size", "gpu.count"})))
        if answer.roofline is None:
            return None
        tokens = 0.0
        for task, limit in data.wanted_tasks(cell.config).items():
            source = cell.sources.get(task)
            if source is None or source.file is None:
                return None  # the hub's: how much there is to score is not known here
            count, size = _size(task, source.file, source.identity)
            share = 1.0 if limit is None else min(limit, count) / count
            tokens += ENDINGS.get(task, 1) * share * size / BYTES_PER_TOKEN
        load = cell.config.load
        output = load.requests * load.output_tokens * load.repeats if load.enabled else 0
        return tokens / answer.roofline.prefill_tokens_per_second + output / answer.roofline.decode_tokens_per_second
    return None
