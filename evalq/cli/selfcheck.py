"""evalq selfcheck: do scores on this engine read the quantised KV cache? In prefill, across chunks, in decoding."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from evalq.errors import EXIT_MEASUREMENT, EXIT_PASS, ConfigError

if TYPE_CHECKING:
    from evalq.config import RunConfig
    from evalq.measure.launch import Watcher
    from evalq.pipeline import Measured

SHOWN = ("quant", "prefill", "decode", "method", "kv_dtype", "kv_scale_source", "attention_backend")
EPILOG = """\
Starts the engine, makes what is in the KV cache absurd (K and V scales x 1e-3 and x 1e3; without static scales the cache is
erased), and looks whether scores of the same tokens move: computed in one step, in chunks, and one token per step. Nothing else
is measured. The answer is kept beside the records, once per engine, and every run of a KV scheme uses it.
Exit codes: 0 the scores of prefill read the cache, 5 they do not in one of the schemes (or the engine failed), 2 usage or config,
4 infeasible. The last line on standard output is one JSON document. Example: evalq selfcheck +model=smollm2-135m +quant=fp8-kv
"""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="evalq selfcheck",
        description="Do scores on this engine read the quantised KV cache? In prefill, across chunks, in decoding.",
        epilog=EPILOG,
    )
    result.add_argument("overrides", nargs="*", help="+model=NAME +quant=NAME and further settings, as key=value")
    result.add_argument(
        "-m", "--multirun", action="store_true", help="several schemes: +quant=A,B; one engine start each"
    )
    result.add_argument(
        "--offered", action="store_true", help="list the KV dtypes of the installed engine; starts nothing"
    )
    return result


def main(argv: list[str]) -> int:
    """Errors: EvalqError, for the dispatcher to print."""
    args = parser().parse_args(argv)
    if args.offered:
        return show_offered()
    if not args.overrides:
        raise ConfigError("selfcheck needs a model and a scheme; give +model=NAME +quant=NAME, or --offered")
    from evalq.app import collect
    from evalq.report.progress import watcher

    configs = [question(config) for config in collect([*(["-m"] if args.multirun else []), *args.overrides])]
    with watcher(configs[0].progress if configs else False) as watch:
        found = [answer(ask(config, watch)) for config in configs]
    show(found)
    print(json.dumps(found))
    return EXIT_PASS if all(row["prefill"] == "yes" for row in found) else EXIT_MEASUREMENT


def question(config: RunConfig) -> RunConfig:
    """The same cell with nothing measured but the question. Errors: ConfigError for random weights."""
    if config.engine.load_format == "dummy":
        raise ConfigError("random weights say nothing about scores; leave engine.load_format=dummy out")
    off: dict[str, Any] = {"perplexity": False, "hellaswag": False, "truthfulqa": False, "extra": []}
    return dataclasses.replace(
        config,
        tasks=dataclasses.replace(config.tasks, name="none", **off),
        load=dataclasses.replace(config.load, enabled=False),
        kv=dataclasses.replace(config.kv, selfcheck="always", decode=False, long=False, needle=False, generation=False),
    )


def ask(config: RunConfig, watch: Watcher) -> Measured:
    """Measure the cell whose only product is the answer."""
    from evalq.pipeline import measure
    from evalq.preparation import prepare

    return measure(prepare(config), watch)


def answer(measured: Measured) -> dict[str, Any]:
    """What the record says, flat."""
    record = measured.record
    found = record.kv.sensitivity if record.kv else None
    notes = record.kv.notes if record.kv else []
    return {
        "quant": record.cell.quant,
        "prefill": found.prefill if found else "unknown",
        "decode": found.decode if found else "unknown",
        "method": found.method if found else "; ".join(notes),
        "kv_dtype": record.applied.kv_dtype_effective if record.applied else "",
        "kv_scale_source": record.applied.kv_scale_source if record.applied else "",
        "attention_backend": record.applied.attention_backend if record.applied else "",
        "problems": record.applied.problems if record.applied else [],
        "moved_nats": found.moved_nats if found else {},
        "noise_nats": found.noise_nats if found else None,
        "record": str(measured.folder),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Do scores read the KV cache?")
    for name in ("scheme", "prefill", "decode", "how it was asked", "KV dtype", "scales", "backend"):
        table.add_column(name)
    for row in rows:
        table.add_row(*(str(row[key]) for key in SHOWN))
    console = Console()
    console.print(table)
    for row in rows:
        for path, moved in row["moved_nats"].items():
            console.print(f"{row['quant']}: {path}: moved {moved:.4f} nats per token", markup=False, highlight=False)
        for problem in row["problems"]:
            console.print(f"{row['quant']}: {problem}", markup=False, highlight=False)


def show_offered() -> int:
    """KV dtypes that the installed engine names, and which of them its backends here take. Errors: ConfigError without one."""
    from evalq.facts.gpus import detect
    from evalq.facts.kv_dtypes import engine_folder, offered_by_engine, offered_on_device, usable
    from evalq.kvrecord import SIXTEEN_BIT_KV

    folder = engine_folder()
    if folder is None:
        raise ConfigError("no vllm is installed, so no KV dtype is offered; install evalq[cpu] or evalq[gpu]")
    is_cpu = detect() == "cpu"
    named, here = offered_by_engine(folder), offered_on_device(folder, is_cpu)
    for name in named:
        own = name in SIXTEEN_BIT_KV and "auto" in here  # backends call the model's own dtype "auto"
        taken = "taken here" if name in here or own else "no backend here takes it"
        known = "" if name in usable(named) else "; no scheme of evalq can name it"
        print(f"{name:22} {taken}{known}", file=sys.stdout)
    print(
        json.dumps(
            {"offered": list(named), "taken_here": list(here), "usable": usable(tuple(n for n in named if n in here))}
        )
    )
    return EXIT_PASS
