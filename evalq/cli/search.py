"""evalq search: the smallest or fastest checkpoint of a model that the gate passes, with its recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from evalq.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="evalq search",
        description="Choose a storage format for every group of layers from what the GPU has kernels for, prove candidates on the "
        "engine with the gate, and give the last verdict on documents that the search never saw. Interrupted, the same "
        "command goes on where it was.",
        epilog="Settings and their defaults: search.objective=memory (or throughput), search.options=[fp8,int8,int4_g32,int4_g64,"
        "int4_g128], search.method=rtn (gptq, awq, smoothquant, autoround), search.max_candidates=6 (mixed checkpoints at most), "
        "search.final_share=50% (of the perplexity documents, kept for the last verdicts); all of them: docs/search.md. Exit code: "
        "0 when a candidate passed its last verdict; else that of the first last verdict (1 fail, 3 inconclusive), 1 or 3 when no "
        "candidate passed the search, 5 if none could be measured. The last line on standard output is one JSON document. "
        "Example: evalq search +model=smollm2-135m gpu=h200 data=local calibration=articles search.objective=memory",
    )
    result.add_argument(
        "overrides", nargs="+", help="+model=NAME and further settings, as key=value; quant is the search's"
    )
    result.add_argument("--out", type=Path, help="folder of the result; default: paths.root/search/MODEL-OBJECTIVE")
    return result


def main(argv: list[str]) -> int:
    """Errors: EvalqError, for the dispatcher to print."""
    args = parser().parse_args(argv)
    from evalq.app import compose
    from evalq.report.progress import watcher
    from evalq.search import search
    from evalq.search.run import outcome_json

    keys = {text: text.lstrip("+~").partition("=")[0].partition("@")[0] for text in args.overrides}
    chosen = next((text for text, key in keys.items() if key == "quant" or key.startswith("quant.")), None)
    if chosen is not None:
        raise ConfigError(
            f"{chosen}: the scheme is what a search looks for, from search.options and rounded by search.method; leave it out, or "
            "measure that scheme with python -m evalq"
        )
    config = compose([*args.overrides, "+quant=baseline"])
    with watcher(config.progress) as shown:
        outcome, folder = search(config, shown, args.out)
    print((folder / "search.md").read_text(encoding="utf-8").partition("## Sensitivity")[0])
    print(outcome_json(outcome, folder))
    return outcome.exit_code
