"""The process that sends requests: vLLM's own benchmark client, given exact token ids, run after run.

`python -m evalq.measure.load_client` takes a file's name on its standard input, which holds {"base_url", "model", "vocabulary",
"out", "runs": [...]}, and writes one file of raw times per run into `out`. It is started with the server, so that it has imported
what it needs when the server answers. The load itself (arrivals, concurrency, reading the stream, the clock) is
vllm.benchmarks.serve.benchmark, as in `vllm bench serve`; what is ours is which prompts it gets, that the prefix cache is emptied
before each run, and that the engine's counters are read before and after. Works with vLLM 0.26 to 0.32.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from evalq.measure.http import get_text, post
from evalq.records import write_text

LOWEST_ID = 256  # special tokens live below
RESET_TRIES = 50


def main() -> int:
    """Run the plan that standard input names; a line of JSON on the original standard output after each run."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from vllm.benchmarks import serve
    from vllm.utils.gc_utils import freeze_gc_heap

    name = sys.stdin.readline().strip()
    if not name:
        return 0  # nothing to do: the server did not start
    plan = json.loads(Path(name).read_text(encoding="utf-8"))
    for number, run in enumerate(plan["runs"]):
        requests = prompts(run, plan["vocabulary"])
        reset_prefix_cache(plan["base_url"])
        freeze_gc_heap()
        result = asyncio.run(send(serve, plan, run, requests))
        write_text(Path(plan["out"]) / f"{number:04d}.json", json.dumps(result))
        events.write(json.dumps({"event": "run", "done": number + 1, "total": len(plan["runs"])}) + "\n")
        events.flush()
    return 0


def prompts(run: dict[str, Any], vocabulary: int) -> list[list[int]]:
    """Random token ids of the wanted lengths; every run has a seed of its own, so no run repeats another's prompts."""
    low = min(LOWEST_ID, vocabulary // 2)
    generator = np.random.default_rng(run["seed"])
    drawn: list[list[int]] = [
        generator.integers(low, vocabulary, size=length).tolist() for length in run["input_lengths"]
    ]
    return drawn


def reset_prefix_cache(base_url: str) -> None:
    """Empty the prefix cache, that of KV offload too; again while blocks are still held by a transfer."""
    for _ in range(RESET_TRIES):
        answer = post(f"{base_url}/reset_prefix_cache?reset_external=true")
        if not answer or json.loads(answer).get("success", True):
            return
        time.sleep(0.1)


async def send(serve: Any, plan: dict[str, Any], run: dict[str, Any], ids: list[list[int]]) -> dict[str, Any]:
    """One run of vLLM's client; raw times in seconds."""
    from vllm.benchmarks.datasets import SampleRequest

    times = run.get("arrivals") or [None] * len(ids)
    requests = [
        SampleRequest(prompt=prompt, prompt_len=len(prompt), expected_output_len=output, timestamp=arrival)
        for prompt, output, arrival in zip(ids, run["output_lengths"], times, strict=True)
    ]
    random.seed(run["seed"])
    np.random.seed(run["seed"] % 2**32)  # the client draws its arrival times from the global generator
    before = counters(plan["base_url"])
    wall, began = time.time(), time.monotonic()
    found = await serve.benchmark(
        task_type=serve.TaskType.GENERATION,
        endpoint_type="openai",
        api_url=f"{plan['base_url']}/v1/completions",
        base_url=plan["base_url"],
        model_id=plan["model"],
        model_name=plan["model"],
        tokenizer=None,
        input_requests=requests,
        logprobs=None,
        request_rate=run.get("rate") or float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=0,
        profile=False,
        selected_percentile_metrics=["e2el"],
        selected_percentiles=[99.0],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=run.get("concurrency"),
        lora_modules=None,
        extra_headers=None,
        extra_body={"temperature": 0.0},
        ready_check_timeout_sec=0,
        self_timed=run.get("arrivals") is not None,
    )
    ended = time.monotonic()
    kept = {
        key: found[key] for key in ("duration", "ttfts", "itls", "start_times", "input_lens", "output_lens", "errors")
    }
    return {
        **kept,
        "wanted_lens": run["output_lengths"],
        "window": [began, ended],
        "wall": wall,
        "before": before,
        "after": counters(plan["base_url"]),
    }


def counters(base_url: str) -> dict[str, float]:
    """The engine's counters (Prometheus text), summed over engines and labels."""
    return read_counters(get_text(f"{base_url}/metrics"))


def read_counters(text: str) -> dict[str, float]:
    """ "vllm:num_preemptions_total" -> 3.0, ...; histograms' buckets are left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:") or "_bucket{" in line or "_created" in line:
            continue
        name, _, value = line.rpartition(" ")
        key = name.partition("{")[0]
        try:
            found[key] = found.get(key, 0.0) + float(value)
        except ValueError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
