"""The search on a simulated engine: it finds the cheapest rung that passes, and the last verdict is on unseen documents."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from last_cases import ONE_TASK, last_verdict, said
from search_cases import UNITS, table
from stub_worker import in_process, plan_command, starts

from evalq import pipeline, preparation
from evalq.cli import search as cli
from evalq.config import QuantConfig, RunConfig, config_hash
from evalq.errors import ConfigError, MeasurementError, RecordError
from evalq.facts.gpus import gpu_facts
from evalq.facts.options import OPTIONS
from evalq.judge.repeated import confidence_at
from evalq.records import Estimate, read_record
from evalq.report.progress import QuietWatcher
from evalq.search import last as last_module
from evalq.search import run as run_module
from evalq.search import search
from evalq.search.kept import KeptDocuments, Series, read_series
from evalq.search.outcome import Tried, recipe_yaml, with_front
from evalq.search.proof import Bench, Proof, split_documents


class Simulated(Bench):
    """An engine on which the increase is twice the added damage, give or take 0.2 %."""

    final_factor = 1.0
    seen: list[tuple[str, str]]

    def _answer(self, quant: QuantConfig, factor: float = 1.0) -> Proof:
        kld = sum(KLD[quant.name]) if quant.name in KLD else 0.0
        value, width = math.expm1(2 * kld) * factor, 0.002
        passed = value + width <= 0.01
        estimate = Estimate("word_perplexity_increase", value, value - width, value + width, 0.95, 30, "simulated")
        return Proof("PASS" if passed else "FAIL", passed, f"{value:.3%}", estimate, 30, 1, None, None)

    def prove(self, quant: QuantConfig) -> Proof:
        self.engine_seconds += 60
        self.start_seconds.append(30.0)
        self.score_seconds.append((30.0, self.split.search))
        return self._answer(quant)

    def verdict(self, quant: QuantConfig, kept: KeptDocuments, series: Series) -> Any:
        from evalq.judge.gate import no_verdict

        answer = self._answer(quant, Simulated.final_factor)
        key = self.candidate_key(quant)
        kept.begin(series, key)
        kept.settle(series, key, answer.status)
        confidence = confidence_at(self.config.gate.confidence, kept.level_of(series, key))
        made = no_verdict(["x"], dataclasses.replace(self.config.gate, confidence=confidence))
        exit_code = 0 if answer.passed else 1
        return answer, dataclasses.replace(made, status=answer.status, exit_code=exit_code)

    def candidate_key(self, quant: QuantConfig) -> str:
        return config_hash(self.final_config(dataclasses.replace(quant, name="candidate")))


KLD: dict[str, list[float]] = {}


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, cell_config: Any) -> Callable[..., RunConfig]:
    """A config whose search runs on the simulated engine."""
    from evalq.search import candidates

    rows, damages = table()
    KLD.clear()
    inner = candidates.candidate

    def noted(name: str, units: Any, chosen: Any, choice_rows: Any, *rest: Any) -> Any:
        made = inner(name, units, chosen, choice_rows, *rest)
        KLD[name] = [made.kld_nats]
        return made

    def prepared(config: RunConfig, watcher: QuietWatcher, command: Any) -> Any:
        bench = Simulated(config, split_documents(config), watcher, command)
        cell = preparation.prepare(dataclasses.replace(config, quant=preparation.baseline_scheme(config)))
        options = [OPTIONS[name] for name in ("int8", "int4_g32", "int4_g64", "int4_g128")]
        kept = last_module.kept_place(cell, "weights")
        base = QuantConfig(name="base", kv_cache_dtype="bfloat16", ignore=["lm_head"])
        return run_module.State(cell, gpu_facts("cpu"), UNITS, options, {"fp8": "no"}, damages, rows, base, bench, kept)

    monkeypatch.setattr(candidates, "RUNGS", 14)
    monkeypatch.setattr(run_module, "candidate", noted)
    monkeypatch.setattr(candidates, "candidate", noted)
    monkeypatch.setattr(run_module, "_prepare", prepared)
    monkeypatch.setattr(Simulated, "final_factor", 1.0)
    return lambda *overrides: cell_config("baseline", "tasks=perplexity", "gate.required_tasks=[wikitext]", *overrides)


def test_the_cheapest_rung_that_passes_is_found_and_is_smaller_than_the_best_uniform(
    simulated: Callable[..., RunConfig], tmp_path: Path
) -> None:
    outcome, folder = search(simulated(), QuietWatcher(), tmp_path / "out")
    assert (outcome.status, outcome.exit_code) == ("PASS", 0)
    assert outcome.smallest_uniform == "uniform-int8"
    assert outcome.best_weight_bytes is not None
    assert outcome.best_weight_bytes < outcome.smallest_uniform_bytes < outcome.baseline_weight_bytes  # type: ignore[operator]
    found = [one for one in outcome.tried if not one.uniform]
    assert len(found) <= 6
    best = next(one for one in found if one.name == outcome.best)
    assert 2 * best.kld_nats > 0.003  # not a timid one: the target leaves 0.008
    assert outcome.grid_cells == 5**4
    assert outcome.engine_seconds < outcome.grid_engine_seconds / 3
    for name in ("search.json", "search.md", "heat-int8.svg", f"{outcome.best}.yaml"):
        assert (folder / name).is_file()
    document = json.loads((folder / "search.json").read_text())
    assert len(document["heat_map"]["values"]["int8"]) == 30
    assert document["heat_map"]["how"]["int8"] == ["fake"]


def test_the_recipe_is_a_scheme_that_composes_to_the_same_candidate(
    simulated: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, folder = search(simulated(), QuietWatcher(), tmp_path / "out")
    recipe = yaml.safe_load((folder / f"{outcome.best}.yaml").read_text())
    assert recipe["defaults"] == ["base_quant", "_self_"]
    assert recipe["origin"] == "evalq"
    assert set(recipe["groups"]) <= set(OPTIONS)
    assert recipe["method"] == "rtn"


def test_a_final_failure_ends_the_order(simulated: Callable[..., RunConfig], tmp_path: Path) -> None:
    Simulated.final_factor = 50.0
    outcome, _ = search(simulated(), QuietWatcher(), tmp_path / "out")
    assert (outcome.status, outcome.exit_code, outcome.best) == ("FAIL", 1, None)
    assert len(outcome.final) == 1
    assert not (tmp_path / "out" / "found-0.yaml").exists()


@pytest.mark.parametrize(
    ("status", "ends"),
    [
        ("FAILED", (5, "INVALID")),
        ("INVALID", (5, "INVALID")),
        ("INCONCLUSIVE", (3, "INCONCLUSIVE")),
        ("FAIL", (1, "FAIL")),
    ],
)
def test_candidates_that_cannot_be_measured_are_no_quality_failure(
    simulated: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    ends: tuple[int, str],
) -> None:
    refused = Proof(status, False, "the engine refuses it", None, 0, None, None, None, "the engine refuses it")
    monkeypatch.setattr(Simulated, "_answer", lambda self, quant, factor=1.0: refused)
    outcome, _ = search(simulated(), QuietWatcher(), tmp_path / "out")
    assert (outcome.exit_code, outcome.status, outcome.best) == (*ends, None)
    if status == "FAILED":
        assert outcome.summary == "no candidate could be measured; the first: the engine refuses it"


def test_documents_are_divided_and_too_few_refused(cell_config: Any) -> None:
    split = split_documents(cell_config("baseline"))
    assert (split.search, split.final, split.looks) == (33, 33, (20, 22, 33))
    capped = split_documents(cell_config("baseline", "tasks.perplexity_limit=50", "search.looks=[21,25]"))
    assert (capped.search, capped.final, capped.looks) == (25, 25, (21, 25))
    with pytest.raises(ConfigError, match=r"30 documents give 15 to the search and 15 to the final verdict"):
        split_documents(cell_config("baseline", "tasks.perplexity_limit=30"))
    with pytest.raises(ConfigError, match="must rise and end at 33"):
        split_documents(cell_config("baseline", "search.looks=[20,30]"))


def test_the_bench_looks_in_turn_and_keeps_the_last_documents(
    tmp_path: Path, cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cell_config("w4a16", "gate.required_tasks=[wikitext]", "tasks=perplexity", "data=embedded")
    bad = {"act": "record", "increase": 0.2, "documents": 20}
    command = plan_command(tmp_path / "stub", {"act": "record", "documents": 20}, w4a16=bad)
    monkeypatch.setattr(pipeline, "run_worker", in_process(command))
    bench = Bench(config, split_documents(config), QuietWatcher(), command)
    proof = bench.prove(config.quant)
    assert (proof.status, proof.passed, proof.documents) == ("FAIL", False, 20)
    assert starts(tmp_path / "stub") == ["baseline", "w4a16"]
    bench.prove(config.quant)
    assert starts(tmp_path / "stub") == ["baseline", "w4a16"]  # both records are used again
    assert bench.reused == 2
    verdict = last_verdict(bench, tmp_path / "kept.json")[1]
    assert verdict is not None
    assert verdict.policy["confidence"] == pytest.approx(0.96)  # the first series has 0.8 of the error rate
    assert [list(one.verdicts.values()) for one in read_series(tmp_path / "kept.json")] == [["FAIL"]]
    kept = [
        yaml.safe_load((folder / "config.yaml").read_text())
        for folder in (tmp_path / "root" / "records").iterdir()
        if (folder / "config.yaml").is_file()
    ]
    froms = {(record["quant"]["name"], record["tasks"]["perplexity_from"]) for record in kept}
    assert froms == {("baseline", 0), ("w4a16", 0), ("baseline", 33), ("w4a16", 33)}


def test_a_baseline_that_fails_ends_the_search_and_a_candidate_that_fails_does_not(
    tmp_path: Path, cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cell_config("w4a16", "gate.required_tasks=[wikitext]", "tasks=perplexity", "data=embedded")
    dead = {"act": "fail", "kind": "engine", "message": "no scores"}
    for acts, raises in (({"w4a16": dead}, False), ({"baseline": dead}, True)):
        command = plan_command(tmp_path / str(raises), {"act": "record", "documents": 20}, **acts)
        monkeypatch.setattr(pipeline, "run_worker", in_process(command))
        own = dataclasses.replace(config, paths=dataclasses.replace(config.paths, root=str(tmp_path / f"root{raises}")))
        bench = Bench(own, split_documents(own), QuietWatcher(), command)
        if raises:
            with pytest.raises(MeasurementError, match="no scores"):
                bench.prove(own.quant)
        else:
            assert (bench.prove(own.quant).status, bench.prove(own.quant).error) == ("FAILED", "no scores")


def test_documents_left_out_are_another_measurement_and_none_is_the_old_one(cell_config: Any) -> None:
    plain, later = cell_config("w4a16"), cell_config("w4a16", "tasks.perplexity_from=3")
    assert config_hash(plain) != config_hash(later)
    assert read_record is not None


def tried(name: str, cost: float, value: float, width: float = 0.001) -> Tried:
    estimate = Estimate("increase", value, value - width, value + width, 0.95, 30, "m")
    proof = Proof("PASS", True, "", estimate, 30, None, None, None)
    return Tried(name, False, "bfloat16", int(cost), cost, 0.0, {}, proof)


def test_the_front_and_its_ties() -> None:
    found = with_front([tried("a", 10, 0.02), tried("b", 20, 0.005), tried("c", 21, 0.0055), tried("d", 30, 0.02)])
    assert [one.on_front for one in found] == [True, True, False, False]
    assert [one.tied_with for one in found] == ["", "", "b", "a"]


def test_the_command_line_prints_one_document(
    simulated: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = simulated()
    monkeypatch.setattr("evalq.app.compose", lambda overrides: config)
    assert cli.main(["+model=smollm2-135m", "--out", str(tmp_path / "out")]) == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["status"] == "PASS"
    assert Path(last["recipe"]).is_file()


def test_an_answer_of_an_earlier_search_does_not_stand_when_this_one_ends_otherwise(
    simulated: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, folder = search(simulated(), QuietWatcher(), tmp_path / "out")
    assert first.best is not None
    assert (folder / f"{first.best}.yaml").is_file()
    Simulated.final_factor = 50.0
    second, _ = search(simulated(), QuietWatcher(), tmp_path / "out")
    assert second.best is None
    assert not (folder / f"{first.best}.yaml").exists()
    assert "**FAIL**" in (folder / "search.md").read_text()

    def dies(self: Any, quant: QuantConfig) -> Proof:
        raise MeasurementError("the disk is full", "disk")

    monkeypatch.setattr(Simulated, "prove", dies)
    with pytest.raises(MeasurementError):
        search(simulated(), QuietWatcher(), tmp_path / "out")
    assert not (folder / "search.md").exists()


def test_a_text_on_both_sides_of_the_split_is_refused(cell_config: Any, tmp_path: Path) -> None:
    texts = [f"{i} " + "word " * 50 for i in range(33)]
    file = tmp_path / "doubled.jsonl"
    file.write_text("".join(json.dumps({"page": text}) + "\n" for text in texts * 2), encoding="utf-8")
    with pytest.raises(ConfigError, match="33 of the 33 documents kept for the last verdict are the same text"):
        split_documents(cell_config("baseline", "data=embedded", f"data.perplexity_file={file}"))


def test_a_second_search_on_the_same_kept_documents_is_held_to_more_and_the_same_search_is_not(
    simulated: Callable[..., RunConfig], tmp_path: Path
) -> None:
    def last(*overrides: str) -> tuple[int, float | None]:
        outcome, folder = search(simulated(*overrides), QuietWatcher(), tmp_path / "out")
        assert f"last verdict: {100 * (outcome.final_confidence or 0):g} %" in (folder / "search.md").read_text()
        return outcome.final_number, outcome.final_confidence

    Simulated.final_factor = 50.0  # every last verdict fails
    assert last() == (1, pytest.approx(0.96))
    assert last() == (1, pytest.approx(0.96))
    assert last("engine.seed=7") == (2, pytest.approx(0.995))
    assert last() == (1, pytest.approx(0.96))
    assert last("engine.seed=8") == (3, pytest.approx(0.9975))


def test_damaged_notes_of_last_verdicts_are_found_before_the_search_begins(
    cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cell_config("baseline", "tasks=perplexity", "gate.required_tasks=[wikitext]", "data=embedded")
    monkeypatch.setattr(run_module, "weights_hash", lambda folder: "weights")
    monkeypatch.setattr(run_module, "source_folder", lambda cell, watcher: no_checkpoint)
    file = last_module.kept_place(preparation.prepare(config), "weights")
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    with pytest.raises(RecordError, match="notes the last verdicts on the kept documents"):
        search(config, QuietWatcher())


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("engine.load_format=dummy", "random weights and no quality to search by"),
        ("gate.aa_floor=true", "measures no A/A floor of its documents"),
        ("gate.required_tasks=[wikitext,hellaswag]", "requires hellaswag, which this search does not measure"),
    ],
)
def test_what_no_search_can_do_is_refused_at_once(cell_config: Any, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        search(cell_config("baseline", *ONE_TASK, override), QuietWatcher())


def test_an_unknown_kv_dtype_is_refused_at_once(cell_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"search\.kv_cache_dtypes has 'bogus'"):
        cell_config("baseline", "search.kv_cache_dtypes=[bogus]")


def test_a_recipe_says_when_its_pass_had_a_warning(simulated: Callable[..., RunConfig], tmp_path: Path) -> None:
    outcome, _ = search(simulated(), QuietWatcher(), tmp_path / "out")
    warned = dataclasses.replace(outcome, final=[said("PASS", warned=True), said("FAIL")])
    assert "# Verdict  PASS with a warning" in recipe_yaml(QuantConfig(name="found-1"), warned)
    plain = dataclasses.replace(outcome, final=[said("PASS"), said("FAIL")])
    assert "# Verdict  PASS on" in recipe_yaml(QuantConfig(name="found-1"), plain)


def test_a_scheme_given_to_a_search_is_refused() -> None:
    for given in ("+quant=w4a16", "quant=w4a16", "quant.method=gptq"):
        with pytest.raises(ConfigError, match="the scheme is what a search looks for"):
            cli.main(["+model=smollm2-135m", given])
