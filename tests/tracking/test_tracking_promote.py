"""`evalq promote` on a real MLflow registry: only a PASS that the records themselves give moves the alias."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import record_builder as rb

from evalq.cli import main
from evalq.quantize import weights_hash
from evalq.records import CheckpointId, read_record, read_verdict, to_json, write_text
from evalq.tracking import manifest as m
from evalq.tracking.store import Store


def tiny_checkpoint(folder: Path) -> Path:
    """One tensor of two numbers."""
    folder.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (folder / "config.json").write_text("{}")
    return folder


class Registry:
    """Records of one test in the shared store, and what its registry says of them."""

    def __init__(self, upload: Any, store: Store, records: Path) -> None:
        self.upload, self.store, self.records, self.name = upload, store, records, records.name[:60]
        self.checkpoint = tiny_checkpoint(store.root / "checkpoints" / self.name)
        self.known = CheckpointId(f"checkpoints/{self.name}", weights_hash(self.checkpoint), 12)
        self.rows = rb.baseline_rows(documents=24, items=20)
        self.add("baseline", 0.0)

    def add(self, name: str, increase: float, **changes: Any) -> Path:
        rows = self.rows if name == "baseline" else rb.damaged(self.rows, increase)
        fields = {"record_id": f"{self.name}-{name}", "checkpoint": self.known, **changes}
        rb.write(self.records / name, rb.record(name, rows, **fields), rows)
        return self.records / name

    def sync(self, name: str) -> str:
        folder = self.records / name
        path = m.open_manifest(self.store, self.name, "tiny on h200", "tiny", "h200")
        m.add_cell(path, self.store.records, folder, read_record(folder), False)
        manifest = m.read_manifest(path)
        result = self.upload.log_cell(manifest, manifest.cells[-1], *self.upload.open_study(manifest))
        m.end_manifest(path, "FINISHED")
        return str(result.run_id)

    def promote(self, name: str, *more: str) -> int:
        paths = ["--baseline", str(self.records / "baseline"), "--candidate", str(self.records / name)]
        return main(["promote", *paths, "--root", str(self.store.root), "--name", self.name, *more])

    def versions(self) -> list[Any]:
        return list(self.upload._client.search_model_versions(f"name = '{self.name}'"))

    def alias(self) -> Any:
        return self.upload._client.get_model_version_by_alias(self.name, "release-candidate")


@pytest.fixture
def registry(upload: Any, store: Store, records: Path) -> Registry:
    return Registry(upload, store, records)


def test_a_pass_becomes_the_release_candidate_once(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    registry.add("good", 0.003)
    run_id = registry.sync("good")
    assert registry.promote("good", "--upload") == 0
    version = registry.alias()
    assert version.tags["evalq.verdict"] == "PASS"
    assert version.tags["evalq.checkpoint_sha256"] == registry.known.weights_sha256
    assert float(version.tags["evalq.quality.perplexity_increase_percent"]) == pytest.approx(0.3)
    assert (version.run_id, version.status) == (run_id, "READY")
    assert "What it is" in version.description
    files = {Path(file.path).name for file in registry.upload._client.list_artifacts(run_id, "checkpoint")}
    assert {"checkpoint.json", "model.safetensors", "config.json"} <= files
    assert registry.promote("good") == 0
    assert [one.version for one in registry.versions()] == [version.version], "twice is once"
    assert "was registered already" in capsys.readouterr().out


@pytest.mark.parametrize(("increase", "code"), [(0.05, 1), (0.0149, 3)])
def test_nothing_else_is_registered(registry: Registry, increase: float, code: int) -> None:
    registry.add("cand", increase)
    registry.sync("cand")
    assert registry.promote("cand") == code
    assert registry.versions() == []


def test_a_verdict_that_was_edited_promotes_nothing(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    """A PASS beside a failing record, and a FAIL beside a passing one: neither is believed."""
    from evalq.judge.gate import judge

    baseline, policy = registry.records / "baseline", rb_policy()
    for name, increase in (("bad", 0.05), ("good", 0.003)):
        folder = registry.add(name, increase)
        write_text(
            folder / "verdict.json",
            to_json(judge(read_record(baseline), baseline, read_record(folder), folder, policy)),
        )
        registry.sync(name)
    good, bad = read_verdict(registry.records / "good"), read_verdict(registry.records / "bad")
    for name, own, other in (("bad", bad, good), ("good", good, bad)):
        swapped = dataclasses.replace(other, candidate_id=own.candidate_id)
        write_text(registry.records / name / "verdict.json", to_json(swapped))
        assert registry.promote(name) == 5
        assert "was edited" in capsys.readouterr().err
    assert registry.versions() == []


def rb_policy() -> Any:
    from evalq.judge.policy import read_policy

    return read_policy("default")


def test_another_checkpoint_than_the_measured_one(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same size and time, so that kept hashes would not show it."""
    registry.add("good", 0.003)
    registry.sync("good")
    file = registry.checkpoint / "model.safetensors"
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights_hash(registry.checkpoint) == registry.known.weights_sha256, "the kept hash believes it"
    assert registry.promote("good") == 2
    assert registry.versions() == []
    assert "is not the checkpoint that was measured" in capsys.readouterr().err
    assert registry.promote("good", "--by-reference") == 0


def test_a_record_that_mlflow_does_not_hold_whole(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    """Not there; there and changed afterwards; there without its files (case d6)."""
    folder = registry.add("good", 0.003)
    assert registry.promote("good") != 0
    assert "run evalq sync first" in capsys.readouterr().err
    run_id = registry.sync("good")
    data = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps(data | {"notes": ["changed"]}))
    assert registry.promote("good") != 0
    (folder / "record.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    registry.upload._client.set_tag(run_id, "evalq.gate_eligible", "false")
    assert registry.promote("good") != 0
    assert "not whole there" in capsys.readouterr().err
    assert registry.versions() == []


def test_a_record_without_a_checkpoint(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    registry.add("good", 0.003, checkpoint=None)
    registry.sync("good")
    assert registry.promote("good") != 0
    assert "does not say which checkpoint" in capsys.readouterr().err
