"""Cells without an engine, for the tests of pipeline, sweep and command line; makes tests/ importable for shared helpers."""

from __future__ import annotations

import copy
import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_safetensors import tiny_safetensors

from evalq.config import RunConfig


def pytest_configure() -> None:
    """Started by xdist or in a shell's background, Ctrl-C is ignored, and so in every child: no test could press it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the real engine first: they take longest, and with files side by side nothing waits for them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("engine")}
    items.sort(key=lambda item: item.path not in slow)


@functools.cache
def _composed(overrides: tuple[str, ...]) -> RunConfig:
    from evalq.app import compose

    return compose(list(overrides))


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not wait for the devices that a real run on this host holds."""
    monkeypatch.setenv("EVALQ_LEASES", str(tmp_path / "leases"))


@pytest.fixture
def cell_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """cell_config("fp8-kv", "tasks=smoke"): a composed cell of the small model on the CPU, untracked, under tmp_path/root."""

    def make(quant: str, *overrides: str) -> RunConfig:
        fixed = ("+model=smollm2-135m", f"+quant={quant}", "gpu=cpu", "tracking=off", "progress=false")
        config = copy.deepcopy(_composed((*fixed, *overrides)))
        config.paths.root = str(tmp_path / "root")
        return config

    return make


@pytest.fixture
def no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every cell starts from a two-number checkpoint, on a machine that is a CPU."""
    from evalq import checkpoints, preparation

    folder = tiny_safetensors(tmp_path / "checkpoint")

    def source(cell: Any, watcher: Any) -> Path:
        return folder

    def made(cell: Any, source: Path, watcher: Any) -> Path:
        return source

    monkeypatch.setattr(checkpoints, "source_folder", source)
    monkeypatch.setattr(checkpoints, "cell_checkpoint", made)
    monkeypatch.setattr(preparation, "detect", lambda: "cpu")
    return folder
