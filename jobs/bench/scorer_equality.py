"""Does the scorer inside the engine give the engine's own log-probabilities? Token by token, on one engine start.

    EVALQ_DATA=../shared/data python jobs/bench/scorer_equality.py +model=smollm2-135m +quant=fp8-kv gpu=cpu data=local \
        tasks.perplexity_limit=8 tasks.hellaswag_limit=50 tasks.truthfulqa_limit=25 --out reports/scorer-equality-fp8-kv.md

Every sequence of the tasks is scored three times: by the scorer, by the engine's public prompt_logprobs, and by the scorer with
the requests in reverse order (the A/A noise of the engine: what no scheme can be blamed for). With `--transformers`, also by
transformers in float32 (the baseline's checkpoint).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from scoring import Bench, versions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", help="as for python -m evalq")
    parser.add_argument(
        "--tasks", default="wikitext,hellaswag,truthfulqa", help="which of wikitext,hellaswag,truthfulqa"
    )
    parser.add_argument("--transformers", action="store_true", help="also transformers in float32, wikitext only")
    parser.add_argument(
        "--synthetic",
        type=int,
        default=0,
        help="windows of random tokens in place of the tasks (random weights will do)",
    )
    parser.add_argument("--out", type=Path, help="Markdown file; the table is printed all the same")
    arguments = parser.parse_args()
    if arguments.synthetic and arguments.transformers:
        parser.error("--transformers compares the tasks' own text; leave out --synthetic")
    bench = Bench(arguments)
    lines = [
        f"# The scorer and the engine's own prompt_logprobs: {bench.config.quant.name}, {bench.cell.device}",
        "",
        f"{time.strftime('%Y-%m-%d')}. {versions()}. {bench.config.model.name}; differences of log-probabilities, nats a token.",
        "",
        f"    python jobs/bench/scorer_equality.py {' '.join(sys.argv[1:])}",
        "",
        "| work | sequences | tokens | against | largest | mean abs. | mean |",
        "|---|---:|---:|---|---:|---:|---:|",
    ]
    worst = True
    for name, requests in bench.sets().items():
        hook = bench.engine.score(requests)
        again = bench.engine.score(requests, reverse=True)
        bench.engine.scorer = "prompt_logprobs"
        own = bench.engine.score(requests)
        bench.engine.scorer = "hook"
        pairs = [("prompt_logprobs", own), ("itself, requests in reverse (A/A)", again)]
        found = [(label, apart(hook, other)) for label, other in pairs]
        worst = worst and np.abs(found[0][1]).max() <= np.abs(found[1][1]).max()
        if arguments.transformers and name == "wikitext":
            found.append(("transformers, float32", apart(hook, by_transformers(bench, requests))))
        for label, values in found:
            lines.append(
                f"| {name} | {len(requests):,} | {len(values):,} | {label} | {np.abs(values).max():.2e} | "
                f"{np.abs(values).mean():.2e} | {values.mean():+.1e} |"
            )
    said = "within" if worst else "NOT within"
    text = "\n".join(
        [*lines, "", f"The largest difference from prompt_logprobs is {said} the A/A noise in every row.", ""]
    )
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 0 if worst else 1


def apart(first: list[Any], second: list[Any]) -> np.ndarray[Any, Any]:
    """Differences of all tokens' log-probabilities, in float64."""
    return np.concatenate(
        [a.logprobs.astype(np.float64) - b.logprobs.astype(np.float64) for a, b in zip(first, second, strict=True)]
    )


def by_transformers(bench: Bench, requests: list[Any]) -> list[Any]:
    """The same tokens' log-probabilities from transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from evalq.checkpoints import source_folder
    from evalq.measure.scores import ScoreResult

    model = AutoModelForCausalLM.from_pretrained(source_folder(bench.cell, bench.watcher), dtype=torch.float32)
    results = []
    for request in requests:
        with torch.no_grad():
            logits = model(torch.tensor([request.ids])).logits[0, request.first - 1 : -1]
        logs = logits.log_softmax(-1)
        values = logs.gather(1, torch.tensor(request.ids[request.first :])[:, None])[:, 0].numpy()
        results.append(ScoreResult(values, logs.argmax(-1).numpy(), values))
    return results


if __name__ == "__main__":
    sys.exit(main())
