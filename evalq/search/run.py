"""The search: damages by fake quantisation, allocations by a knapsack, proof by the engine, the last verdict on kept documents."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evalq.checkpoints import calibration_windows, source_folder
from evalq.config import QuantConfig, RunConfig
from evalq.errors import EXIT_MEASUREMENT, ConfigError
from evalq.facts.gpus import GpuFacts, gpu_facts
from evalq.facts.models import facts_of
from evalq.facts.options import OPTIONS, SIXTEEN_BIT, Option, options_of
from evalq.judge.complete import required_tasks
from evalq.judge.policy import checked_policy
from evalq.measure import data
from evalq.measure.launch import WORKER
from evalq.plan.allocation import Choice
from evalq.plan.memory import weight_bytes
from evalq.preparation import Prepared, baseline_scheme, prepare
from evalq.quantize.hashing import weights_hash
from evalq.quantize.sensitivity import Question, Sensitivity, sensitivity
from evalq.quantize.tensors import check_folder
from evalq.quantize.units import Unit, units_of
from evalq.report.progress import QuietWatcher
from evalq.search.candidates import (
    Candidate,
    allocations,
    candidate,
    choices,
    next_rung,
    uniform,
    unit_bytes,
    unit_seconds,
)
from evalq.search.kept import PASSED, KeptDocuments, read_series, require_writable
from evalq.search.last import Last, final_order, judge_last, kept_place, tell_earlier
from evalq.search.outcome import Outcome, Tried, remove_outcome, with_front, write_outcome
from evalq.search.proof import Bench, Proof, split_documents

IGNORE = ["lm_head", "re:.*[.]gate$", "re:.*[.]shared_expert_gate$"]


@dataclass
class State:
    """All that the steps of one search share."""

    cell: Prepared
    gpu: GpuFacts
    units: list[Unit]
    options: list[Option]
    left_out: dict[str, str]
    damages: Sensitivity
    table: list[list[Choice]]
    base: QuantConfig
    bench: Bench
    kept_file: Path  # notes of the last verdicts on this checkpoint and device
    gap: float = 0.0
    tried: list[Tried] = field(default_factory=list)
    proofs: dict[str, Proof] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        return self.cell.config

    def model_bytes(self, quant: QuantConfig) -> int:
        return weight_bytes(facts_of(self.config.model), quant, self.config.model.dtype)

    def prove(self, one: Candidate, is_uniform: bool = False) -> Proof:
        """Prove a candidate once and note it."""
        if one.name not in self.proofs:
            proof = self.bench.prove(one.quant)
            self.proofs[one.name] = proof
            counts = {option: one.options.count(option) for option in dict.fromkeys(one.options)}
            size = self.model_bytes(one.quant)
            self.tried.append(
                Tried(one.name, is_uniform, one.quant.kv_cache_dtype, size, one.cost, one.kld_nats, counts, proof)
            )
            self.bench.watcher.say(f"{one.name}: {proof.summary}")
        return self.proofs[one.name]


def search(
    config: RunConfig, watcher: QuietWatcher, out: Path | None = None, command: Sequence[str] = WORKER
) -> tuple[Outcome, Path]:
    """Search, and write the outcome into `out` or paths.root/search/NAME. Interrupted, the same command goes on.

    Errors: EvalqError before anything is proved; a candidate that cannot run is one that did not pass.
    """
    state = _prepare(config, watcher, command)
    folder = out or state.cell.places.root / "search" / f"{config.model.name}-{config.search.objective}"
    remove_outcome(folder)
    uniforms = [uniform(state.units, o, state.table, state.base, config.model.dtype) for o in state.options]
    smallest_uniform = _prove_uniforms(state, uniforms) if config.search.uniform else None
    rungs = _rungs(state, smallest_uniform)
    passing = [*_bisect(state, rungs), *([smallest_uniform] if smallest_uniform else [])]
    passing = _with_kv(state, passing)
    last = judge_last(
        state.bench, state.kept_file, final_order(passing, rungs, state.proofs), [one.proof for one in state.tried]
    )
    outcome = _outcome(state, last, smallest_uniform)
    write_outcome(folder, outcome, last.best.quant if last.best else None, state.units, state.damages)
    return outcome, folder


def _prepare(config: RunConfig, watcher: QuietWatcher, command: Sequence[str]) -> State:
    """Everything before the first engine start."""
    _refuse(config)
    base = dataclasses.replace(
        baseline_scheme(config), ignore=list(IGNORE), method=config.search.method, origin="checkpoint"
    )
    bench = Bench(config, split_documents(config), watcher, command)
    cell = prepare(dataclasses.replace(config, quant=baseline_scheme(config)))
    bench.config = dataclasses.replace(cell.config, quant=config.quant)
    gpu = gpu_facts(cell.config.gpu.name)
    options, left_out = options_of(config.search.options, gpu, config.search.method)
    watcher.cell(f"{config.model.name} search")
    source = source_folder(cell, watcher)
    kept_file = kept_place(cell, weights_hash(source))
    require_writable(kept_file)  # what is wrong with the notes is found now, not after the search
    tell_earlier(KeptDocuments(kept_file, read_series(kept_file)), bench, watcher)
    units = units_of(check_folder(source).values(), IGNORE)
    if not units:
        raise ConfigError(f"{source} has no layer that could be quantised; give a dense or mixture-of-experts model")
    damages = _sensitivity(cell, source, units, options, watcher)
    costs = _costs(cell.config, units, options, gpu)
    table = choices(units, options, damages, costs)
    return State(cell, gpu, units, options, left_out, damages, table, base, bench, kept_file)


def _refuse(config: RunConfig) -> None:
    """What a search cannot do whatever it finds. Errors: ConfigError."""
    problems = []
    if config.engine.load_format == "dummy":
        problems.append("engine.load_format=dummy has random weights and no quality to search by; leave it out")
    if config.gate.aa_floor:
        problems.append(
            "gate.aa_floor=true: a search measures no A/A floor of its documents; search with gate.aa_floor=false, and judge the "
            "recipe it finds by this gate: python -m evalq +quant=RECIPE"
        )
    found = data.find_sources(config)
    missing = [task for task in required_tasks(checked_policy(config.gate)) if task not in found]
    if missing:
        problems.append(
            f"the gate requires {', '.join(missing)}, which this search does not measure, so no last verdict could pass; switch "
            "them on, or name in gate.required_tasks=[...] what is to be judged"
        )
    if problems:
        raise ConfigError(*problems)


def _sensitivity(
    cell: Prepared, source: Path, units: list[Unit], options: list[Option], watcher: QuietWatcher
) -> Sensitivity:
    given = cell.config.search
    windows = calibration_windows(cell.config, source, given.sensitivity_samples, given.sensitivity_tokens)
    watcher.stage("sensitivity", f"sensitivity of {len(units)} groups of layers (fake quantisation)")
    question = Question(
        source, weights_hash(source), cell.config.model.dtype, units, options, windows, all_fake=not cell.is_cpu
    )
    return sensitivity(question, cell.places.root / "sensitivity", watcher.progress)


def _costs(config: RunConfig, units: list[Unit], options: list[Option], gpu: GpuFacts) -> dict[tuple[str, str], float]:
    """(unit, option) -> bytes, or seconds of a decoding step. Errors: ConfigError for a device without known rates."""
    dtype, by_time = config.model.dtype, config.search.objective == "throughput"
    if by_time and (gpu.bandwidth_bytes_per_second is None or gpu.bf16_per_second is None):
        raise ConfigError(
            f"search.objective=throughput needs a device with known rates, and {gpu.name} has none; use memory"
        )

    def cost(unit: Unit, option: Option | None) -> float:
        if by_time:
            return unit_seconds(unit, option, dtype, gpu, config.engine.max_num_seqs)
        return float(unit_bytes(unit, option, dtype))

    found = {(unit.name, SIXTEEN_BIT): cost(unit, None) for unit in units}
    return found | {(unit.name, option.name): cost(unit, option) for unit in units for option in options}


def _prove_uniforms(state: State, uniforms: list[Candidate]) -> Candidate | None:
    """The cheapest scheme with one option everywhere that passes; those that cost more are not measured."""
    for one in sorted(uniforms, key=lambda one: one.cost):
        if state.prove(one, is_uniform=True).passed:
            return one
    return None


def _rungs(state: State, smallest_uniform: Candidate | None) -> list[Candidate]:
    """Allocations cheaper than the best uniform scheme, from the most damaging to the gentlest."""
    config = state.config
    limit = smallest_uniform.cost if smallest_uniform else math.inf
    found = allocations(state.units, state.table, config.search.group_by == "kind")
    state.gap = max((one.gap for one in found), default=0.0)
    known = {one.options for one in found if len(set(one.options)) == 1}
    rungs: list[Candidate] = []
    for one in found:
        if one.options in known or one.cost >= limit:
            continue
        name = f"found-{len(rungs)}"
        rungs.append(candidate(name, state.units, one.options, state.table, state.base, config.model.dtype))
    return rungs


def _bisect(state: State, rungs: list[Candidate]) -> list[Candidate]:
    """Prove rungs until the cheapest that passes is known or the trials are over; those that passed, cheapest first.

    The first trial is where the added damages meet the target; each answer corrects the expectation.
    """
    target = math.log1p(checked_policy(state.config.gate).target)
    low, high, wanted = -1, len(rungs), target
    passed: list[Candidate] = []
    for _ in range(state.config.search.max_candidates):
        if high - low <= 1:
            break
        place = next_rung(rungs, low, high, wanted)
        proof = state.prove(rungs[place])
        if proof.passed:
            high = place
            passed.insert(0, rungs[place])
        else:
            low = place
        wanted = _expected(rungs[place], proof, target, wanted)
    return passed


def _expected(one: Candidate, proof: Proof, target: float, before: float) -> float:
    """Added damage at which the upper bound would meet the target, from what the engine said of one candidate."""
    estimate = proof.estimate
    if estimate is None or estimate.value is None or estimate.high is None or estimate.value <= -1:
        return before
    found, width = math.log1p(estimate.value), math.log1p(estimate.high) - math.log1p(estimate.value)
    if found <= 0 or one.kld_nats <= 0:
        return one.kld_nats * 1.5
    return max(one.kld_nats * (target - width) / found, one.kld_nats / 8)


def _with_kv(state: State, passing: list[Candidate]) -> list[Candidate]:
    """The cheapest candidate with each other KV dtype; one that passes goes before it."""
    found = list(passing)
    for dtype in state.config.search.kv_cache_dtypes if passing else []:
        best = passing[0]
        source = "default 1.0" if dtype.startswith(("fp8", "int8")) else "none"
        quant = dataclasses.replace(
            best.quant, name=f"{best.name}-{dtype.replace('_', '-')}", kv_cache_dtype=dtype, kv_scale_source=source
        )
        one = dataclasses.replace(best, name=quant.name, quant=quant)
        if state.prove(one).passed:
            found.insert(0, one)
    return found


def _outcome(state: State, last: Last, smallest_uniform: Candidate | None) -> Outcome:
    bench, config = state.bench, state.config
    best, final = last.best, last.proofs
    size = state.model_bytes(best.quant) if best else None
    base_size = state.model_bytes(baseline_scheme(config))
    summary = "no candidate passed on the search's documents" if not final else final[-1].summary
    if not final and last.exit_code == EXIT_MEASUREMENT:
        summary = f"no candidate could be measured; the first: {state.tried[0].proof.summary}"
    if best is not None and size is not None:
        passed = [proof for proof in final if proof.status == PASSED][-1]
        summary = f"{best.name}: {size / base_size:.1%} of the baseline's weight bytes; {passed.summary}"
    kinds = len({unit.kind for unit in state.units})
    cells = (len(state.options) + 1) ** kinds
    return Outcome(
        model=config.model.name,
        gpu=config.gpu.name,
        objective=config.search.objective,
        method=config.search.method,
        status=last.status,
        exit_code=last.exit_code,
        summary=summary,
        best=best.name if best else None,
        best_weight_bytes=size,
        baseline_weight_bytes=base_size,
        smallest_uniform=smallest_uniform.name if smallest_uniform else None,
        smallest_uniform_bytes=state.model_bytes(smallest_uniform.quant) if smallest_uniform else None,
        search_documents=bench.split.search,
        final_documents=bench.split.final,
        looks=list(bench.split.looks),
        final=final,
        final_number=last.number,
        final_confidence=last.confidence,
        tried=with_front(state.tried),
        left_out=state.left_out,
        engine_seconds=round(bench.engine_seconds, 1),
        sensitivity_seconds=state.damages.seconds,
        grid_cells=cells,
        grid_engine_seconds=round(cells * _full_cell_seconds(bench), 1),
        solver_gap=state.gap,
        notes=_notes(state),
    )


def _full_cell_seconds(bench: Bench) -> float:
    """What one cell over all documents costs: a mean start, and the mean time per document."""
    if not bench.start_seconds:
        return 0.0
    start = sum(bench.start_seconds) / len(bench.start_seconds)
    documents = sum(count for _, count in bench.score_seconds)
    each = sum(seconds for seconds, _ in bench.score_seconds) / max(1, documents)
    return start + each * (bench.split.search + bench.split.final)


def _notes(state: State) -> list[str]:
    found = sorted({damage.how for damage in state.damages.damages})
    notes = [f"Damages: {'; '.join(found)}; {state.damages.tokens} tokens on {state.damages.device}."]
    if state.bench.reused:
        notes.append(f"{state.bench.reused} stored records were used again and cost no engine time.")
    unknown = [name for name in state.config.search.options if name in OPTIONS and OPTIONS[name].calibrated_only]
    if unknown:
        notes.append(f"{', '.join(unknown)}: damages of the symmetric rounding stand in for theirs.")
    return notes


def outcome_json(outcome: Outcome, folder: Path) -> str:
    """The last line on standard output."""
    return json.dumps(
        {
            "exit_code": outcome.exit_code,
            "status": outcome.status,
            "best": outcome.best,
            "weight_bytes": outcome.best_weight_bytes,
            "baseline_weight_bytes": outcome.baseline_weight_bytes,
            "smallest_uniform": outcome.smallest_uniform,
            "smallest_uniform_bytes": outcome.smallest_uniform_bytes,
            "engine_seconds": outcome.engine_seconds,
            "grid_engine_seconds": outcome.grid_engine_seconds,
            "recipe": str(folder / f"{outcome.best}.yaml") if outcome.best else None,
            "folder": str(folder),
        }
    )
