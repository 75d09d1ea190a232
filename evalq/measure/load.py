"""A first throughput figure: fixed lengths, warm-up outside the window, output lengths asserted, no shared prefixes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from evalq.config import LoadConfig
from evalq.measure.engine import Engine, Progress
from evalq.records import Load

MAX_PREFIX_HITS = 0.01


def measure_load(engine: Engine, config: LoadConfig, vocabulary: int, seed: int, progress: Progress | None) -> Load:
    """All requests at once, `repeats` times over fresh random prompts; the figure is the median of the repeats.

    Invalid, with the reason, when an output is shorter than asked or more than 1 % of the prompt tokens came from a cache.
    """
    random = np.random.default_rng(seed)
    if config.warmup_requests:
        _run(engine, _prompts(random, config.warmup_requests, config.input_tokens, vocabulary), config, None)
    rates, seconds_of_requests, reasons = [], [], []
    for repeat in range(config.repeats):
        engine.reset_prefix_cache()
        prompts = _prompts(random, config.requests, config.input_tokens, vocabulary)
        outputs, finished, seconds = _run(engine, prompts, config, None)
        rates.append(config.requests * config.output_tokens / seconds)
        seconds_of_requests.extend(finished)
        reasons.extend(_problems(outputs, config))
        if progress:
            progress(repeat + 1, config.repeats, "repeats")
    output_rate = float(np.median(rates))
    return Load(
        name=config.name,
        requests=config.requests,
        input_tokens_per_request=config.input_tokens,
        output_tokens_per_request=config.output_tokens,
        concurrency=config.requests,
        repeats=config.repeats,
        output_tokens_per_second=output_rate,
        output_tokens_per_second_low=float(min(rates)),
        output_tokens_per_second_high=float(max(rates)),
        total_tokens_per_second=output_rate * (config.input_tokens + config.output_tokens) / config.output_tokens,
        request_latency_p50_seconds=float(np.percentile(seconds_of_requests, 50)),
        request_latency_p99_seconds=float(np.percentile(seconds_of_requests, 99)),
        valid=not reasons,
        reasons=list(dict.fromkeys(reasons)),
    )


def _prompts(random: np.random.Generator, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Random token ids; the low ids are left out, since special tokens live there."""
    low = min(256, vocabulary // 2)
    drawn: list[list[int]] = random.integers(low, vocabulary, size=(count, length)).tolist()
    return drawn


def _run(
    engine: Engine, prompts: list[list[int]], config: LoadConfig, progress: Progress | None
) -> tuple[list[Any], list[float], float]:
    began = time.monotonic()
    outputs, finished = engine.generate(prompts, config.output_tokens, ignore_eos=True, progress=progress)
    return outputs, finished, time.monotonic() - began


def _problems(outputs: list[Any], config: LoadConfig) -> list[str]:
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    cached = sum(int(output.num_cached_tokens or 0) for output in outputs)
    problems = []
    if lengths != {config.output_tokens}:
        problems.append(f"outputs of {sorted(lengths)} tokens where {config.output_tokens} were asked for")
    if cached > MAX_PREFIX_HITS * len(outputs) * config.input_tokens:
        problems.append(f"{cached} prompt tokens came from the prefix cache")
    return problems
