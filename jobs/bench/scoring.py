"""How fast one engine scores: plain prefill, evalq's scorer, exact divergence, prompt_logprobs, and lm-eval's own loop.

    python jobs/bench/scoring.py +model=smollm2-135m +quant=baseline data=local --out reports/scoring.md
    python jobs/bench/scoring.py +model=llama3-8b +quant=fp8-weights engine.load_format=dummy --synthetic 64 --exact

One engine start. Every way is run `--repeats` times in turn (A B C A B C) after one warm-up, and the median is shown with the
lowest and highest. Plain is the same requests with max_tokens=1 and no log-probabilities: what the engine could do at best.
The prefix cache is emptied before every run. lm-eval's loop is lm-eval's own vLLM model class on this same engine, on
`--harness-limit` items, because it is slow; its rate is per second all the same. Needs the extras cpu or gpu.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.metadata
import io
import json
import platform
import pstats
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Rate = tuple[float, float, float]  # median, lowest, highest


@dataclass
class Row:
    """One way over one set of requests."""

    work: str
    way: str
    requests: int
    tokens: int  # prompt tokens of the requests, each counted once
    seconds: list[float]

    def per_second(self, count: int) -> Rate:
        rates = [count / s for s in self.seconds]
        return statistics.median(rates), min(rates), max(rates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", help="as for python -m evalq")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way (default 3)")
    parser.add_argument(
        "--tasks", default="wikitext,hellaswag,truthfulqa", help="which of wikitext,hellaswag,truthfulqa"
    )
    parser.add_argument("--synthetic", type=int, default=0, help="windows of random tokens in place of the tasks")
    parser.add_argument(
        "--exact", action="store_true", help="also keep hidden states and compare with them (on wikitext)"
    )
    parser.add_argument("--flat", action="store_true", help="also the engine's own prompt_logprobs, once")
    parser.add_argument(
        "--harness-limit", type=int, default=0, help="items for lm-eval's own loop (default 0: not run)"
    )
    parser.add_argument("--profile", type=Path, help="write a profile of one scoring run of each set to this file")
    parser.add_argument("--out", type=Path, help="Markdown file; the table is printed all the same")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was measured until then is printed
    bench = Bench(arguments)
    try:
        bench.run()
    finally:
        print(bench.table(), flush=True)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(bench.table(), encoding="utf-8")
            arguments.out.with_suffix(".json").write_text(
                json.dumps([vars(row) for row in bench.rows]), encoding="utf-8"
            )
    return 0


class Bench:
    """One engine and what was measured on it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from evalq.app import compose
        from evalq.checkpoints import cell_checkpoint, source_folder
        from evalq.measure.engine import Engine
        from evalq.preparation import prepare

        self.arguments = arguments
        self.rows: list[Row] = []
        self.notes: list[str] = []
        cell = prepare(compose(arguments.overrides))
        self.config, self.cell = cell.config, cell
        self.watcher = Silent()
        source = source_folder(cell, self.watcher)
        checkpoint = cell_checkpoint(cell, source, self.watcher)
        window = max(self.config.tasks.perplexity_window, self.config.tasks.choice_window)
        self.engine = Engine.start(self.config, checkpoint, window, cell.is_cpu)
        print(f"engine up in {self.engine.start_seconds:.1f} s, scorer {self.engine.scorer}", flush=True)

    def run(self) -> None:
        for name, requests in self.sets().items():
            self.measure(name, requests)
            if self.arguments.harness_limit and name in ("hellaswag", "truthfulqa"):
                self.harness(name)

    def sets(self) -> dict[str, list[Any]]:
        """Requests by name, as the tasks make them; each sequence once."""
        from evalq.measure.scores import ScoreRequest

        if self.arguments.synthetic:
            draw = np.random.default_rng(0)
            window = self.config.tasks.perplexity_window
            ids = draw.integers(10, self.engine.vocabulary - 10, (self.arguments.synthetic, window + 1)).tolist()
            return {f"{len(ids)} windows of {window} random tokens": [ScoreRequest(one[:window], 1) for one in ids]}
        return {name: self.requests_of(name) for name in self.arguments.tasks.split(",")}

    def requests_of(self, group: str) -> list[Any]:
        """What evalq scores for a group, caught on its way to the engine; wall time of the rest is printed."""
        catcher = Catcher(self.engine)
        began = time.monotonic()
        self.run_tasks(group, catcher, None)
        print(
            f"{group}: lm-eval's own work around {len(catcher.caught)} sequences {time.monotonic() - began:.2f} s",
            flush=True,
        )
        self.notes.append(
            f"{group}: loading, tokenising and lm-eval's own bookkeeping around the scoring took {time.monotonic() - began:.2f} s"
        )
        return catcher.caught

    def run_tasks(self, group: str, engine: Any, limit: int | None, lm: Any = None) -> float:
        from evalq.measure.tasks import EngineLM, run_tasks

        tasks = self.loaded(group)
        config = self.config
        model = lm or EngineLM(engine, config.model.bos, config.tasks.perplexity_window, config.tasks.choice_window)
        limits = {"wikitext": config.tasks.perplexity_limit, "hellaswag": config.tasks.hellaswag_limit}
        own = limits.get(group, config.tasks.truthfulqa_limit)
        return run_tasks(model, tasks, limit or own)[1]

    def loaded(self, group: str) -> dict[str, Any]:
        from evalq.measure import data
        from evalq.measure.tasks import load_tasks

        wanted = (data.MC1, data.MC2) if group == "truthfulqa" else (group,)
        sources = {name: source for name, source in data.find_sources(self.config).items() if name in wanted}
        return load_tasks({name: data.task_overrides(source, self.config.data) for name, source in sources.items()})

    def measure(self, name: str, requests: list[Any]) -> None:
        ways: dict[str, Callable[[], Any]] = {
            "plain (no log-probabilities)": lambda: self.plain(requests),
            "evalq": lambda: self.engine.score(requests, share_prefixes=True),
        }
        if self.arguments.exact and ("wikitext" in name or "windows" in name):
            folder = Path(tempfile.mkdtemp(prefix="evalq-hidden-"))
            ways["evalq, keeping hidden states"] = lambda: self.exact(requests, folder, compare=False)
            ways["evalq, exact divergence"] = lambda: self.exact(requests, folder, compare=True)
        for way in ways.values():  # warm-up: kernels are built, memory is taken
            self.fresh()
            way()
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(self.arguments.repeats):
            for way, call in ways.items():
                self.fresh()
                began = time.monotonic()
                call()
                seconds[way].append(time.monotonic() - began)
        if self.arguments.flat:
            self.fresh()
            began = time.monotonic()
            self.engine.scorer = "prompt_logprobs"
            self.engine.score(requests)
            self.engine.scorer = "hook"
            seconds["prompt_logprobs"] = [time.monotonic() - began]
        tokens = sum(len(request.ids) for request in requests)
        self.rows += [Row(name, way, len(requests), tokens, found) for way, found in seconds.items()]
        print(self.table(), flush=True)
        if self.arguments.profile:
            self.profile(name, ways)
        self.memory(name, ways)

    def fresh(self) -> None:
        self.engine.reset_prefix_cache()

    def plain(self, requests: Sequence[Any]) -> None:
        """The same prompts, one token each, nothing scored; prefixes shared as the engine would by itself."""
        params = [self.engine._params() for _ in requests]
        self.engine._run([request.ids for request in requests], params, None)

    def exact(self, requests: list[Any], folder: Path, compare: bool) -> None:
        from evalq.measure.divergence import ExactDivergence

        limit = round(self.config.tasks.divergence_store_gib * 2**30)
        part = ExactDivergence(folder / "store", compare, limit, None, lambda text: None)
        use = part.begin(self.engine, requests)
        results = self.engine.score(requests, hidden=use)
        part.finish(self.engine)
        if compare:
            if part.note or results[0].divergence is None:
                raise SystemExit(part.note or "no divergence came back")
            worst = max(float(np.nanmax(r.divergence.kld)) for r in results)
            text = f"divergence of the model from itself: largest {worst:.2g} nats a token"
            if text not in self.notes:
                self.notes.append(text)

    def memory(self, name: str, ways: dict[str, Callable[[], Any]]) -> None:
        """Device memory of each way above plain, from the allocator's peak."""
        import torch

        if not torch.cuda.is_available():
            return
        peaks = {}
        for way, call in ways.items():
            self.fresh()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            call()
            peaks[way] = torch.cuda.max_memory_allocated()
        plain = next(iter(peaks.values()))
        text = ", ".join(f"{way} {(peak - plain) / 2**30:+.2f} GiB" for way, peak in list(peaks.items())[1:])
        self.notes.append(f"{name}: peak device memory against plain: {text}")

    def profile(self, name: str, ways: dict[str, Callable[[], Any]]) -> None:
        """Where the time goes in Python and, on a GPU, in its kernels."""
        import torch

        for way in ("plain (no log-probabilities)", "evalq"):
            if torch.cuda.is_available():
                self.fresh()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as kernels:
                    ways[way]()
                table = kernels.key_averages().table(sort_by="self_device_time_total", row_limit=16)
                with open(self.arguments.profile, "a", encoding="utf-8") as file:
                    file.write(f"\n===== {name}, {way}: kernels\n{table}\n")
            self.fresh()
            watch = cProfile.Profile()
            watch.runcall(ways[way])
            stream = io.StringIO()
            pstats.Stats(watch, stream=stream).sort_stats("tottime").print_stats(28)
            with open(self.arguments.profile, "a", encoding="utf-8") as file:
                file.write(f"\n===== {name}, {way}\n{stream.getvalue()}")

    def harness(self, group: str) -> None:
        """lm-eval's own vLLM model class on this engine."""
        own = lm_evals_own(self.engine, self.config)
        self.fresh()
        seconds = self.run_tasks(group, self.engine, self.arguments.harness_limit, own)
        items = self.arguments.harness_limit
        self.rows.append(Row(group, f"lm-eval's own loop, {items} items, all of it", items, 0, [seconds]))
        self.fresh()
        from evalq.measure.tasks import EngineLM

        tasks = self.config.tasks
        ours = EngineLM(
            self.engine, self.config.model.bos, tasks.perplexity_window, tasks.choice_window, share_prefixes=True
        )
        seconds = self.run_tasks(group, self.engine, None, ours)
        items = len(next(iter(self.loaded(group).values())).eval_docs)
        limit = tasks.hellaswag_limit if group == "hellaswag" else tasks.truthfulqa_limit
        items = min(items, limit or items)
        self.rows.append(Row(group, f"evalq, {items} items, all of it", items, 0, [seconds]))

    def table(self) -> str:
        lines = [
            f"# Scoring: {self.config.model.name}, {self.config.quant.name}, {self.cell.device}",
            "",
            f"{time.strftime('%Y-%m-%d')}. {versions()}. Engine: {self.config.engine.name}"
            f"{' (eager)' if self.config.engine.enforce_eager else ''}, "
            f"{self.config.engine.max_num_batched_tokens:,} batched tokens, {self.config.engine.max_num_seqs} sequences.",
            "",
            f"    python jobs/bench/scoring.py {' '.join(sys.argv[1:])}",
            "",
            "| work | way | sequences | per second (lowest to highest) | prompt tokens/s | of plain |",
            "|---|---|---:|---:|---:|---:|",
        ]
        plain = {row.work: row.per_second(1)[0] for row in self.rows if row.way.startswith("plain")}
        for row in self.rows:
            rate, low, high = row.per_second(row.requests)
            share = f"{100 * row.per_second(1)[0] / plain[row.work]:.0f} %" if row.tokens and row.work in plain else ""
            unit = "" if row.tokens else " items"
            tokens = f"{row.per_second(row.tokens)[0]:,.0f}" if row.tokens else ""
            spread = f"{rate:,.1f}{unit} ({low:,.1f} to {high:,.1f})"
            lines.append(f"| {row.work} | {row.way} | {row.requests:,} | {spread} | {tokens} | {share} |")
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes), ""])


class Catcher:
    """Takes the requests that would be scored and answers with zeros."""

    def __init__(self, engine: Any) -> None:
        self.tokenizer = engine.tokenizer
        self.caught: list[Any] = []

    def score(self, requests: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
        from evalq.measure.scores import ScoreResult

        self.caught.extend(requests)
        counts = [len(request.ids) - request.first for request in requests]
        return [ScoreResult(np.zeros(n, np.float32), np.zeros(n, np.int32), np.zeros(n, np.float32)) for n in counts]


class Silent:
    """A watcher that says nothing."""

    def stage(self, *_: Any) -> None: ...

    def progress(self, *_: Any) -> None: ...

    def say(self, *_: Any) -> None: ...


def lm_evals_own(engine: Any, config: Any) -> Any:
    """lm-eval's own vLLM model class on our engine. It asks for the version of a distribution vllm, which a CPU build is not."""
    real, installed = importlib.metadata.version, engine_version()
    importlib.metadata.version = lambda name: installed if name == "vllm" else real(name)
    from lm_eval.api.model import LM
    from lm_eval.models.vllm_causallms import VLLM

    own = VLLM.__new__(VLLM)
    LM.__init__(own)
    own.model, own.tokenizer = engine._llm, engine.tokenizer
    own._max_length = config.tasks.choice_window + 1
    own.batch_size, own.data_parallel_size = "auto", 1
    own.add_bos_token, own.custom_prefix_token_id = False, None
    own.lora_request, own.enable_thinking = None, False
    return own


def engine_version() -> str:
    from evalq.measure.environment import engine_version as installed

    return installed()


def versions() -> str:
    import torch

    return f"vllm {engine_version()}, torch {torch.__version__}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
