"""KV dtypes of an installed engine, read from its source text."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from evalq.errors import InfeasibleError
from evalq.facts import kv_dtypes
from evalq.facts.kv_dtypes import engine_folder, offered_by_engine, offered_on_device, require_offered, usable

CACHE = 'CacheDType = Literal[\n    "auto", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "future"\n]\n'
BACKEND = "class B:\n    supported_kv_cache_dtypes: ClassVar[list] = [{}]\n"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "cache.py").write_text(CACHE)
    backends = tmp_path / "v1" / "attention" / "backends"
    (backends / "mla").mkdir(parents=True)
    (backends / "cpu_attn.py").write_text(BACKEND.format('"auto", "fp8_e4m3"'))
    (backends / "triton_attn.py").write_text(BACKEND.format('"auto", "fp8_e5m2", "int8_per_token_head"'))
    (backends / "mla" / "flash.py").write_text(BACKEND.format('"auto", "fp8_ds_mla"'))
    (backends / "broken.py").write_text("def (")
    monkeypatch.setattr(kv_dtypes, "engine_folder", lambda: tmp_path)
    return tmp_path


def test_choices_are_the_engines_own(engine: Path) -> None:
    assert offered_by_engine(engine) == ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "future")
    assert offered_on_device(engine, True) == ("auto", "fp8_e4m3")
    assert set(offered_on_device(engine, False)) == {"auto", "fp8_e5m2", "int8_per_token_head", "fp8_ds_mla"}
    assert usable(offered_by_engine(engine)) == ["bfloat16", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head"]


def test_what_it_does_not_offer_is_refused(engine: Path) -> None:
    require_offered("fp8_e4m3", "bfloat16", True)
    require_offered("bfloat16", "bfloat16", True)
    require_offered("int8_per_token_head", "bfloat16", False)
    with pytest.raises(InfeasibleError, match="not offered by the installed engine; it offers bfloat16"):
        require_offered("nvfp4", "bfloat16", False)
    with pytest.raises(InfeasibleError, match="none of the installed engine's attention backends for the CPU engine"):
        require_offered("int8_per_token_head", "bfloat16", True)


def test_no_engine_and_a_silent_engine_refuse_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_dtypes, "engine_folder", lambda: tmp_path)
    require_offered("anything", "bfloat16", True)
    monkeypatch.setattr(kv_dtypes, "engine_folder", lambda: None)
    require_offered("anything", "bfloat16", True)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the package vllm")
def test_the_installed_engine_says_something() -> None:
    folder = engine_folder()
    assert folder is not None
    assert {"auto", "bfloat16", "fp8_e4m3"} <= set(offered_by_engine(folder))
    assert "fp8_e4m3" in offered_on_device(folder, True)
