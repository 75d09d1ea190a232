"""executor=ray: a real cluster of two machines that are both this one, stubs for engines, and a machine that dies."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from stub_cell import cell_command
from stub_worker import plan_command, starts

from evalq import sweep
from evalq.errors import ConfigError, MissingExtraError
from evalq.records import read_record
from evalq.report.progress import QuietWatcher
from evalq.sweep import raycluster
from evalq.sweep.journal import read_entries

pytestmark = pytest.mark.ray


class Killer(QuietWatcher):
    """Kills machine 1 of the cluster as soon as a cell other than the baseline runs there."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.killed = False
        self.said: list[str] = []

    def log(self, cell: str, file: str | None) -> None:
        if not self.killed and file and "machine-1" in file and "baseline" not in cell:
            self._cluster.kill(1)
            self.killed = True

    def say(self, text: str) -> None:
        self.said.append(text)


def test_sweep_on_a_cluster_that_loses_a_machine(tmp_path: Path, no_checkpoint: Path, cell_config: Any) -> None:
    pytest.importorskip("ray", reason="executor=ray needs pip install 'evalq[ray]'")
    from ray_cluster import Cluster

    command = plan_command(tmp_path / "stub", {"act": "record", "seconds": 2.0})
    schemes = ("fp8-kv", "int8-w8a8", "w4a16", "mixed-4-8")
    with Cluster(tmp_path / "cluster", machines=2) as cluster:
        overrides = ("executor=ray", f"executor.address={cluster.address}")
        watcher = Killer(cluster)
        result = sweep.run(
            [cell_config(name, *overrides) for name in schemes], watcher, command, cell_command(no_checkpoint)
        )
    assert watcher.killed
    assert any("trying again" in text for text in watcher.said)
    assert (result.exit_code, result.done) == (0, 4)
    found = [read_record(file) for file in (tmp_path / "root" / "records").glob("[!.]*/record.json")]
    assert sorted(record.cell.quant for record in found) == sorted(["baseline", *schemes]), "none lost, none twice"
    assert max(entry.attempt for entry in read_entries(Path(result.folder))) == 2
    local = [cell_config(name) for name in schemes]
    for config in local:
        config.paths.root = str(tmp_path / "here")
    here = sweep.run(local, QuietWatcher(), command, cell_command(no_checkpoint))
    for there, cell in zip(result.cells, here.cells, strict=True):
        assert there.measured.record.reuse_key == cell.measured.record.reuse_key
        assert there.measured.record.tasks == cell.measured.record.tasks
    assert len(starts(tmp_path / "stub")) >= 10


def test_without_ray_it_says_what_to_install(
    cell_config: Any, monkeypatch: pytest.MonkeyPatch, no_checkpoint: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'evalq\[ray\]'"):
        sweep.run([cell_config("fp8-kv", "executor=ray")], QuietWatcher())


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "[::1]:1"])
def test_an_address_where_nobody_listens(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raycluster, "ANSWER_SECONDS", 0.0)
    with pytest.raises(ConnectionError):
        raycluster._wait_for_answer(address)


def test_an_address_where_somebody_listens_or_that_ray_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raycluster, "ANSWER_SECONDS", 5.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        raycluster._wait_for_answer(f"127.0.0.1:{server.getsockname()[1]}")
    for address in ("auto", "local", "ray://127.0.0.1:1"):
        raycluster._wait_for_answer(address)


def test_no_cluster_at_an_address_is_a_config_error(
    cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="executor=ray needs pip install 'evalq[ray]'")
    monkeypatch.setattr(raycluster, "ANSWER_SECONDS", 1.0)
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        sweep.run([cell_config("fp8-kv", "executor=ray", "executor.address=127.0.0.1:1")], QuietWatcher())
