"""Composition of configs: golden files, who wins, names that look like numbers, paths, and every kind of unknown name."""

from __future__ import annotations

import itertools
import os
import shutil
import string
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from evalq import app
from evalq.config import GROUPS, QuantConfig, RunConfig
from evalq.errors import ConfigError
from evalq.facts.confdir import conf_dir, names
from evalq.pipeline import composed_yaml
from evalq.preparation import baseline_scheme, effective_scheme, places_of

HERE = Path(__file__).parent
CELL = ["+model=smollm2-135m", "+quant=baseline", "gpu=cpu"]
GOLDEN = {
    "smollm2-135m--mixed-4-8--cpu": ["+model=smollm2-135m", "+quant=mixed-4-8", "gpu=cpu"],
    "llama3-8b--fp8-weights-kv--h200": ["+model=llama3-8b", "+quant=fp8-weights-kv", "gpu=h200"],
}


def value_at(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        app.compose([*CELL, *overrides])
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", GOLDEN)
def test_composed_config_is_the_golden_one(name: str) -> None:
    """After a wanted change of conf/ run this file with EVALQ_GOLDEN=write and read the difference before committing it."""
    text = composed_yaml(app.compose([*GOLDEN[name], "paths.root=/runs"]))
    file = HERE / "golden" / f"{name}.yaml"
    if os.environ.get("EVALQ_GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert yaml.safe_load(text) == yaml.safe_load(file.read_text(encoding="utf-8"))


def test_documented_winners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.yaml < a group's file < what a model's or gpu's file chooses < the command line."""
    copied_conf(tmp_path, monkeypatch)
    config_file = tmp_path / "conf" / "config.yaml"
    text = config_file.read_text().replace("progress: true", "progress: false")
    config_file.write_text(text + "\nload: {requests: 99, repeats: 98}\n")
    load_file = tmp_path / "conf" / "load" / "smoke.yaml"
    assert "requests: 16" in load_file.read_text()
    plain = app.compose(CELL)
    assert plain.load.requests == 16  # the group's file wins over config.yaml
    assert plain.progress is False  # what no group sets is config.yaml's
    assert plain.engine.name == "cpu"  # chosen by gpu=cpu
    assert plain.data.name == "embedded"  # chosen by the model's file
    assert app.compose(["+model=llama3-8b", "+quant=baseline", "gpu=h200"]).data.name == "hub"
    told = app.compose([*CELL, "engine=default", "data=hub", "load.requests=7"])
    assert (told.engine.name, told.data.name, told.load.requests) == ("default", "hub", 7)
    assert told.engine.block_size is None


def copied_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ that the composer reads in place of the real one."""
    folder = tmp_path / "conf"
    shutil.copytree(conf_dir(), folder)
    monkeypatch.setattr(app, "conf_dir", lambda: folder)
    monkeypatch.setattr(app, "names", lambda group: tuple(sorted(f.stem for f in (folder / group).glob("*.yaml"))))
    return folder


def test_names_that_look_like_numbers_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied_conf(tmp_path, monkeypatch)
    text = (folder / "quant" / "fp8-kv.yaml").read_text().replace("name: fp8-kv", 'name: "4_8"')
    for name in ("4_8", "1e5"):
        (folder / "quant" / f"{name}.yaml").write_text(text.replace('"4_8"', f'"{name}"'))
        assert app.compose(["+model=smollm2-135m", f"+quant={name}", "gpu=cpu"]).quant.name == name
    swept = app.collect(["-m", "+model=smollm2-135m", "+quant=4_8,1e5", "gpu=cpu", f"paths.root={tmp_path}"])
    assert [config.quant.name for config in swept] == ["4_8", "1e5"]


@pytest.mark.parametrize("given", ["1e5", "7e10", "4_8", "007", "true", "INF"])
def test_revision_stays_text(given: str) -> None:
    assert app.compose([*CELL, f"model.revision={given}"]).model.revision == given


def text_keys() -> list[str]:
    """Dotted keys of every field that is text by schema, paths apart (they are made absolute)."""
    keys = []
    for group, schema in GROUPS.items():
        for name, hint in typing.get_type_hints(schema).items():
            if app._plain(hint) is str and f"{group}.{name}" not in app.PATH_KEYS:
                keys.append(f"{group}.{name}")
    return [*keys, "engine.env.SOME_NAME", "data.revisions.owner", "gate.task_margins.some_task"]


number_like = st.from_regex(r"[-+]?[0-9_.]{1,6}([eE][-+]?[0-9]{1,3})?", fullmatch=True)
words = st.sampled_from(
    ["true", "False", "yes", "ON", "off", "nan", "-inf", "Infinity", "None", "~", "0b1", "0o7", "1:30", "NULL"]
)
texts = st.text(string.ascii_letters + string.digits + " _-+./\\'\"{}[]()=:;#@!%&*<>?|^`", min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(key=st.sampled_from(text_keys()), value=st.one_of(number_like, words, texts))
def test_prepare_never_changes_the_meaning_of_text(key: str, value: str) -> None:
    """What Hydra's own parser makes of a prepared override is the text that was given."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if value[0] in "'\"" or value == "null" or app.SWEEP_FUNCTION.match(value):
        return  # quoted by the caller, no value at all, or a sweep: Hydra's own syntax
    override = app.prepare([f"{key}={value}", "gpu=cpu"], wanted=False)[0]
    parsed = OverridesParser.create().parse_override(override)
    assert not parsed.is_sweep_override()
    assert str(parsed.value()) == value


def test_text_goes_through_composition_unchanged() -> None:
    given = {
        "model.revision": "1_000",
        "tracking.study": 'it\'s a "test" {1}\\',
        "gpu.cpu_threads": "1",
        "engine.env.FLAG": "1e3",
        "tracking.experiment": "a=b",
    }
    config = app.compose([*CELL, *(f"{key}={value}" for key, value in given.items())])
    assert {key: value_at(config, key) for key in given} == given


def test_lists_and_mappings_of_text_stay_text() -> None:
    config = app.compose(
        [
            *CELL,
            "tasks.extra=[arc_easy, 1e5]",
            "gate.conditions=[weight_bytes <= 70%]",
            "data.revisions={Rowan/hellaswag: 7e10, owner/set: 0123}",
            "gate.task_margins={some_task: 0.5%}",
            "engine.extra={number: 1e5}",
            "gate.looks=[20, 40]",
        ]
    )
    assert config.tasks.extra == ["arc_easy", "1e5"]
    assert config.gate.conditions == ["weight_bytes <= 70%"]
    assert config.data.revisions == {"Rowan/hellaswag": "7e10", "owner/set": "0123"}
    assert config.gate.task_margins["some_task"] == "0.5%"
    assert config.engine.extra == {"number": 1e5}
    assert config.gate.looks == [20, 40]
    quoted = app.compose([*CELL, 'gate.conditions=["weight_bytes <= 70%", "kv_pool_bytes <= 60%"]', "tasks.extra=[]"])
    assert len(quoted.gate.conditions) == 2
    assert quoted.tasks.extra == []


def test_null_takes_a_value_away() -> None:
    assert app.compose([*CELL, "model.revision=null"]).model.revision is None


def test_model_with_dots_composes() -> None:
    config = app.compose(["+model=llama3.1-405b", "+quant=fp8-kv", "gpu=h200"])
    assert config.model.name == "llama3.1-405b"
    assert app.compose([*CELL, "model.path=/some/llama3.1-405b.v2"]).model.path == "/some/llama3.1-405b.v2"


def stray_files(folder: Path) -> list[str]:
    """Files that Hydra would overlook or that no group owns."""
    groups = {*GROUPS, "experiment", "debug", "executor", "fidelity"}
    stray = []
    for file in folder.rglob("*"):
        if file.is_file():
            inside = file.relative_to(folder).parts
            at_home = inside == ("config.yaml",) or (len(inside) == 2 and inside[0] in groups)
            if file.suffix != ".yaml" or not at_home:
                stray.append("/".join(inside))
    return sorted(stray)


def test_no_stray_file_in_conf(tmp_path: Path) -> None:
    assert stray_files(conf_dir()) == []
    shutil.copytree(conf_dir(), tmp_path / "conf")
    for name in ("quant/fp8.yml", "quant/notes.txt", "other/thing.yaml", "thing.yaml"):
        (tmp_path / "conf" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "conf" / name).write_text("a: 1\n")
    assert stray_files(tmp_path / "conf") == ["other/thing.yaml", "quant/fp8.yml", "quant/notes.txt", "thing.yaml"]


def test_every_file_starts_with_its_comment() -> None:
    for file in conf_dir().rglob("*.yaml"):
        assert file.read_text(encoding="utf-8").startswith("#"), f"{file} says nothing about itself"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+model=smollm2-135"], ["model='smollm2-135' is unknown", "did you mean smollm2-135m?"]),
        (["+quant=fp8_kv"], ["quant='fp8_kv' is unknown", "did you mean fp8-kv?"]),
        (["quant.kv_cache_dtyp=fp8_e4m3"], ["kv_cache_dtyp", "did you mean kv_cache_dtype?"]),
        (["engine.max_num_sequences=1"], ["max_num_sequences", "did you mean max_num_seqs?"]),
        (["+quant.kv_cache_dtyp=fp8_e4m3"], ["did you mean kv_cache_dtype?"]),
        (["tasks=defualt"], ["tasks='defualt' is unknown", "did you mean default?"]),
        (["gpu=h20"], ["gpu='h20' is unknown", "did you mean h200?"]),
        (["engin=default"], ["there is no 'engin'", "did you mean engine?"]),
        (["experiment=ab"], ["experiment='ab' is unknown", "aa"]),
        (["model.name.more=1"], ["model.name", "single value"]),
        (["gate.target=1.5"], ["gate.target='1.5' is ambiguous", '"1.5%"']),
        (["gate.target=nan"], ["gate.target"]),
        (["gate.target=-1%"], ["gate.target"]),
        (["gate.target=2%"], ["gate.target=2% is above gate.limit"]),
        (["quant.kv_cache_dtype=auto"], ["quant.kv_cache_dtype='auto'", "allowed"]),
        (["engine.load_format=dumy"], ["did you mean dummy?"]),
        (["gpu.count=two"], ["gpu.count=two", "give a whole number"]),
        (["gpu.memory_utilization=much"], ["gpu.memory_utilization=much", "give a number"]),
        (["gpu.count=0"], ["gpu.count=0 must be above 0"]),
        (["tracking.study=a,b"], ["-m"]),
        (["paths.records="], ["paths.records is empty", "leave it out"]),
        (["paths.root="], ["paths.root is empty", "leave it out"]),
        (["engine.portion_tokens=0"], ["engine.portion_tokens=0 must be above 0"]),
        (["just-a-word"], ["'just-a-word' is not of the form key=value"]),
    ],
)
def test_unknown_names_and_bad_values_are_one_plain_sentence(overrides: list[str], words: list[str]) -> None:
    message = refused(*overrides)
    assert all(word in message for word in words), message


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        app.prepare(["+model=nope", "tasks.windw=1", "gpu=cpux"])
    assert len(caught.value.problems) == 4  # three unknown names and the missing quant


def test_unknown_key_in_a_file_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied_conf(tmp_path, monkeypatch)
    file = folder / "quant" / "typo.yaml"
    file.write_text((folder / "quant" / "fp8-kv.yaml").read_text().replace("kv_cache_dtype:", "kv_cache_dtyp:"))
    with pytest.raises(ConfigError, match=r"no key 'kv_cache_dtyp' in QuantConfig; did you mean kv_cache_dtype\?"):
        app.compose(["+model=smollm2-135m", "+quant=typo", "gpu=cpu"])


def test_damaged_file_in_conf_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied_conf(tmp_path, monkeypatch)
    (folder / "quant" / "fp8-kv.yaml").write_text("defaults: [base_quant, _self_]\nname: a\nname: b\n")
    with pytest.raises(ConfigError, match=r"fp8-kv.yaml.* is not valid YAML.*duplicate key name"):
        app.compose(["+model=smollm2-135m", "+quant=fp8-kv", "gpu=cpu"])


def test_relative_paths_are_relative_to_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = app.compose([*CELL, "data.root=my data", "model.path=it's/here", "paths.root=out"])
    assert config.data.root == str(tmp_path / "my data")
    assert config.model.path == str(tmp_path / "it's/here")
    assert config.paths.root == str(tmp_path / "out")
    places = places_of(config)
    monkeypatch.chdir("/")
    assert places_of(config) == places
    assert places.records == tmp_path / "out" / "records"


def test_root_is_the_same_from_any_folder_of_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVALQ_HOME", raising=False)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    found = set()
    for folder in (tmp_path, tmp_path / "deep", tmp_path / "deep" / "er"):
        monkeypatch.chdir(folder)
        found.add(app.compose(CELL).paths.root)
    assert found == {str(tmp_path / "runs")}
    monkeypatch.setenv("EVALQ_HOME", str(tmp_path / "home"))
    assert app.compose(CELL).paths.root == str(tmp_path / "home")


def test_every_name_of_every_group_composes() -> None:
    """Every name, in turn with the others. All 637 cells would take minutes; schemes choose no other group."""
    for name in names("quant"):
        text = yaml.safe_load((conf_dir() / "quant" / f"{name}.yaml").read_text(encoding="utf-8"))
        assert text["defaults"] == ["base_quant", "_self_"]
    models, quants, gpus = (itertools.cycle(names(group)) for group in ("model", "quant", "gpu"))
    others = {group: itertools.cycle(names(group)) for group in ("engine", "data", "tasks", "load", "gate", "tracking")}
    rounds = max(len(names(group)) for group in ("model", "quant", "gpu", *others))
    for _ in range(rounds):
        model, quant, gpu = next(models), next(quants), next(gpus)
        chosen = {group: next(choices) for group, choices in others.items()}
        config = app.compose(
            [f"+model={model}", f"+quant={quant}", f"gpu={gpu}", *(f"{g}={name}" for g, name in chosen.items())]
        )
        assert (config.model.name, config.quant.name) == (model, quant)
        assert gpu in ("auto", config.gpu.name)
        assert config.engine.name == chosen["engine"]
        assert config.data.name == chosen["data"]


def test_experiments_compose() -> None:
    for name in names("experiment"):
        app.compose([*CELL, f"+experiment={name}"])
    assert app.compose([*CELL, "experiment=aa"]).aa is True


def test_yardstick_is_the_baseline_file() -> None:
    config = app.compose(CELL)
    assert effective_scheme(baseline_scheme(config)) == effective_scheme(config.quant)
    made = baseline_scheme(config)
    for key in ("name", "origin", "kv_cache_dtype", "kv_scale_source", "groups", "ignore", "engine_quantization"):
        assert getattr(made, key) == getattr(config.quant, key)


def test_yardstick_has_the_models_own_kv_dtype() -> None:
    config = app.compose([*CELL, "model.dtype=float16"])
    assert baseline_scheme(config).kv_cache_dtype == "float16"
    config = app.compose([*CELL, "model.dtype=float32"])
    assert baseline_scheme(config).kv_cache_dtype == "bfloat16"


def test_schemes_of_one_meaning_are_equal_and_others_are_not() -> None:
    schemes = {
        name: effective_scheme(app.compose(["+model=smollm2-135m", f"+quant={name}", "gpu=cpu"]).quant)
        for name in names("quant")
    }
    assert len(set(schemes.values())) == len(schemes)
    renamed = QuantConfig(name="other", kv_cache_dtype="bfloat16", notes=["words"], ignore=["lm_head"])
    assert effective_scheme(renamed) == schemes["baseline"]
    scaled = QuantConfig(name="x", kv_cache_dtype="fp8_e4m3", kv_scale_source="checkpoint")
    assert effective_scheme(scaled) != schemes["fp8-kv"]


def test_sweep_collects_one_config_per_cell(tmp_path: Path) -> None:
    configs = app.collect(
        ["--multirun", "+model=smollm2-135m", "+quant=fp8-kv,w4a16", "gpu=cpu", f"paths.root={tmp_path}"]
    )
    assert [config.quant.name for config in configs] == ["fp8-kv", "w4a16"]


def test_bad_cells_of_a_sweep_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        app.collect(["-m", *CELL, "gpu.count=0,1", "gate.target=1%,3%", f"paths.root={tmp_path}"])
    assert "gpu.count=0 must be above 0" in str(caught.value)
    assert "gate.target=3% is above gate.limit=1.5%" in str(caught.value)


@pytest.mark.parametrize(("key", "own"), [("max_model_len", "engine.max_model_len"), ("dtype", "model.dtype")])
def test_engine_extra_cannot_override_what_evalq_sets(key: str, own: str) -> None:
    with pytest.raises(ConfigError, match=own):
        app.compose(["+model=smollm2-135m", "+quant=fp8-kv", "gpu=cpu", f"+engine.extra.{key}=64"])


@pytest.mark.parametrize(
    "override", ["model.name=../../x", "quant.name=a/b", "quant.name=''", "engine.name=.e", "load.name=../x"]
)
def test_names_that_would_leave_the_store_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a folder"):
        app.compose(["+model=smollm2-135m", "+quant=mixed-4-8", override])
    long = "a" * 81
    with pytest.raises(ConfigError, match="cannot name a folder"):
        app.compose(["+model=smollm2-135m", "+quant=mixed-4-8", f"quant.name={long}"])


def test_extending_without_looks_is_refused() -> None:
    """It would be ignored, and whoever wrote it would wait for more documents."""
    with pytest.raises(ConfigError, match=r"gate\.extend=true measures on at the looks"):
        app.compose(["+model=smollm2-135m", "+quant=mixed-4-8", "gate.extend=true"])
