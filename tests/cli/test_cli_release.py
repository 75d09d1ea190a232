"""Attempts to get a PASS that was not measured: each ends non-zero, and says in one sentence why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import record_builder as rb

from evalq.cli import gate as gate_verb
from evalq.cli import judging
from evalq.judge.seal import KEY_VARIABLE, seal
from evalq.records import RECORD_FILE, VERDICT_FILE, file_sha256, read_verdict

KEY = "s" * 32


class Place:
    """A baseline `b`, a good candidate `c`, a bad one `bad`, a pair of another model, all sealed, and a policy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = rb.baseline_rows(documents=24, items=20)
        good, bad = rb.damaged(rows, 0.003), rb.damaged(rows, 0.05)
        rb.write(folder / "b", rb.record("baseline", rows), rows)
        rb.write(folder / "c", rb.record("good", good), good)
        rb.write(folder / "bad", rb.record("bad", bad), bad)
        other = {"fingerprint": {"model_id": "other/model", "weights_hash": "o" * 64}}
        rb.write(folder / "other-b", rb.record("baseline", rows, record_id="ob", **other), rows)
        rb.write(folder / "other-c", rb.record("good", good, record_id="oc", **other), good)
        self.seal("b", "c", "bad", "other-b", "other-c")
        self.policy = folder / "policy.yaml"
        self.policy.write_text("target: 1.0%\nlimit: 1.5%\n")

    def seal(self, *names: str, key: str = KEY) -> None:
        for name in names:
            seal(self.folder / name, key.encode())

    def gate(self, *more: str, baseline: str = "b", candidate: str = "c", to: str = "--out") -> int:
        paths = ["--baseline", str(self.folder / baseline), "--candidate", str(self.folder / candidate)]
        return gate_verb.main([*paths, "--policy", str(self.policy), to, str(self.folder / "out"), *more])

    def edit(self, name: str, change: Callable[[dict], dict]) -> None:  # type: ignore[type-arg]
        file = self.folder / name
        file.write_text(json.dumps(change(json.loads(file.read_text()))))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return Place(tmp_path)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_honest_records_pass_twice(place: Place) -> None:
    digest = file_sha256(place.policy)
    more = ["--require-seal", "--expect", "model=tiny", "--expect", "quant=mixed-4-8", "--policy-sha256", digest]
    assert place.gate(*more) == 0
    assert place.gate(*more, to="--verdict") == 0
    inputs = read_verdict(place.folder / "out").inputs
    assert inputs["policy_sha256"] == digest
    assert inputs["candidate_sha256"] == file_sha256(place.folder / "c" / RECORD_FILE)
    assert inputs["sealed"] == "yes"


def test_an_edited_verdict(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A whole and consistent PASS, taken from the good candidate, under the ids of the bad one."""
    assert place.gate(candidate="bad") == 1
    failed = read_verdict(place.folder / "out")
    assert place.gate() == 0
    place.edit("out/" + VERDICT_FILE, lambda v: v | {"candidate_id": failed.candidate_id, "inputs": failed.inputs})
    assert place.gate(candidate="bad", to="--verdict") == 5
    assert "'PASS' in the file and 'FAIL' when judged again" in said(capsys)


def test_a_verdict_read_alone_needs_its_seal(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is a key. Without one a consistent forgery cannot be told, and a warning says so."""
    assert place.gate() == 0
    alone = ["--verdict", str(place.folder / "out")]
    assert gate_verb.main(alone) == 0
    place.edit("out/" + VERDICT_FILE, lambda v: v | {"candidate_id": "another"})
    assert gate_verb.main(alone) == 5
    assert "verdict.json was changed afterwards" in said(capsys)
    (place.folder / "out" / "verdict.seal").unlink()
    assert gate_verb.main(alone) == 5
    monkeypatch.delenv(KEY_VARIABLE)
    assert gate_verb.main(alone) == 0
    assert "warning: no seal and no record was checked" in said(capsys)


def test_edited_figures_in_a_verdict(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.gate() == 0
    place.edit(
        "out/" + VERDICT_FILE, lambda v: v | {"checks": [{**v["checks"][0], "estimate": None}, *v["checks"][1:]]}
    )
    assert place.gate(to="--verdict") == 5
    assert "its checks are others" in said(capsys)


def test_an_old_verdict_of_the_same_ids(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The record was measured anew under its old id; the verdict is of the old one."""
    assert place.gate() == 0
    rows = rb.damaged(rb.baseline_rows(documents=24, items=20), 0.003, seed=4)
    rb.write(place.folder / "c", rb.record("good", rows), rows)
    place.seal("c")
    assert place.gate(to="--verdict") == 5
    assert "inputs is" in said(capsys)


def test_an_edited_record_with_its_old_seal(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.edit("c/record.json", lambda r: r | {"notes": ["harmless"]})
    assert place.gate() == 5
    assert "record.json was changed afterwards" in said(capsys)


def test_a_record_that_was_forged_whole(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables, hashes and aggregates agree; only the key was not at hand."""
    rows = rb.damaged(rb.baseline_rows(documents=24, items=20), 0.0)
    rb.write(place.folder / "bad", rb.record("bad", rows), rows)
    place.seal("bad", key="g" * 32)
    assert place.gate(candidate="bad") == 5
    assert "another key" in said(capsys)
    (place.folder / "bad" / "record.seal").unlink()
    assert place.gate(candidate="bad") == 5
    assert "has no record.seal" in said(capsys)


def test_no_key_and_seals_required(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(KEY_VARIABLE)
    assert place.gate() == 0
    assert place.gate("--require-seal") == 5
    assert "EVALQ_SEAL_KEY is not set" in said(capsys)
    monkeypatch.setenv(KEY_VARIABLE, "short")
    assert place.gate() == 2


def test_a_swapped_table(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copyfile(place.folder / "b" / "documents.parquet", place.folder / "bad" / "documents.parquet")
    assert place.gate(candidate="bad") == 5
    assert "is not the table" in said(capsys)


def test_a_candidate_as_its_own_baseline(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its copy says that it is a baseline of another id and configuration, and nothing is sealed."""
    assert place.gate(baseline="bad", candidate="bad") == 5
    monkeypatch.delenv(KEY_VARIABLE)
    shutil.copytree(place.folder / "bad", place.folder / "copy")
    changes = {"record_id": "x", "config_hash": "y" * 64}
    place.edit(
        "copy/record.json", lambda r: r | changes | {"cell": r["cell"] | {"quant": "baseline", "is_baseline": True}}
    )
    assert place.gate(baseline="copy", candidate="bad") == 5
    assert place.gate(baseline="c", candidate="b") == 5, "swapped"


def test_records_of_another_model(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.gate(baseline="other-b") == 5
    assert "model_id" in said(capsys)
    assert place.gate(baseline="other-b", candidate="other-c") == 0, "a good pair, but not of the model in question"
    assert place.gate("--expect", f"weights_hash={'w' * 64}", baseline="other-b", candidate="other-c") == 5
    assert "is to be judged" in said(capsys)


@pytest.mark.parametrize("expected", ["model=", "model", "modell=tiny", "=x"])
def test_expectations_that_expect_nothing(place: Place, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.gate("--expect", expected) == 2
    assert "--expect" in said(capsys)


def test_a_loosened_policy(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    agreed = file_sha256(place.policy)
    place.policy.write_text("target: 8.0%\nlimit: 9.0%\n")
    assert place.gate(candidate="bad") == 0, "who may write the policy decides"
    assert place.gate("--policy-sha256", agreed, candidate="bad") == 2
    assert "have its owners agree" in said(capsys)
    assert place.gate("--policy-sha256", "", candidate="bad") == 2


def test_an_empty_policy_name_is_not_the_default(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        gate_verb.main(["--baseline", str(place.folder / "b"), "--candidate", str(place.folder / "c"), "--policy", ""])
        == 2
    )
    assert "--policy is empty" in said(capsys)


def test_one_id_in_two_folders(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A planted copy must not be found in place of the record that was meant."""
    shutil.copytree(place.folder / "c", place.folder / "a-planted")
    arguments = ["--baseline", "baseline-id", "--candidate", "good-id", "--records", str(place.folder)]
    assert gate_verb.main(arguments) == 5
    assert "is in 2 folders" in said(capsys)


def test_another_file_beside_the_record(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The seal and the digest are record.json's."""
    shutil.copyfile(place.folder / "c" / RECORD_FILE, place.folder / "bad" / "other.json")
    assert place.gate(candidate="bad/other.json") == 5
    assert "is no record" in said(capsys)


def test_a_gate_that_dies_leaves_an_error_in_junit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PASS of an earlier run is gone, and JUnit is neither missing, empty nor green."""
    assert place.gate() == 0

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(judging, "find_record", dies)
    with pytest.raises(KeyboardInterrupt):
        place.gate()
    assert not (place.folder / "out" / VERDICT_FILE).exists()
    assert "the gate did not finish" in (place.folder / "out" / "junit.xml").read_text()
    assert "<error" in (place.folder / "out" / "junit.xml").read_text()
    assert "INVALID" in (place.folder / "out" / "verdict.md").read_text()
