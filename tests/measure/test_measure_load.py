"""The load on the scoring start, with an engine that only counts; and how a result looks in short."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from load_builder import level, result

from evalq.config import RunConfig
from evalq.loads.results import LoadResult
from evalq.measure.load import (
    first_token_seconds,
    levels_to_run,
    longest_request,
    measure_offline,
    short_loads,
    trace_file,
)


class Generator:
    """What measure_offline needs of an engine."""

    start_kind, start_seconds = "eager", 12.0

    def __init__(self, length: int = 8, cached: int = 0, vocabulary: int = 1000) -> None:
        self.length, self.cached, self.vocabulary = length, cached, vocabulary
        self.calls: list[list[list[int]]] = []
        self.resets = 0

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def preemptions(self) -> int:
        return len(self.calls) // 4

    def settings(self) -> dict[str, int]:
        return {"max_num_seqs": 64, "max_num_batched_tokens": 4096}

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Any:
        assert ignore_eos
        self.calls.append(prompts)
        output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * self.length)], num_cached_tokens=self.cached)
        return [output] * len(prompts), [0.001] * len(prompts)


@pytest.fixture
def config(cell_config: Any) -> RunConfig:
    sizes = ("load.requests=6", "load.input_tokens=10", "load.output_tokens=8", "load.warmup_requests=2")
    made: RunConfig = cell_config("baseline", *sizes)
    return made


def run(generator: Generator, config: RunConfig, folder: Path) -> LoadResult:
    return measure_offline(generator, config, folder, "a processor", None)  # type: ignore[arg-type]


def test_warm_up_is_outside_and_every_repeat_has_fresh_prompts(config: RunConfig, tmp_path: Path) -> None:
    """e3, e1."""
    generator = Generator()
    found = run(generator, config, tmp_path)
    assert [len(prompts) for prompts in generator.calls] == [2, 6, 6, 6]
    assert generator.resets == 3
    prompts = [tuple(p) for call in generator.calls for p in call]
    assert len(set(prompts)) == len(prompts), "no prompt comes twice, so no cache can help"
    assert all(256 <= i < 1000 for prompt in prompts for i in prompt)
    (only,) = found.levels
    assert len(only.repeats) == 3
    assert [r.preemptions for r in only.repeats] == [0, 0, 1]
    assert found.scheduler == {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
    assert found.start_seconds == {"eager": 12.0}
    assert found.health is not None
    assert found.health.source == "none"
    assert "no device sensors" in found.health.note, "on a CPU there are none, and that is said"


def test_missing_figures_say_why(config: RunConfig, tmp_path: Path) -> None:
    (only,) = run(Generator(), config, tmp_path).levels
    assert "energy counter" in only.missing["joules_per_output_token"]
    assert "load.slo" in only.missing["goodput_requests_per_second"]
    assert "not each token" in only.missing["itl_p99_seconds"]
    assert only.bound_output_tokens_per_second is None, "a CPU has no published peaks"


def test_same_seed_same_prompts(config: RunConfig, tmp_path: Path) -> None:
    first, second, third = Generator(), Generator(), Generator()
    other = dataclasses.replace(config, engine=dataclasses.replace(config.engine, seed=1))
    for generator, chosen in ((first, config), (second, config), (third, other)):
        run(generator, chosen, tmp_path)
    assert first.calls == second.calls != third.calls


def test_model_that_stops_early_has_no_valid_speed(config: RunConfig, tmp_path: Path) -> None:
    """e2."""
    (only,) = run(Generator(length=7), config, tmp_path).levels
    assert not only.valid
    assert "18 of 18 answers have another length than asked for" in only.reasons


def test_speed_out_of_a_warm_cache_is_not_valid(config: RunConfig, tmp_path: Path) -> None:
    """e1."""
    (only,) = run(Generator(cached=5), config, tmp_path).levels
    assert "50.0% of the prompt tokens came from the prefix cache; at most 1% may" in only.reasons


def test_tiny_vocabulary_still_gives_prompts(config: RunConfig, tmp_path: Path) -> None:
    generator = Generator(vocabulary=20)
    run(generator, config, tmp_path)
    assert all(10 <= i < 20 for call in generator.calls for prompt in call for i in prompt)


def test_first_token_from_the_engines_times() -> None:
    """Ended at 2.0 s, and 0.5 s passed between first and last token on the engine's clock."""
    metrics = SimpleNamespace(first_token_ts=100.0, last_token_ts=100.5)
    assert first_token_seconds(SimpleNamespace(metrics=metrics), 2.0) == pytest.approx(1.5)
    assert first_token_seconds(SimpleNamespace(metrics=None), 2.0) is None
    assert first_token_seconds(SimpleNamespace(), 2.0) is None


def test_short_form_of_one_level_goes_by_the_loads_name() -> None:
    short = short_loads(result(level(100, 110, 90), name="offline"))
    assert list(short) == ["offline"]
    assert short["offline"].output_tokens_per_second == 100.0
    assert (short["offline"].output_tokens_per_second_low, short["offline"].output_tokens_per_second_high) == (90, 110)
    assert short["offline"].request_latency_p99_seconds == pytest.approx(1.0)
    assert short["offline"].valid


def test_short_form_of_a_ladder_can_be_asked_for_by_concurrency() -> None:
    from evalq.judge.policy import load_figure

    short = short_loads(result(level(100, 110, 90), level(50, 51, 49, label="concurrency 1")))
    assert list(short) == ["ladder-concurrency-10", "ladder-concurrency-1"]
    assert load_figure(short, "ladder-concurrency-1") is short["ladder-concurrency-1"]


def test_trace_is_found_under_the_data_folder(
    cell_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALQ_DATA", str(tmp_path))
    config = cell_config("baseline", "load=trace", "load.trace=x/t.csv", "load.requests=1")
    assert trace_file(config) == tmp_path / "x" / "t.csv"
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,7,5\n2,900,9\n", encoding="utf-8")
    assert [plan.input_lengths for plan in levels_to_run(config)] == [[7]]
    assert longest_request(config) == 12
