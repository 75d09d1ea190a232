"""Last verdicts: their order, what counts as a look at the kept documents, and what is a second chance."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from last_cases import BAD, GOOD, ONE_TASK, last_verdict, named, said, stub_bench

from evalq import identity, pipeline, preparation
from evalq.config import GateConfig, QuantConfig
from evalq.errors import ConfigError, MeasurementError
from evalq.report.progress import QuietWatcher
from evalq.search import last as last_module
from evalq.search import proof as proof_module
from evalq.search.kept import KeptDocuments, Series, kept_documents, read_series
from evalq.search.last import final_order, judge_last
from evalq.search.proof import Bench, split_documents


def test_last_verdicts_go_from_gentle_to_small_and_warned_ones_come_last() -> None:
    rungs = [named(f"found-{i}", 10.0 * i) for i in range(6)]
    proofs = {
        "found-1": said("PASS", warned=True),
        "found-2": said("PASS", warned=True),
        "found-3": said("PASS"),
        "found-4": said("PASS"),
        "found-5": said("PASS"),
        "found-0": said("FAIL"),
    }
    order = final_order([rungs[3], rungs[4], rungs[5]], rungs, proofs)
    assert [one.name for one in order] == ["found-4", "found-3", "found-2", "found-1"]
    assert [one.name for one in final_order([], rungs, {"found-1": said("PASS", warned=True)})] == ["found-1"]
    assert final_order([], rungs, {"found-1": said("FAIL")}) == []


@pytest.mark.parametrize("fails_at", [1, 2, 3, 9])
def test_the_last_that_passed_in_the_order_is_the_answer(fails_at: int, tmp_path: Path) -> None:
    from evalq.judge.gate import no_verdict

    order = [named(f"found-{i}", i) for i in (4, 3, 2, 1)]
    asked: list[str] = []

    class Judge:
        split = SimpleNamespace(final=30)
        watcher = QuietWatcher()
        config = SimpleNamespace(gate=GateConfig())

        def kept_items(self) -> list[str]:
            return ["one", "two"]

        def candidate_key(self, quant: QuantConfig) -> str:
            return quant.name

        def verdict(self, quant: QuantConfig, kept: KeptDocuments, series: Series) -> Any:
            asked.append(quant.name)
            passed = len(asked) != fails_at
            status, code = ("PASS", 0) if passed else ("INCONCLUSIVE", 3)
            return said(status), dataclasses.replace(no_verdict(["x"], GateConfig()), status=status, exit_code=code)

    found = judge_last(Judge(), tmp_path / "kept.json", order, [])  # type: ignore[arg-type]
    names = {1: None, 2: "found-4", 3: "found-3", 9: "found-1"}
    assert (found.best.name if found.best else None) == names[fails_at]
    assert len(asked) == len(found.proofs) == min(fails_at, 4)
    assert (found.exit_code, found.status) == ((0, "PASS") if found.best else (3, "INCONCLUSIVE"))


def test_a_candidate_that_failed_does_not_pass_when_it_is_measured_anew(
    tmp_path: Path, cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cell_config("w4a16", *ONE_TASK)
    first, _ = last_verdict(stub_bench(config, tmp_path / "a", monkeypatch, w4a16=BAD), tmp_path / "kept.json")
    assert first.status == "FAIL"
    shutil.rmtree(tmp_path / "root" / "records")
    proof, verdict = last_verdict(stub_bench(config, tmp_path / "b", monkeypatch, w4a16=GOOD), tmp_path / "kept.json")
    assert (proof.status, proof.passed, verdict.exit_code) == ("FAIL", False, 1)
    assert "an earlier measurement of this candidate on these documents ended so" in verdict.summary
    assert [list(one.verdicts.values()) for one in read_series(tmp_path / "kept.json")] == [["FAIL"]]


def test_out_of_memory_after_a_failure_does_not_make_the_look_undone(
    tmp_path: Path, cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cell_config("w4a16", *ONE_TASK)
    last_verdict(stub_bench(config, tmp_path / "a", monkeypatch, w4a16=BAD), tmp_path / "kept.json")
    shutil.rmtree(tmp_path / "root" / "records")
    oom = {"act": "fail", "kind": "oom", "message": "no room"}
    proof, verdict = last_verdict(stub_bench(config, tmp_path / "b", monkeypatch, w4a16=oom), tmp_path / "kept.json")
    assert (proof.status, verdict) == ("FAILED", None)
    assert [list(one.verdicts.values()) for one in read_series(tmp_path / "kept.json")] == [["FAIL"]]


def test_an_invalid_verdict_that_shows_an_interval_is_a_look(
    tmp_path: Path, cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cell_config("w4a16", *ONE_TASK, 'gate.conditions=["output_tokens_per_second@7 >= 97%"]')
    proof, _ = last_verdict(stub_bench(config, tmp_path / "a", monkeypatch, w4a16=BAD), tmp_path / "kept.json")
    assert proof.status == "INVALID"
    assert proof.estimate is not None
    assert [list(one.verdicts.values()) for one in read_series(tmp_path / "kept.json")] == [["INVALID"]]


def test_a_verdict_that_shows_nothing_is_no_look_and_undoes_none(
    tmp_path: Path, cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INVALID before anything was compared: no interval in any file, so nothing is spent; a look of before stays."""
    config = cell_config("w4a16", "gate.required_tasks=[wikitext,gsm8k]", "tasks=perplexity", "data=embedded")
    bench = stub_bench(config, tmp_path / "a", monkeypatch)
    proof, verdict = last_verdict(bench, tmp_path / "kept.json")
    assert (proof.status, verdict.checks) == ("INVALID", [])
    assert not (tmp_path / "kept.json").exists() or read_series(tmp_path / "kept.json") == []
    assert not list((tmp_path / "root" / "records").glob("*/estimates.json"))
    with kept_documents(tmp_path / "kept.json") as notes:
        series = notes.open([bench.candidate_key(config.quant)], bench.kept_items(), "policy")
        notes.begin(series, bench.candidate_key(config.quant))  # killed while it judged
    last_verdict(bench, tmp_path / "kept.json")
    assert [list(one.verdicts.values()) for one in read_series(tmp_path / "kept.json")] == [["begun"]]


def test_no_score_of_the_kept_documents_is_shown_and_those_of_the_search_are(
    tmp_path: Path, cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Listening(QuietWatcher):
        def __init__(self) -> None:
            self.labels: list[str] = []
            self.scores: list[str] = []

        def scored(self, group: str, metrics: dict[str, Any]) -> None:
            self.scores.append(group)

        def stage(self, stage: str, label: str) -> None:
            self.labels.append(label)

    def scoring(cell: Any, watcher: QuietWatcher, *rest: Any, **more: Any) -> Any:
        watcher.stage("score", "scoring")
        watcher.scored("wikitext", {"wikitext": {"word_perplexity": 30.0}})
        return pipeline.measure(cell, watcher, *rest, **more)

    watcher = Listening()
    config = cell_config("w4a16", *ONE_TASK)
    bench = stub_bench(config, tmp_path / "a", monkeypatch, watcher)
    monkeypatch.setattr(proof_module, "measure", scoring)
    last_verdict(bench, tmp_path / "kept.json")
    assert watcher.scores == []
    assert watcher.labels.count("scoring") == 2  # baseline and candidate: how far it is can be seen
    bench.prove(config.quant)
    assert watcher.scores


def test_data_that_change_while_the_search_runs_end_it(
    tmp_path: Path, cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pages.jsonl"
    pages = [json.dumps({"page": f"page {i} " + "word " * 50}) + "\n" for i in range(66)]
    file.write_text("".join(pages), encoding="utf-8")
    config = cell_config("w4a16", *ONE_TASK, f"data.perplexity_file={file}")
    bench = stub_bench(config, tmp_path / "a", monkeypatch)
    file.write_text("".join(pages[33:] + pages[:33]), encoding="utf-8")
    with pytest.raises(MeasurementError, match="changed while the search ran"):
        last_verdict(bench, tmp_path / "kept.json")


def test_the_items_of_a_task_whose_margin_gates_are_kept_items_too(cell_config: Any) -> None:
    alone, with_margin = (
        Bench(config, split_documents(config), QuietWatcher()).kept_items()
        for config in (cell_config("w4a16"), cell_config("w4a16", "gate.required_margins=[hellaswag]"))
    )
    assert len(with_margin) == len(alone) + 1
    assert with_margin[-1].startswith("hellaswag ")


def test_another_calibration_text_is_another_candidate_and_another_name_is_not(
    cell_config: Any, tmp_path: Path, no_checkpoint: Path
) -> None:
    file = tmp_path / "text.jsonl"
    overrides = (
        "quant.method=gptq",
        "calibration.source=local",
        f"calibration.file={file}",
        "calibration.columns=[text]",
    )

    def key(text: str, name: str = "w4a16", *more: str) -> str:
        file.write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
        config = cell_config("w4a16", "data=embedded", *overrides, *more)
        bench = Bench(config, split_documents(config), QuietWatcher())
        return bench.candidate_key(dataclasses.replace(config.quant, name=name))

    first = key("one text about ships")
    assert key("one text about ships", "found-7") == first
    assert key("another text about bread") != first
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(identity, "installed_versions", lambda: {"vllm": "99"})
        assert key("one text about ships") != first


def test_the_notes_know_a_checkpoint_by_its_weights_and_device(cell_config: Any) -> None:
    cell, renamed = (preparation.prepare(cell_config("baseline", *given)) for given in ((), ("model.name=another",)))
    assert last_module.kept_place(cell, "weights") == last_module.kept_place(renamed, "weights")
    assert last_module.kept_place(cell, "weights") != last_module.kept_place(cell, "other weights")


def test_documents_that_are_used_up_are_refused_before_anything_runs(cell_config: Any, tmp_path: Path) -> None:
    config = cell_config("baseline", *ONE_TASK)
    bench = Bench(config, split_documents(config), QuietWatcher())
    with kept_documents(tmp_path / "kept.json") as notes:
        for n in range(11):
            series = notes.open([str(n)], bench.kept_items(), "policy")
            notes.begin(series, str(n))
            notes.settle(series, str(n), "FAIL")
        with pytest.raises(ConfigError, match="have given 11 series"):
            last_module.tell_earlier(notes, bench, QuietWatcher())
