"""Fake quantisation on a tiny real model: nothing else is touched, skipping changes nothing, scaling is said, the cache holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from evalq.facts.options import OPTIONS
from evalq.quantize import sensitivity as module
from evalq.quantize.rounding import rounding_threads
from evalq.quantize.sensitivity import FakeModel, Question, sensitivity
from evalq.quantize.tensors import checkpoint_tensors
from evalq.quantize.units import units_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> Question:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    units = units_of(checkpoint_tensors(folder).values(), ["lm_head"])
    options = [OPTIONS[name] for name in ("int8", "int4_g32", "int4_g64", "int4_g128")]
    return Question(folder, "hash", "bfloat16", units, options, [[1, 2, 3, 4, 5, 6, 7, 8]] * 2, all_fake=False)


def test_a_table_of_every_unit_and_the_options_that_fit(question: Question, tmp_path: Path) -> None:
    made = sensitivity(question, tmp_path)
    assert len(made.damages) == 3 * (4 + 4 + 4) + 3  # int8, g32, g64; g128 fits down_proj alone
    assert {damage.how for damage in made.damages} == {"fake", "scaled from int4_g32"}
    assert made.tokens == 16
    four, eight = (sum(d.kld_nats for d in made.damages if d.option == name) for name in ("int4_g32", "int8"))
    assert four > 5 * eight > 0
    coarse = sum(d.kld_nats for d in made.damages if d.option == "int4_g64")
    assert coarse > four


def test_the_cache_is_the_table(question: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sensitivity(question, tmp_path)
    monkeypatch.setattr(module, "_measure", lambda *_: pytest.fail("measured again"))
    assert sensitivity(question, tmp_path) == made
    other = dataclasses.replace(question, source_hash="other")
    assert other.key() != question.key()


def test_an_interrupted_table_goes_on(question: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sensitivity(question, tmp_path / "whole")
    seen: list[str] = []
    inner = module._damages

    def failing(model: FakeModel, unit: Any, *rest: Any) -> Any:
        if len(seen) == 5:
            raise KeyboardInterrupt
        seen.append(unit.name)
        return inner(model, unit, *rest)

    monkeypatch.setattr(module, "_damages", failing)
    with pytest.raises(KeyboardInterrupt):
        sensitivity(question, tmp_path / "cut")
    again: list[str] = []
    monkeypatch.setattr(
        module, "_damages", lambda model, unit, *rest: again.append(unit.name) or inner(model, unit, *rest)
    )
    resumed = sensitivity(question, tmp_path / "cut")
    assert len(again) == len(question.units) - 5
    assert [(d.unit, d.option) for d in resumed.damages] == [(d.unit, d.option) for d in whole.damages]
    assert [d.kld_nats for d in resumed.damages] == pytest.approx([d.kld_nats for d in whole.damages], rel=1e-3)


def test_the_model_is_as_before_and_skipping_changes_nothing(question: Question) -> None:
    with rounding_threads() as pool, torch.inference_mode():
        model = FakeModel.load(question, "cpu")
        last, option = question.units[-1], OPTIONS["int4_g32"]
        rounded, error = model.rounded(last, option, pool)
        assert 0.001 < error < 0.1
        skipped = model.divergence(last, option, rounded)
        whole = model.divergence(dataclasses.replace(last, layer=0), option, rounded)
        assert skipped == pytest.approx(whole, rel=1e-4)
        assert skipped > 0
        same = {name: model._modules[name].weight.data for name in last.modules}
        assert model.divergence(last, option, same) == pytest.approx(0.0, abs=1e-7)
