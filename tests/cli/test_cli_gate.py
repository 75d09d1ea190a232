"""`evalq gate` and `evalq compare` as commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import record_builder as rb

from evalq.cli import compare as compare_verb
from evalq.cli import gate as gate_verb
from evalq.cli import judging
from evalq.records import read_verdict

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A records root with a baseline, a good, a bad and a failed candidate, and one that cannot be compared."""
    root = tmp_path / "records"
    rows = rb.baseline_rows()
    rb.write(root / "one", rb.record("baseline", rows), rows)
    for name, increase in (("good", 0.003), ("bad", 0.05), ("unclear", 0.0149)):
        changed = rb.damaged(rows, increase)
        rb.write(root / "more" / name, rb.record(name, changed), changed)
    rb.write(root / "more" / "died", rb.failed("died", rows), rows)
    other = rb.record("other", rows, fingerprint={"gpu": "NVIDIA H100 NVL"})
    rb.write(root / "more" / "other", other, rows)
    return root


@pytest.mark.parametrize(
    ("name", "code"), [("good", 0), ("bad", 1), ("unclear", 3), ("died", 5), ("other", 5), ("x", 5)]
)
def test_exit_codes_by_record_id(records: Path, name: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--baseline", "baseline-id", "--candidate", f"{name}-id", "--records", str(records)]
    assert gate_verb.main(arguments) == code
    assert f"exit code {code}" in capsys.readouterr().out


def test_the_last_line_of_json_is_the_verdict(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate_verb.main(
        ["--baseline", str(records / "one"), "--candidate", str(records / "more" / "good"), "--format", "json"]
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["status"] == "PASS"


@pytest.mark.parametrize(
    ("form", "words"), [("junit", "<testsuite"), ("markdown", "### evalq: PASS"), ("text", "PASS")]
)
def test_formats(records: Path, form: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ["--baseline", str(records / "one" / "record.json"), "--candidate", str(records / "more" / "good")]
    assert gate_verb.main([*paths, "--format", form]) == 0
    assert words in capsys.readouterr().out


def test_missing_arguments_are_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert gate_verb.main(["--candidate", "x"]) == 2
    with pytest.raises(SystemExit) as caught:
        gate_verb.main(["--no-such-flag"])
    assert caught.value.code == 2
    capsys.readouterr()


def test_an_unknown_policy_key_names_the_nearest(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("limmit: 1.5%\n")
    arguments = ["--baseline", "baseline-id", "--candidate", "good-id", "--records", str(records)]
    assert gate_verb.main([*arguments, "--policy", str(policy), "--out", str(tmp_path)]) == 2
    assert "did you mean limit?" in read_verdict(tmp_path).summary
    capsys.readouterr()


def test_allow_is_recorded(records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--baseline", "baseline-id", "--candidate", "other-id", "--records", str(records)]
    gate_verb.main([*arguments, "--allow", "gpu", "--out", str(tmp_path)])
    assert read_verdict(tmp_path).allowed_differences == ["gpu: baseline 'NVIDIA H200', candidate 'NVIDIA H100 NVL'"]
    assert gate_verb.main([*arguments, "--allow", "gpuu"]) == 2
    assert "did you mean gpu?" in capsys.readouterr().out


def test_a_bug_in_the_judge_is_not_a_quality_fail(
    records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fall_over(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(judging, "judge", fall_over)
    arguments = ["--baseline", "baseline-id", "--candidate", "good-id", "--records", str(records)]
    assert gate_verb.main(arguments) == 5
    assert "the judge itself failed" in capsys.readouterr().out


def test_an_mlflow_run_id_without_mlflow_names_the_extra(
    records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    arguments = ["--baseline", "0" * 32, "--candidate", "good-id", "--records", str(records)]
    assert gate_verb.main(arguments) == 2
    assert "pip install 'evalq[measure]'" in " ".join(capsys.readouterr().out.split())


def test_an_output_that_cannot_be_written_is_not_a_quality_fail(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["--baseline", "baseline-id", "--candidate", "good-id", "--records", str(records)]
    assert gate_verb.main([*arguments, "--out", str(tmp_path / "file")]) == 5
    assert "cannot be written" in capsys.readouterr().err


def test_a_record_is_found_by_its_mlflow_run(records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=store)
    experiment = client.create_experiment("tiny", artifact_location=(tmp_path / "artifacts").as_uri())
    run_id = client.create_run(experiment).info.run_id
    client.log_artifacts(run_id, str(records / "more" / "bad"), "record")
    arguments = ["--baseline", "baseline-id", "--records", str(records), "--tracking-uri", store]
    assert gate_verb.main([*arguments, "--candidate", run_id]) == 1
    assert gate_verb.main([*arguments, "--candidate", "f" * 32]) == 5
    assert "is the tracking URI right?" in " ".join(capsys.readouterr().out.split())


def test_compare_shows_differences_and_ends_well(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_verb.main(["baseline-id", "bad-id", "--records", str(records)]) == 0
    text = capsys.readouterr().out
    assert "word_perplexity_increase" in text
    assert "+5.000 %" in text


def test_compare_refuses_other_gpus(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_verb.main(["baseline-id", "other-id", "--records", str(records)]) == 5
    assert "gpu: baseline 'NVIDIA H200', candidate 'NVIDIA H100 NVL'" in capsys.readouterr().err


def test_compare_json(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare_verb.main(["baseline-id", "good-id", "--records", str(records), "--format", "json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["second_id"] == "good-id"


@pytest.mark.parametrize("arguments", [[], ["--keep-floor"]])
def test_compare_of_one_document_is_one_plain_sentence(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rb.baseline_rows(documents=1, items=1)
    worse = rb.Rows(rows.nll * 1.01, rows.words, rows.items)
    rb.write(tmp_path / "b", rb.record("baseline", rows), rows)
    rb.write(tmp_path / "c", rb.record("baseline", worse, record_id="again", config_hash="y" * 64), worse)
    code = compare_verb.main([str(tmp_path / "b"), str(tmp_path / "c"), "--records", str(tmp_path), *arguments])
    captured = capsys.readouterr()
    assert code == (5 if arguments else 0)
    assert "1 documents give no interval" in " ".join((captured.out + captured.err).split())
    assert "Traceback" not in captured.err


def test_fidelity_without_tokens_says_how_to_get_them(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_verb.main(["baseline-id", "good-id", "--records", str(records), "--fidelity"]) == 5
    assert "tasks.keep_tokens=true" in capsys.readouterr().err


def test_the_gate_loads_nothing_heavy(records: Path) -> None:
    code = (
        "import sys; from evalq.cli.gate import main; main(sys.argv[1:]); "
        "heavy = {'vllm', 'torch', 'mlflow', 'lm_eval', 'datasets', 'transformers', 'pandas', 'hydra', 'scipy'}; "
        "found = heavy & set(sys.modules); sys.exit(f'loaded: {found}' if found else 0)"
    )
    arguments = ["--baseline", str(records / "one"), "--candidate", str(records / "more" / "good")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
