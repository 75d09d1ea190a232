"""evalq quantize: make the checkpoint of a scheme, and nothing else."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from evalq.errors import EXIT_PASS, ConfigError

if TYPE_CHECKING:
    from evalq.config import RunConfig
    from evalq.quantize.store import Progress

REPORT_LINES = 8  # groups shown; a scheme has one or two


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="evalq quantize",
        description="Make the compressed-tensors checkpoint of a scheme: weights rounded to nearest, with a search of "
        "the clipping range of each group, or by quant.method=gptq, awq, smoothquant or autoround from calibration text. "
        "vLLM loads the folder as it is. One that exists already is not made again.",
        epilog="The last line on standard output is one JSON document: path, bytes (of the safetensors files), "
        "seconds, recipe_hash. Example: evalq quantize +model=smollm2-135m +quant=w4a16 --out w4a16",
    )
    result.add_argument("overrides", nargs="+", help="+model=NAME +quant=NAME and further settings, as key=value")
    result.add_argument(
        "--out",
        type=Path,
        help="folder that becomes the checkpoint; default: a folder named by content in paths.checkpoints",
    )
    return result


def main(argv: list[str]) -> int:
    """Errors: EvalqError, for the dispatcher to print."""
    args = parser().parse_args(argv)
    run(args.overrides, args.out)
    return EXIT_PASS


def run(overrides: list[str], out: Path | None) -> None:
    """Compose the config, find the source, make the checkpoint, print the result. Errors: EvalqError."""
    from evalq.app import compose

    started = time.monotonic()
    config: RunConfig = compose(overrides)
    with progress_bar(config.progress) as progress:
        folder = make(config, out, progress)
    print_costs(folder)
    document = {
        "path": str(folder),
        "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "seconds": round(time.monotonic() - started, 3),
        "recipe_hash": json.loads((folder / "quantization_report.json").read_text(encoding="utf-8"))["recipe_hash"],
    }
    print(json.dumps(document))


def make(config: RunConfig, out: Path | None, progress: Progress | None) -> Path:
    """The checkpoint folder of a composed config; its scheme is checked before the source is fetched."""
    from evalq.checkpoints import calibrated_checkpoint
    from evalq.config import needs_calibration
    from evalq.preparation import places_of
    from evalq.quantize import make_checkpoint, make_checkpoint_at, source_checkpoint
    from evalq.quantize.scheme import check_scheme

    if config.quant.kv_scale_source == "computed":
        return _with_kv_scales(config, out, progress)
    check_scheme(config.quant)
    root = Path(config.paths.root)
    source = source_checkpoint(config.model, root / config.paths.models, progress)
    if needs_calibration(config.quant):
        return calibrated_checkpoint(config, source, places_of(config), progress, out.absolute() if out else None)
    if out is not None:
        return make_checkpoint_at(source, config.quant, out.absolute(), progress)
    return make_checkpoint(source, config.quant, root / config.paths.checkpoints, progress)


def _with_kv_scales(config: RunConfig, out: Path | None, progress: Progress | None) -> Path:
    """A checkpoint with measured KV scales, over the weights as they are or as the scheme's groups make them."""
    from evalq.quantize import add_kv_scales, make_checkpoint, source_checkpoint

    if out is not None:
        raise ConfigError(f"--out is not available with computed KV scales ({config.quant.name}); leave it out")
    root = Path(config.paths.root)
    checkpoints = root / config.paths.checkpoints
    source = source_checkpoint(config.model, root / config.paths.models, progress)
    made = make_checkpoint(source, config.quant, checkpoints, progress) if config.quant.groups else source
    return add_kv_scales(made, source, checkpoints, progress)


@contextmanager
def progress_bar(shown: bool) -> Iterator[Progress | None]:
    """A bar with the time left on standard error, lines where that is no terminal; the stage's name tells what is counted."""
    if not shown:
        yield None
        return
    if not sys.stderr.isatty():
        yield plain_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking")
        last_verb = ""

        def advance(done: int, total: int, stage: str) -> None:
            nonlocal last_verb
            verb = _verb(stage)
            if verb != last_verb:  # the time left is estimated anew for each stage
                bar.reset(task)
                last_verb = verb
            bar.update(task, completed=done, total=max(total, 1), description=stage)

        yield advance


def _verb(stage: str) -> str:
    """What a stage does, by its first word; copying goes on between the layers that are rounded."""
    return stage.partition(" ")[0].replace("copying", "rounding")


def plain_lines() -> Progress:
    """A line for each stage, and one every half minute in long ones: for logs and CI."""
    from evalq.report.progress import PlainWatcher

    watcher, last = PlainWatcher(), ""

    def advance(done: int, total: int, stage: str) -> None:
        nonlocal last
        verb = _verb(stage)
        if verb != last:
            watcher.stage("quantize", stage)
            last = verb
        watcher.progress(done, total, "steps")

    return advance


def print_costs(folder: Path) -> None:
    """What rounding cost, group by group, for people, on standard error."""
    report = json.loads((folder / "quantization_report.json").read_text(encoding="utf-8"))
    for name, group in list(report["groups"].items())[:REPORT_LINES]:
        text = f"{name}: {group['layers']} layers, {group['weights']:,} weights, {group['format']}"
        if "relative_squared_error" in group:  # a calibrated method moves weights on purpose
            text += f", relative squared error {group['relative_squared_error']:.3g} (most in {group['worst_layer']})"
        print(text, file=sys.stderr)
    given = report.get("calibration")
    if given:
        print(
            f"{given['method']} on {given['samples']} windows of {given['length_tokens']} tokens of {given['domain']}, "
            f"seed {given['seed']}, {given['seconds']:.0f} s on {given['device']}",
            file=sys.stderr,
        )
