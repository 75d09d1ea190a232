"""A load on a server: the client process is started, followed and read; its raw times become levels."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evalq.config import RunConfig
from evalq.errors import MeasurementError
from evalq.loads.build import make_level, wrong_lengths
from evalq.loads.figures import Request, run_figures
from evalq.loads.health import Sample, Window, joules
from evalq.loads.results import LoadResult, Repeat
from evalq.loads.schedule import LevelPlan
from evalq.measure.load import bound_of, health_of, iso, levels_to_run, scheduler_limits
from evalq.measure.sampler import Sampling
from evalq.measure.serving import Served

CLIENT = (sys.executable, "-P", "-m", "evalq.measure.load_client")
OFFLOAD_COUNTERS = {
    "vllm:kv_offload_store_bytes_total": "offload_stored_bytes",
    "vllm:kv_offload_load_bytes_total": "offload_loaded_bytes",
    "vllm:external_prefix_cache_hits_total": "offload_hit_tokens",
}
Progress = Callable[[int, int, str], None]


def measure_serving(
    served: Served,
    sender: LoadClient,
    config: RunConfig,
    work: Path,
    device: str,
    round_: int,
    client: str,
    progress: Progress | None,
) -> LoadResult:
    """The config's load on a running server. client: name and version of who sends, for the record."""
    plans = levels_to_run(config)
    order = run_order(len(plans), config.load.repeats)
    runs = [
        _warm_up(config, plans, round_),
        *(_run(config, plans[i], number, round_) for number, i in enumerate(order, 1)),
    ]
    with Sampling(work / f"samples-{round_}.jsonl", config.load.health.interval_seconds) as sampling:
        raws = sender.run(served, runs, work / f"load-{round_}", progress)[1:]
    windows: list[Window] = [(raw["window"][0], raw["window"][1]) for raw in raws]
    _, samples = sampling.read()
    health = health_of(sampling, windows, config)
    levels = []
    for index, plan in enumerate(plans):
        own = [raw for raw, level in zip(raws, order, strict=True) if level == index]
        repeats = [repeat_of(raw, round_, config.load.slo, samples) for raw in own]
        levels.append(make_level(plan, repeats, config.load.warmup_requests, bound_of(config, plan), health))
    return LoadResult(
        name=config.load.name,
        kind=config.load.kind,
        start="serving",
        client=client,
        levels=levels,
        health=health,
        start_seconds={served.start_kind: served.start_seconds},
        scheduler=scheduler_limits(served.settings()),
        device=device,
    )


def run_order(levels: int, repeats: int) -> list[int]:
    """Levels in order, then in reverse, and so on: drift falls on all of them alike."""
    order: list[int] = []
    for number in range(repeats):
        order.extend(range(levels) if number % 2 == 0 else reversed(range(levels)))
    return order


def _run(config: RunConfig, plan: LevelPlan, number: int, round_: int) -> dict[str, Any]:
    return {
        "seed": config.engine.seed * 1_000_003 + round_ * 10_007 + number,
        "input_lengths": plan.input_lengths,
        "output_lengths": plan.output_lengths,
        "arrivals": plan.arrivals,
        "rate": plan.rate_per_second,
        "concurrency": plan.concurrency,
    }


def _warm_up(config: RunConfig, plans: Sequence[LevelPlan], round_: int) -> dict[str, Any]:
    """All at once, of the same lengths as the load, outside every window; one request at least, to have been answered."""
    count = max(1, config.load.warmup_requests)
    lengths = [pair for plan in plans for pair in zip(plan.input_lengths, plan.output_lengths, strict=True)]
    chosen = random.Random(config.engine.seed).choices(lengths, k=count)
    level = LevelPlan("warm-up", [i for i, _ in chosen], [o for _, o in chosen])
    return _run(config, level, 0, round_)


class LoadClient:
    """The process that sends requests. Entering starts it; it imports while the server starts."""

    def __init__(self, command: Sequence[str] = CLIENT) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> LoadClient:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NO_PROXY": "*", "no_proxy": "*"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def run(
        self, served: Served, runs: Sequence[dict[str, Any]], folder: Path, progress: Progress | None
    ) -> list[dict[str, Any]]:
        """Send all runs, once; the raw times of each. Errors: MeasurementError when server or client end early."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.json"):
            old.unlink()
        plan = {"base_url": served.base_url, "model": served.name, "vocabulary": served.vocabulary, "out": str(folder)}
        file = folder / "plan.json"
        file.write_text(json.dumps({**plan, "runs": list(runs)}), encoding="utf-8")
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{file}\n")
            process.stdin.close()
        for line in process.stdout:
            event = json.loads(line)
            if progress:
                progress(event["done"], event["total"], "runs")
        code = process.wait()
        if code != 0:
            served.require_alive()
            raise MeasurementError(
                f"the client that sends the requests ended with exit code {code}; read engine.log in the record folder",
                "engine",
            )
        return [json.loads((folder / f"{i:04d}.json").read_text(encoding="utf-8")) for i in range(len(runs))]


def requests_of(raw: dict[str, Any]) -> list[Request]:
    """The requests of one run as the client saw them; a latency is the first token's time and all that follow."""
    return [
        Request(
            start=raw["start_times"][i],
            ttft=raw["ttfts"][i],
            latency=raw["ttfts"][i] + sum(raw["itls"][i]),
            itls=tuple(raw["itls"][i]),
            input_tokens=raw["input_lens"][i],
            output_tokens=raw["output_lens"][i],
            wanted_tokens=raw["wanted_lens"][i],
            ok=not raw["errors"][i] and raw["output_lens"][i] > 0,
        )
        for i in range(len(raw["wanted_lens"]))
    ]


def repeat_of(raw: dict[str, Any], round_: int, slo: dict[str, float], samples: Sequence[Sample]) -> Repeat:
    """One run's figures and the change of the engine's counters."""
    requests = requests_of(raw)

    def change(name: str) -> float | None:
        if name not in raw["after"]:
            return None
        return float(raw["after"][name]) - float(raw["before"].get(name, 0.0))

    queries, hits = change("vllm:prefix_cache_queries_total"), change("vllm:prefix_cache_hits_total")
    preemptions = change("vllm:num_preemptions_total")
    window = (raw["window"][0], raw["window"][1])
    return Repeat(
        round=round_,
        began_at=iso(raw["wall"]),
        seconds=raw["duration"],
        requests=len(requests),
        requests_failed=sum(1 for request in requests if not request.ok),
        wrong_lengths=wrong_lengths(requests),
        preemptions=None if preemptions is None else int(preemptions),
        prefix_hit_share=hits / queries if queries and hits is not None else None if hits is None else 0.0,
        figures=run_figures(requests, raw["duration"], slo, joules(samples, window)),
        notes={name: value for key, name in OFFLOAD_COUNTERS.items() if (value := change(key)) is not None},
    )
