"""The light composer: choices, overrides, types, and one sentence for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalq.config import RunConfig
from evalq.errors import ConfigError
from evalq.facts import confdir
from evalq.plan import compose as composer
from evalq.plan.compose import compose, parse


def cell(*overrides: str) -> RunConfig:
    request = parse(list(overrides))
    return compose(request, request.cells()[0])


def test_sweeps_are_products_in_the_order_given() -> None:
    cells = parse(["+model=llama3-8b,llama3-70b", "+quant=baseline,fp8-kv", "gpu=h200"]).cells()
    assert [(c["model"], c["quant"]) for c in cells] == [
        ("llama3-8b", "baseline"), ("llama3-8b", "fp8-kv"), ("llama3-70b", "baseline"), ("llama3-70b", "fp8-kv"),
    ]  # fmt: skip
    assert len(parse(["gpu=all"]).cells()) == len(confdir.names("gpu"))


def test_model_files_choose_their_data() -> None:
    assert cell("model=llama3-8b").data.name == "hub"
    assert cell("model=smollm2-135m").data.name == "embedded"
    assert cell("model=llama3-8b", "data=local").data.name == "local"


def test_values_get_the_types_of_the_schema() -> None:
    config = cell(
        "model=llama3-8b",
        "model.revision=1e5",
        "engine.max_model_len=4096",
        "engine.enforce_eager=true",
        "gpu.memory_utilization=0.5",
        "engine.block_size=null",
        "engine.extra.kv_offloading_size=64",
        "engine.env.A=1",
        "gate.required_tasks=[wikitext]",
    )
    assert config.model.revision == "1e5"
    assert config.engine.max_model_len == 4096
    assert config.engine.enforce_eager is True
    assert config.gpu.memory_utilization == 0.5
    assert config.engine.block_size is None
    assert config.engine.extra == {"kv_offloading_size": 64}
    assert config.engine.env == {"A": "1"}
    assert config.gate.required_tasks == ["wikitext"]


@pytest.mark.parametrize("text", ["4_8", "1e5", "7e10", "012", "yes"])
def test_names_that_look_like_numbers_stay_text(text: str) -> None:
    assert cell("model=llama3-8b", f"model.revision={text}").model.revision == text


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model=llama3-9b", "did you mean llama3-8b"),
        ("engine.max_num_seq=3", "did you mean max_num_seqs"),
        ("quant.kv_cache_dtyp=fp8", "did you mean kv_cache_dtype"),
        ("modle=llama3-8b", "did you mean model"),
        ("llama3-8b", "is no override"),
        ("engine.max_num_seqs=many", "not a whole number"),
        ("engine.enforce_eager=2", "not true or false"),
        ("gpu.memory_utilization=much", "not a number"),
        ("engine.extra={", "cannot be read"),
        ("gate.required_tasks=3", "not a list"),
        ("model=", "names nothing"),
    ],
)
def test_mistakes_are_named(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        cell("gpu=h200", override)


def test_overrides_never_reach_the_cached_files() -> None:
    changed = cell("model=llama3-8b", "quant=w4a16", "quant.groups.linear.weights.group_size=128")
    assert changed.quant.groups["linear"].weights is not None
    assert changed.quant.groups["linear"].weights.group_size == 128
    again = cell("model=llama3-8b", "quant=w4a16").quant.groups["linear"].weights
    assert again is not None
    assert again.group_size == 64


def test_without_a_quant_the_checkpoint_is_taken_as_it_is() -> None:
    assert cell("model=llama3-8b").quant.name == "baseline"


def test_same_as_hydra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the application composes with Hydra, both composers say the same about a cell."""
    app = pytest.importorskip("evalq.app")
    monkeypatch.setenv("EVALQ_HOME", str(tmp_path))
    for overrides in (
        ["+model=llama3-8b", "+quant=w4a16", "gpu=h200", "engine.max_num_seqs=8"],
        ["+model=deepseek-v3.2", "+quant=baseline", "gpu=mi325x"],
        ["+model=kimi-k2.5", "+quant=fp8-kv", "gpu=h100"],
        ["+model=qwen3-vl-235b", "+quant=mixed-4-8", "gpu=b200"],
        ["+model=smollm2-135m", "+quant=int8-w8a8", "gpu=cpu", "data=embedded"],
    ):
        theirs, ours = app.compose(overrides), cell(*overrides)
        for group in ("model", "quant", "gpu", "engine", "tasks", "data", "load", "gate"):
            assert getattr(theirs, group) == getattr(ours, group), group


def test_a_tree_without_config_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "baseline.yaml").write_text("name: baseline\nkv_cache_dtype: bfloat16\n")
    monkeypatch.setattr(composer, "conf_dir", lambda: tmp_path)
    monkeypatch.setattr(composer, "names", lambda group: ("baseline",) if group == "quant" else ())
    composer._parsed.cache_clear()
    config = compose(parse([]), {})
    composer._parsed.cache_clear()
    assert config.quant.kv_cache_dtype == "bfloat16"
    assert config.gpu.name == "auto"


def test_broken_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "baseline.yaml").write_text("- a list\n")
    monkeypatch.setattr(composer, "conf_dir", lambda: tmp_path)
    monkeypatch.setattr(composer, "names", lambda group: ("baseline",) if group == "quant" else ())
    composer._parsed.cache_clear()
    with pytest.raises(ConfigError, match=r"baseline\.yaml holds no mapping"):
        compose(parse([]), {})
    composer._parsed.cache_clear()
