"""`evalq sweep`: the plan of a sweep, then the sweep; with --dry-run the plan alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evalq.errors import EXIT_CONFIG, EXIT_INFEASIBLE, EXIT_PASS, ConfigError

if TYPE_CHECKING:
    from evalq.config import RunConfig
    from evalq.sweep.check import Checked
    from evalq.sweep.estimate import Cost

HELP = """\
usage: evalq sweep +experiment=NAME [group=A,B ...] [key=value ...] [--dry-run] [--json]
       evalq sweep +model=A,B +quant=C,D [gpu=...] [engine=...] [--dry-run]

Every combination is a cell; each model and engine has one baseline, measured first and shared. Cells that cannot run are named
with their rule before anything starts. Start the same command again after whatever happened: it runs only what is missing
(executor.resume=false measures everything anew). evalq status shows where it is.

  --dry-run   show cells, refusals, hours and GPU-hours, and measure nothing
  --json      with --dry-run: the plan as JSON on the last line

experiments: {experiments}
executors:   executor=local (this machine), executor=ray (a Ray cluster; see jobs/README.md)
"""


def main(argv: list[str]) -> int:
    """Plan, then run. Errors: EvalqError."""
    from evalq.facts.confdir import names

    if not argv or any(argument in ("-h", "--help") for argument in argv):
        print(HELP.format(experiments=", ".join(names("experiment"))), file=sys.stdout if argv else sys.stderr)
        return EXIT_PASS if argv else EXIT_CONFIG
    dry, as_json = "--dry-run" in argv, "--json" in argv
    overrides = [argument for argument in argv if argument not in ("--dry-run", "--json", "-m", "--multirun")]
    if as_json and not dry:
        raise ConfigError("--json belongs to --dry-run; a sweep ends with one JSON line by itself")
    configs = _compose(overrides)
    checked = _show_plan(configs, dry, as_json)
    if dry:
        return EXIT_PASS if checked.cells else EXIT_INFEASIBLE
    from evalq.cli.run import execute

    return execute(configs, ["evalq", "sweep", *argv], kept=True)


def _compose(overrides: Sequence[str]) -> list[RunConfig]:
    from evalq.app import collect

    configs = collect(["-m", *overrides])
    if not configs:
        raise ConfigError("nothing was chosen to run: the lists or patterns of this sweep name no cell")
    return configs


def _show_plan(configs: Sequence[RunConfig], dry: bool, as_json: bool) -> Checked:
    """Print the plan; a dry run may be of a sweep for another machine."""
    from rich.console import Console

    from evalq.sweep import local_workers, one_executor
    from evalq.sweep.check import check_cells
    from evalq.sweep.estimate import costs, total_hours

    elsewhere = dry or one_executor(configs).name == "ray"
    checked = check_cells(configs, elsewhere)
    found = costs(checked)
    workers = local_workers(checked.cells)[1] if checked.cells and one_executor(configs).name == "local" else 1
    console = Console(stderr=not dry)
    console.print(_plan_table(found, checked))
    hours, gpu_hours, whole = total_hours(found, workers)
    text = f"{len(checked.cells)} cells, {len(found)} measurements"
    if hours:
        text += f", {'' if whole else 'at least '}{_clock(hours)}" + (f" with {workers} at once" if workers > 1 else "")
    if gpu_hours:
        text += f", {gpu_hours:.2f} GPU-hours"
    refused = [result for result in checked.results if result.error is not None]
    console.print(f"{text}; {len(refused)} refused", highlight=False)
    for line in checked.duplicates:
        console.print(line, markup=False, highlight=False)
    if as_json:
        print(json.dumps(_plan_data(found, checked, hours, gpu_hours, whole)))
    return checked


def _plan_table(found: Sequence[Cost], checked: Checked) -> object:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="evalq sweep: the plan", title_justify="left")
    for name in ("measurement", "GPU", "GPUs", "time", "from"):
        table.add_column(name, justify="right" if name in ("GPUs", "time") else "left")
    for cost in found:
        gpus = "-" if cost.gpu == "cpu" else str(cost.gpus)
        time = "-" if cost.hours is None else _clock(cost.hours)
        table.add_row(cost.name, cost.gpu, gpus, time, cost.source)
    for result in checked.results:
        if result.error is not None:
            reason = Text(f"refused: {result.error}", style="red")
            table.add_row(result.name, result.config.gpu.name, "-", "-", reason)
    return table


def _plan_data(
    found: Sequence[Cost], checked: Checked, hours: float, gpu_hours: float, whole: bool
) -> dict[str, object]:
    import dataclasses

    return {
        "cells": len(checked.cells),
        "measurements": [dataclasses.asdict(cost) for cost in found],
        "refused": {result.name: str(result.error) for result in checked.results if result.error is not None},
        "duplicates": checked.duplicates,
        "hours": hours,
        "gpu_hours": gpu_hours,
        "every_measurement_estimated": whole,
    }


def _clock(hours: float) -> str:
    """ "1 h 05 min", "3 min", "40 s"."""
    seconds = round(hours * 3600)
    if seconds < 60:
        return f"{max(1, seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
