"""evalq's figures against vLLM's own benchmarks: python jobs/bench/load_cross_check.py OVERRIDES... --out FILE.json [--what serve]

serve       one server; its load at one concurrency by evalq, and by `vllm bench serve` (timed_trace: the same kind of prompts,
            token ids of fixed length) with the same arguments, alternately (A B B A)
throughput  load=offline on the scoring start by evalq, and `vllm bench throughput` with the same arguments, each in a process

`vllm bench` wants a tokenizer even for token ids: --tokenizer names a folder with one. vLLM 0.26's timed_trace turns the ids into
text, which is split into some 5 % more tokens again, and which a server of random weights refuses; here they stay ids, as in later
versions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from evalq.app import compose
from evalq.checkpoints import cell_checkpoint, source_folder
from evalq.config import RunConfig
from evalq.loads.figures import median, percentile
from evalq.measure.engine import engine_arguments, prepare_environment
from evalq.measure.load import longest_request
from evalq.measure.serving import Served, serve_flags
from evalq.measure.serving_load import CLIENT, LoadClient, measure_serving
from evalq.preparation import prepare
from evalq.report.progress import QuietWatcher

# `vllm bench ...` without the command, which asks for a distribution called vllm.
BENCH = """
import argparse, asyncio, sys
from vllm.benchmarks import {module} as bench
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.benchmarks.datasets import datasets
class Ids:
    "A tokenizer that leaves token ids as they are."
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)
    def decode(self, ids, *rest, **more): return list(ids)
sample = datasets.TimedTrace.sample
datasets.TimedTrace.sample = lambda self, tokenizer, *rest, **more: sample(self, Ids(tokenizer), *rest, **more)
parser = FlexibleArgumentParser(); bench.add_cli_args(parser)
if __name__ == "__main__": bench.main(parser.parse_args(sys.argv[1:]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="+")
    parser.add_argument("--what", choices=("serve", "throughput"), default="serve")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    cell = prepare(compose(options.overrides))
    checkpoint = cell_checkpoint(cell, source_folder(cell, QuietWatcher()), QuietWatcher())
    compare = against_serve if options.what == "serve" else against_throughput
    found = compare(cell.config, checkpoint, cell.is_cpu, options.tokenizer, options.pairs, options.out.parent)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for number, check in enumerate(found):
        file = options.out.with_name(f"{options.out.stem}-{number}.json")
        file.write_text(json.dumps(check, indent=1), encoding="utf-8")
        share = check["evalq"] / check["engine"] - 1
        print(
            f"{check['what']}: evalq {check['evalq']:.4f}, vllm {check['engine']:.4f} ({100 * share:+.2f} %)",
            flush=True,
        )


def run_bench(module: str, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder, open(log, "ab") as out:
        script = Path(folder) / f"bench_{module}.py"  # a file, since the engine's processes start by importing it again
        script.write_text(BENCH.format(module=module), encoding="utf-8")
        subprocess.run([sys.executable, str(script), *arguments], stdout=out, stderr=out, check=True, env=environment)


def trace_of(load: Any, count: int, vocabulary: int, folder: Path) -> Path:
    """A timed trace of `count` requests of the load's lengths, each with prefix hashes of its own."""
    file = folder / "bench-trace.jsonl"
    blocks = -(-load.input_tokens // 16)
    rows = [
        {
            "timestamp": 0,
            "input_length": load.input_tokens,
            "output_length": load.output_tokens,
            "hash_ids": [i * blocks + j for j in range(blocks)],
        }
        for i in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def against_serve(
    config: RunConfig, checkpoint: Path, is_cpu: bool, tokenizer: str, pairs: int, folder: Path
) -> list[dict[str, Any]]:
    """evalq's client and vLLM's command on one server, alternately; every run with fresh prompts and an empty prefix cache."""
    folder.mkdir(parents=True, exist_ok=True)
    load = replace(config.load, repeats=1, concurrencies=config.load.concurrencies[:1], peak_requests=0)
    config = replace(config, load=load)
    slots = load.concurrencies[0]
    count = max(load.requests, load.waves * slots)
    served = Served.start(
        config, checkpoint, longest_request(config), is_cpu, folder / "cross-server.log", os.urandom(6).hex()
    )
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    try:
        trace = trace_of(load, count, served.vocabulary, folder)
        for number in range(pairs):
            turns = [ours, theirs] if number % 2 == 0 else [theirs, ours]
            for turn in turns:
                if turn is ours:
                    with LoadClient(CLIENT) as sender:
                        result = measure_serving(served, sender, config, folder, "", number + 1, "", None)
                    ours.append(result.levels[0].repeats[0].figures)
                else:
                    theirs.append(bench_serve(served, checkpoint, trace, slots, count, tokenizer, folder, number))
    finally:
        served.close()
    sizes = f"{count} requests of {load.input_tokens} + {load.output_tokens} tokens"
    how = f"concurrency {slots}, {sizes}, {pairs} runs each, alternately"
    names = (
        "output_tokens_per_second",
        "ttft_p50_seconds",
        "tpot_p50_seconds",
        "latency_p50_seconds",
        "latency_p99_seconds",
    )
    return [
        {
            "what": f"serve: {name}",
            "evalq": median([run[name] for run in ours]),
            "engine": median([run[name] for run in theirs]),
            "how": how,
        }
        for name in names
    ]


def bench_serve(
    served: Served, checkpoint: Path, trace: Path, slots: int, count: int, tokenizer: str, folder: Path, number: int
) -> dict[str, float]:
    from evalq.measure.load_client import reset_prefix_cache

    reset_prefix_cache(served.base_url)
    name = f"bench-serve-{number}.json"
    arguments = [
        *("--backend", "openai", "--base-url", served.base_url, "--model", served.name, "--tokenizer", tokenizer),
        *(
            "--dataset-name",
            "timed_trace",
            "--dataset-path",
            str(trace),
            "--no-self-timed",
            "--num-prompts",
            str(count),
        ),
        *("--max-concurrency", str(slots), "--temperature", "0", "--seed", str(number), "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", name),
    ]
    run_bench("serve", arguments, folder / "bench.log", {**os.environ, "NO_PROXY": "*", "no_proxy": "*"})
    found = json.loads((folder / name).read_text(encoding="utf-8"))
    if found["failed"] or not found["completed"]:
        errors = sorted({error for error in found["errors"] if error})
        raise SystemExit(f"vllm bench serve failed {found['failed']} of {count} requests: {', '.join(errors)[:200]}")
    latencies = [ttft + sum(itls) for ttft, itls in zip(found["ttfts"], found["itls"], strict=True)]
    outputs = found["output_lens"]
    tpots = [sum(itls) / (n - 1) for itls, n in zip(found["itls"], outputs, strict=True) if n > 1]
    return {
        "output_tokens_per_second": found["output_throughput"],
        "ttft_p50_seconds": float(np.percentile(found["ttfts"], 50)),
        "tpot_p50_seconds": float(np.percentile(tpots, 50)),
        "latency_p50_seconds": percentile(latencies, 50),
        "latency_p99_seconds": percentile(latencies, 99),
    }


def against_throughput(
    config: RunConfig, checkpoint: Path, is_cpu: bool, tokenizer: str, pairs: int, folder: Path
) -> list[dict[str, Any]]:
    """evalq's offline load and vLLM's command, each in a process of its own with the same engine arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    load = config.load
    prepare_environment(config, is_cpu)
    environment = dict(os.environ)
    arguments = engine_arguments(config, checkpoint, load.input_tokens + load.output_tokens, is_cpu)
    arguments = {k: v for k, v in arguments.items() if k not in ("skip_tokenizer_init", "worker_extension_cls")}
    flags = [*serve_flags({**arguments, "tokenizer": tokenizer}), "--disable-detokenize"]
    rates = []
    for number in range(pairs):
        out = folder / f"bench-throughput-{number}.json"
        lengths = ["--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)]
        run_bench(
            "throughput",
            [
                *flags,
                "--dataset-name",
                "random",
                *lengths,
                "--num-prompts",
                str(load.requests),
                "--num-warmups",
                str(load.warmup_requests),
                "--output-json",
                str(out),
            ],
            folder / "bench.log",
            environment,
        )
        rates.append(float(json.loads(out.read_text(encoding="utf-8"))["tokens_per_second"]))
    return [
        {
            "what": "offline: total_tokens_per_second",
            "evalq": offline_rate(config, checkpoint, is_cpu, folder),
            "engine": median(rates),
            "how": f"{load.requests} requests of {load.input_tokens} + {load.output_tokens} tokens",
        }
    ]


def offline_rate(config: RunConfig, checkpoint: Path, is_cpu: bool, folder: Path) -> float:
    from evalq.measure.engine import Engine
    from evalq.measure.load import measure_offline

    engine = Engine.start(config, checkpoint, config.load.input_tokens + config.load.output_tokens, is_cpu)
    result = measure_offline(engine, config, folder, "", None)
    engine.close()
    value = result.levels[0].figures["total_tokens_per_second"].value
    assert value is not None
    return value


if __name__ == "__main__":
    main()
