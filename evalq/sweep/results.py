"""What became of the cells of a sweep, and what the command line says of it at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evalq.config import RunConfig
from evalq.errors import (
    EXIT_CONFIG,
    EXIT_INCONCLUSIVE,
    EXIT_INFEASIBLE,
    EXIT_MEASUREMENT,
    EXIT_PASS,
    EXIT_QUALITY_FAIL,
    EvalqError,
)
from evalq.pipeline import Measured
from evalq.records import Estimate, Verdict

# From harmless to worst. An infrastructure failure outranks a quality failure: of that cell nothing is known.
SEVERITY = (EXIT_PASS, EXIT_INCONCLUSIVE, EXIT_INFEASIBLE, EXIT_QUALITY_FAIL, EXIT_CONFIG, EXIT_MEASUREMENT)


@dataclass
class CellResult:
    """What became of one cell."""

    name: str
    config: RunConfig
    measured: Measured | None = None
    baseline: Measured | None = None
    verdict: Verdict | None = None
    error: EvalqError | None = None
    trace: str = ""
    is_baseline: bool = False
    floor: Estimate | None = None  # A/A floor of this engine, where one is kept

    @property
    def exit_code(self) -> int:
        if self.error is not None:
            return self.error.exit_code
        if self.verdict is not None:
            return self.verdict.exit_code
        return EXIT_PASS if self.is_baseline and self.measured is not None else EXIT_MEASUREMENT

    @property
    def is_done(self) -> bool:
        """Whether the cell came to what was asked of it: a verdict, or a baseline's record."""
        return self.error is None and (self.verdict is not None or (self.is_baseline and self.measured is not None))


@dataclass
class SweepResult:
    """All cells of a sweep, in the order asked for, and where they were tracked."""

    cells: list[CellResult] = field(default_factory=list)
    where: str = ""
    messages: list[str] = field(default_factory=list)
    folder: str = ""  # of the sweep's state on disk; empty for a single cell

    @property
    def exit_code(self) -> int:
        return max((cell.exit_code for cell in self.cells), key=severity, default=EXIT_CONFIG)

    @property
    def done(self) -> int:
        return sum(cell.is_done for cell in self.cells)


def severity(exit_code: int) -> int:
    """Rank of an exit code; unknown ones are the worst."""
    return SEVERITY.index(exit_code) if exit_code in SEVERITY else len(SEVERITY)


def summary(result: SweepResult) -> dict[str, Any]:
    """The JSON document that the command line ends with."""
    return {
        "exit_code": result.exit_code,
        "released": result.exit_code == EXIT_PASS and any(cell.verdict for cell in result.cells),
        "expected": len(result.cells),
        "done": result.done,
        "cells": [cell_summary(cell) for cell in result.cells],
        "mlflow": result.where,
        **({"sweep": result.folder} if result.folder else {}),
    }


def cell_summary(cell: CellResult) -> dict[str, Any]:
    """One cell of the summary."""
    verdict = cell.verdict
    increase = (
        next((c.estimate for c in verdict.checks if c.estimate and "perplexity" in c.metric), None) if verdict else None
    )
    return {
        "model": cell.config.model.name,
        "quant": cell.config.quant.name,
        "gpu": cell.config.gpu.name,
        "engine": cell.config.engine.name,
        "status": verdict.status if verdict else "FAILED" if cell.error else "BASELINE",
        "exit_code": cell.exit_code,
        "summary": verdict.summary if verdict else str(cell.error) if cell.error else "baseline measured; no verdict",
        "perplexity_increase": increase.value if increase else None,
        "perplexity_increase_low": increase.low if increase else None,
        "perplexity_increase_high": increase.high if increase else None,
        "record": str(cell.measured.folder) if cell.measured else None,
        "baseline": str(cell.baseline.folder) if cell.baseline else None,
        "baseline_reused": cell.baseline.reused if cell.baseline else None,
    }
