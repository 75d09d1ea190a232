"""A cell before anything runs: its folders, its device, what the plan says of it, and every reason to refuse it."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from evalq.config import QuantConfig, RunConfig
from evalq.errors import ConfigError, InfeasibleError
from evalq.facts.gpus import detect, gpu_facts
from evalq.judge.seal import seal_key
from evalq.kvrecord import NEEDLE_ANSWER_TOKENS, is_quantised_kv
from evalq.measure import data


@dataclass(frozen=True)
class Places:
    """Absolute folders of a run."""

    root: Path
    records: Path
    checkpoints: Path
    models: Path


@dataclass(frozen=True)
class Prepared:
    """A checked cell and all that is known before anything runs."""

    config: RunConfig
    places: Places
    is_cpu: bool
    device: str  # exact device name
    sources: dict[str, data.Source]
    warnings: list[str]
    predicted: dict[str, int | None]

    @property
    def name(self) -> str:
        return f"{self.config.model.name} {self.config.quant.name}"

    @property
    def is_baseline(self) -> bool:
        return effective_scheme(self.config.quant) == effective_scheme(baseline_scheme(self.config))


def places_of(config: RunConfig) -> Places:
    """Absolute folders; relative ones are relative to paths.root."""
    root = Path(config.paths.root).expanduser().absolute()
    return Places(
        root, *(root / part for part in (config.paths.records, config.paths.checkpoints, config.paths.models))
    )


def prepare(config: RunConfig, elsewhere: bool = False) -> Prepared:
    """Everything that can refuse the cell before anything runs; `elsewhere`: it will run on another machine than this one.

    Errors: ConfigError, InfeasibleError.
    """
    from evalq.facts.kv_dtypes import require_offered
    from evalq.facts.models import facts_of
    from evalq.judge.complete import required_tasks
    from evalq.judge.policy import checked_policy
    from evalq.plan.feasibility import require_feasible
    from evalq.plan.memory import predict_ledger
    from evalq.plan.settings import with_needs

    seal_key()  # a key that cannot be used is said before anything is measured
    policy = checked_policy(config.gate)
    _check_lengths(config)
    sources = data.find_sources(config)
    unmeasured = [task for task in required_tasks(policy) if task not in sources]
    warnings = [str(violation) for violation in require_feasible(config)]
    if unmeasured:
        warnings.append(
            f"the gate requires {', '.join(unmeasured)}, which this run does not measure, so no verdict can pass; "
            "switch them on, or name in gate.required_tasks=[...] what is to be judged"
        )
    here = detect()
    warnings += _kv_advice(config)
    name = here if config.gpu.name == "auto" else config.gpu.name
    resolved = dataclasses.replace(config, gpu=dataclasses.replace(config.gpu, name=name))
    resolved = with_needs(resolved, facts_of(config.model), gpu_facts(name))
    if name != here and not elsewhere:
        raise InfeasibleError(
            f"gpu={name} was asked for and this machine has {here}; run it there, or plan it with: "
            f"evalq plan +model={config.model.name} +quant={config.quant.name} +gpu={name}"
        )
    require_offered(config.quant.kv_cache_dtype, config.model.dtype, name == "cpu")
    return Prepared(
        resolved,
        places_of(config),
        name == "cpu",
        device_name(name) if name == here else name,
        sources,
        warnings,
        predict_ledger(resolved),
    )


def _kv_advice(config: RunConfig) -> list[str]:
    if not is_quantised_kv(config.quant.kv_cache_dtype) or config.kv.decode or not config.tasks.perplexity:
        return []
    return [
        f"scheme {config.quant.name} quantises the KV cache and is judged by prefill scores alone; "
        "add kv=decode to score the decode path too"
    ]


def _check_lengths(config: RunConfig) -> None:
    """Every sequence of the run must fit the engine, before the first of them is scored. Errors: ConfigError."""
    from evalq.facts.models import facts_of
    from evalq.measure.engine import MARGIN_TOKENS
    from evalq.measure.load import longest_request

    tasks, load = config.tasks, config.load
    on_scoring_start = load.enabled and load.start == "scoring"
    wanted = {
        "tasks.perplexity_window": tasks.perplexity_window + 1,  # the engine generates one token after what it scores
        "tasks.choice_window": tasks.choice_window + 1,
        **_kv_lengths(config),
        "load.input_tokens + load.output_tokens": longest_request(config) if on_scoring_start else 0,
    }
    length = config.engine.max_model_len or max(tasks.perplexity_window, tasks.choice_window) + MARGIN_TOKENS
    problems = [
        f"{name} needs {count} tokens and the engine's length is {length}; set engine.max_model_len={max(wanted.values())} or more"
        for name, count in wanted.items()
        if count > length
    ]
    served, positions = longest_request(config), facts_of(config.model).max_positions
    longest = min(filter(None, (config.engine.max_model_len, positions)), default=served)
    if load.enabled and not on_scoring_start and served > longest:
        problems.append(
            f"load {load.name} has requests of {served} tokens and the longest that {config.model.name} takes here is "
            f"{longest}; lower load.input_tokens"
        )
    if problems:
        raise ConfigError(*problems)


def _kv_lengths(config: RunConfig) -> dict[str, int]:
    """Tokens that the KV measurements need, with what they generate; a window that follows the engine's needs none."""
    kv = config.kv
    wanted = {}
    if kv.long and kv.long_tokens:
        wanted["kv.long_tokens"] = kv.long_tokens + 1
    if kv.needle:
        wanted["kv.needle_lengths"] = max(kv.needle_lengths, default=0) + NEEDLE_ANSWER_TOKENS
    if kv.generation:
        wanted["kv.generation_prompt_tokens + kv.generation_tokens"] = (
            kv.generation_prompt_tokens + kv.generation_tokens
        )
    return wanted


def baseline_scheme(config: RunConfig) -> QuantConfig:
    """The yardstick: the checkpoint as it is, with a KV cache of the model's own dtype (as conf/quant/baseline.yaml)."""
    kv_dtype = config.model.dtype if config.model.dtype in ("bfloat16", "float16") else "bfloat16"
    return QuantConfig(name="baseline", origin="checkpoint", kv_cache_dtype=kv_dtype, kv_scale_source="none")


def effective_scheme(quant: QuantConfig) -> str:
    """What a scheme does, without its names: equal text = the same scheme."""
    content = dataclasses.asdict(quant)
    silent = ["name", "notes", "needs"]
    if quant.origin != "evalq":
        silent += ["method", "clip_search"]
    if quant.origin == "checkpoint" and not quant.groups:
        silent.append("ignore")
    if quant.kv_cache_dtype in ("bfloat16", "float16"):
        silent.append("kv_scale_source")  # a 16-bit KV cache has no scales
    for key in silent:
        content.pop(key)
    groups = content.pop("groups")
    return json.dumps([content, sorted(json.dumps(group, sort_keys=True) for group in groups.values())], sort_keys=True)


def as_baseline(cell: Prepared) -> Prepared:
    """The baseline that this cell is compared with: equal in all but the scheme."""
    from evalq.plan.memory import predict_ledger

    config = dataclasses.replace(cell.config, quant=baseline_scheme(cell.config))
    return dataclasses.replace(cell, config=config, predicted=predict_ledger(config))


def device_name(gpu: str) -> str:
    """The exact device name: the driver's for a GPU, the processor's model for the CPU engine."""
    if gpu == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        except (OSError, StopIteration):
            return platform.processor() or platform.machine()
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return answer.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return gpu


def is_dummy(cell: Prepared) -> bool:
    """Random weights of the right shapes: memory and speed only."""
    return cell.config.engine.load_format == "dummy"
