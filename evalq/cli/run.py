"""The run: `python -m evalq +model=NAME +quant=NAME [key=value ...]`, or `-m` with lists for a sweep."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from evalq.errors import EXIT_CONFIG, EXIT_PASS, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evalq.config import RunConfig
    from evalq.sweep import CellResult, SweepResult

# Flags of Hydra that print and run nothing.
PRINTS = ("--cfg", "-c", "--info", "-i", "--version", "--hydra-help", "--shell-completion", "-sc")

HELP = """\
evalq: which quantization may I ship for this model on this GPU, and what does it cost me?

  python -m evalq +model=NAME +quant=NAME [group=NAME ...] [key=value ...]   one scheme against its baseline
  python -m evalq -m +model=NAME +quant=A,B,C                               a sweep: one baseline, one table
  python -m evalq VERB [...]                                                 {verbs}

{choices}

What it does: runs the baseline (or reuses its record) and the scheme on vLLM, scores perplexity, hellaswag and truthfulqa with
lm-eval, measures memory and throughput, logs to MLflow, and ends with one verdict against the perplexity budget.

Often used keys
  tasks.perplexity_limit=N   documents scored (all)        tasks.extra=[arc_easy,...]   further lm-eval tasks
  data.root=/folder          for data=local                model.path=/folder           a checkpoint of your own
  gate.target=1.0%           passes up to this increase    gate.limit=1.5%              never above this one
  gate.strict=true           a pass with a warning fails   engine.max_num_batched_tokens=N   tokens per engine step
  gpu.memory_utilization=0.9 share of GPU memory           gpu.cpu_kv_cache_gib=2       KV pool on the CPU, GiB
  tracking.uri=URI           another MLflow server         paths.root=/folder           where everything goes

Flags
  --cfg job   print the composed config and stop           -m   sweep over comma-separated values
  --help      this text

Exit codes: 0 pass, 1 quality fail, 2 usage or config, 3 inconclusive, 4 infeasible, 5 measurement or infrastructure failure.
The last line on standard output is one JSON document.
"""


def main(argv: list[str]) -> int:
    """Compose, run, show. Errors: EvalqError."""
    if any(argument in ("--help", "-h") for argument in argv):
        print(help_text())
        return EXIT_PASS
    if not argv:
        print(help_text(), file=sys.stderr)
        print("evalq: give at least +model=NAME and +quant=NAME", file=sys.stderr)
        return EXIT_CONFIG
    from evalq.app import collect

    configs = collect(argv)
    if not configs:
        if not any(argument.split("=")[0] in PRINTS for argument in argv):
            raise ConfigError("nothing was chosen to run: the lists or patterns of this sweep name no cell")
        return EXIT_PASS
    return execute(configs, ["python", "-m", "evalq", *argv])


def execute(configs: Sequence[RunConfig], argv: Sequence[str], kept: bool | None = None) -> int:
    """Run the cells, show what came of them, end with one JSON line. `kept`: with state on disk; None = when there are several."""
    from evalq.report.live import sweep_watcher
    from evalq.report.progress import watcher
    from evalq.sweep import run, summary

    several = len(configs) > 1 or kept
    with (sweep_watcher if several else watcher)(configs[0].progress) as watch:
        result = run(configs, watch, kept=kept, argv=argv)
    show(result)
    told = summary(result)
    if several:
        from evalq.cli.tradeoff import show_tradeoff

        told["recommendations"] = show_tradeoff(result)
    print(json.dumps(told))
    return result.exit_code


def help_text() -> str:
    """Usage with the choices of every group."""
    from evalq.cli import VERBS
    from evalq.config import GROUPS
    from evalq.facts.confdir import names

    choices = "\n".join(f"  {group:9} {', '.join(names(group))}" for group in GROUPS)
    return HELP.format(choices="Choices\n" + choices, verbs=" ".join(VERBS))


def show(result: SweepResult) -> None:
    """Tables for people on standard output."""
    from rich.console import Console

    from evalq.report.tables import verdict_table

    console = Console()
    for cell in result.cells:
        if cell.verdict is not None and len(result.cells) == 1:
            console.print(verdict_table(cell.verdict))
    console.print(_cells_table(result))
    for cell in result.cells:
        if cell.error is not None:
            console.print(f"{cell.name}: {cell.error}", markup=False, highlight=False)
        if cell.trace and cell.exit_code not in (2, 4) and len(result.cells) > 1:
            console.print(cell.trace, markup=False, highlight=False)
    _show_loads(result, console)
    if result.folder:
        left = len(result.cells) - result.done
        again = f"; the same command runs the other {left}" if left else ""
        console.print(
            f"{result.done} of {len(result.cells)} cells done{again}; state in {result.folder}", highlight=False
        )
    for message in result.messages:
        console.print(message, markup=False, highlight=False)


def _show_loads(result: SweepResult, console: Any) -> None:
    """Loads on a server have a table of their own; the quick figure of a run is in the table of cells."""
    from evalq.report.load_tables import load_table

    measured = [m for cell in result.cells for m in (cell.baseline, cell.measured) if m is not None]
    records = list({m.record.record_id: m.record for m in measured}.values())
    served = [r for r in records if any(load.start == "serving" for load in r.load_results.values())]
    if served:
        console.print(load_table(served))


def _cells_table(result: SweepResult) -> Any:
    from evalq.judge.multiplicity import holm_fails
    from evalq.report.tables import SweepRow, sweep_table

    rows = []
    baselines = {id(c.baseline): c.baseline for c in result.cells if c.baseline}
    for baseline in baselines.values():
        ledger, load = baseline.record.ledger, next(iter(baseline.record.loads.values()), None)
        rows.append(
            SweepRow(
                quant="baseline (stored)" if baseline.reused else "baseline",
                increase=None,
                weight_bytes=ledger.weight_bytes if ledger else None,
                kv_bytes_per_token=ledger.kv_bytes_per_token if ledger else None,
                output_tokens_per_second=load.output_tokens_per_second if load and load.valid else None,
                verdict=None,
                failure="the yardstick",
                speed_invalid=load is not None and not load.valid,
            )
        )
    adjusted = holm_fails([cell.verdict for cell in result.cells])
    rows.extend(_row(cell, p_holm) for cell, p_holm in zip(result.cells, adjusted, strict=True))
    return sweep_table(rows)


def _row(cell: CellResult, p_holm: float | None) -> Any:
    from evalq.report.tables import SweepRow

    record = cell.measured.record if cell.measured else None
    ledger = record.ledger if record else None
    load = next(iter(record.loads.values()), None) if record else None
    checks = cell.verdict.checks if cell.verdict else []
    increase = next((c.estimate for c in checks if c.estimate and "perplexity" in c.metric), None)
    failure = ""
    if cell.error is not None:
        failure = f"failed ({getattr(cell.error, 'kind', 'infeasible' if cell.exit_code == 4 else 'config')})"
    elif cell.is_baseline:
        failure = "measured (baseline)"
    return SweepRow(
        quant=cell.config.quant.name,
        increase=increase,
        weight_bytes=ledger.weight_bytes if ledger else None,
        kv_bytes_per_token=ledger.kv_bytes_per_token if ledger else None,
        output_tokens_per_second=load.output_tokens_per_second if load and load.valid else None,
        verdict=cell.verdict,
        failure=failure,
        speed_invalid=load is not None and not load.valid,
        floor=cell.floor,
        p_holm=p_holm,
    )
