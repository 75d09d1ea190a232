"""evalq sweep and evalq status: the plan, refusals, dry runs, what is said while it runs and afterwards. Workers are stubs."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_worker import in_process, plan_command, starts

from evalq import pipeline
from evalq.cli import main
from evalq.sweep.journal import JOBS

Answer = tuple[int, str, str]
TWO = ["+model=smollm2-135m", "+quant=fp8-kv,w4a16", "gpu=cpu", "tracking=off"]


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def call(
    tmp_path: Path, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """call("sweep", ...): exit code, standard output, standard error; in CI's manner, wide."""
    monkeypatch.setenv("CI", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("EVALQ_HOME", str(tmp_path / "root"))

    def go(*arguments: str, **acts: dict[str, Any]) -> Answer:
        monkeypatch.setattr(pipeline, "run_worker", in_process(plan_command(tmp_path / "stub", **acts)))
        code = main(list(arguments))
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return go


def last_json(out: str) -> Any:
    return json.loads(out.splitlines()[-1])


def test_sweep_status_and_trade_off(call: Any, tmp_path: Path) -> None:
    code, out, err = call("sweep", *TWO, w4a16={"act": "killed"})
    assert code == 5
    assert "2 cells, 3 measurements; 0 refused" in err, (
        "the plan comes first, and not into the output that is read by programs"
    )
    assert re.search(r"smollm2-135m fp8-kv: done after \d+:\d\d \[2 of 3 done\]", err), "in CI a line per change"
    assert "starting the engine" not in err
    assert "1 of 2 cells done; the same command runs the other 1" in out
    answer = last_json(out)
    assert (answer["expected"], answer["done"], answer["released"]) == (2, 1, False)
    folder = Path(answer["sweep"])
    kept = json.loads((folder / "pareto.json").read_text())
    assert [cell["point"]["name"] for cell in kept["cells"]] == ["baseline", "fp8-kv"]
    assert answer["recommendations"][0]["text"] == kept["recommendations"][0]["text"]
    assert json.loads((folder / "pareto.plotly.json").read_text())["data"][0]["text"] == ["baseline", "fp8-kv"]

    code, out, _ = call("status")
    assert code == 5
    assert "incomplete, 1 of 2 cells done" in out
    assert "go on with: evalq sweep +model=smollm2-135m" in out
    code, out, _ = call("sweep", *TWO)
    assert (code, last_json(out)["done"]) == (0, 2)
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv", "w4a16", "w4a16"]
    code, out, _ = call("status", "--json")
    (state,) = json.loads(out)
    assert (code, state["state"], state["done"], state["expected"]) == (0, "complete", 2, 2)
    assert [row["state"] for row in state["measurements"]] == ["done"] * 3


def test_status_tells_what_was_lost_from_what_runs(call: Any, tmp_path: Path) -> None:
    """A cell that says `running` in a sweep that nobody holds was lost; a file that was cut counts as planned."""
    _, out, _ = call("sweep", *TWO)
    folder = Path(last_json(out)["sweep"])
    files = {file.name.split("-135m-")[1].split("-")[0]: file for file in (folder / JOBS).iterdir()}
    entry = json.loads(files["w4a16"].read_text())
    owner = {"host": "h", "pid": 7, "started": 1.0, "namespace": ""}
    files["w4a16"].write_text(json.dumps({**entry, "state": "running", "owner": owner}))
    files["fp8"].write_text("{")
    code, out, _ = call("status")
    assert code == 5
    assert "pid 7 on h is gone; the same command runs it again" in out
    assert "0 of 2 cells done" in out
    code, out, _ = call("sweep", *TWO)
    assert last_json(out)["done"] == 2
    assert sorted(starts(tmp_path / "stub")) == ["baseline", "fp8-kv", "fp8-kv", "w4a16"], "w4a16's record was there"


def test_status_of_nothing_and_of_an_unknown_sweep(call: Any) -> None:
    code, _, err = call("status")
    assert (code, "no sweep under" in err) == (2, True)
    call("sweep", *TWO)
    code, _, err = call("status", "no-such")
    assert (code, "no sweep called no-such" in err) == (2, True)
    code, out, _ = call("status", "--all")
    assert (code, out.count("cells done")) == (0, 1)


def test_dry_run_measures_nothing_and_works_for_another_machine(call: Any, tmp_path: Path) -> None:
    code, out, _ = call("sweep", "+experiment=llama3-on-h200", "--dry-run", "--json", "data=embedded")
    assert code == 0
    plan = last_json(out)
    assert plan["cells"] == 6
    assert [cost["quant"] for cost in plan["measurements"]][:2] == ["baseline", "fp8-kv"]
    assert {cost["source"] for cost in plan["measurements"]} == {"roofline: at least"}
    assert plan["gpu_hours"] == pytest.approx(plan["hours"])
    assert plan["hours"] > 0
    assert not (tmp_path / "root" / "sweeps").exists()
    assert not (tmp_path / "stub" / "starts").exists()


def test_hours_come_from_earlier_records_of_the_same_device(call: Any) -> None:
    """Of the scheme itself, else of another scheme of the model; scaled to the items that are wanted."""
    call("sweep", *TWO)
    _, out, _ = call("sweep", *TWO, "--dry-run", "--json")
    costs = {cost["quant"]: cost for cost in last_json(out)["measurements"]}
    assert {cost["source"] for cost in costs.values()} == {"records"}
    _, out, _ = call("sweep", "+model=smollm2-135m", "+quant=int8-w8a8", "gpu=cpu", "--dry-run", "--json")
    (_, other) = last_json(out)["measurements"]
    assert other["source"].startswith("records of ")
    assert other["hours"] == max(cost["hours"] for cost in costs.values())


def test_refused_cells_and_cells_whose_baseline_cannot_run_are_named_first(call: Any) -> None:
    code, out, _ = call(
        "sweep", "+model=llama3-70b", "+quant=fp8-weights", "gpu=h200", "data=embedded", "--dry-run", "--json"
    )
    assert code == 4
    (reason,) = last_json(out)["refused"].values()
    assert reason.startswith("its baseline cannot run: weights-fit: ")
    arguments = (*TWO[:1], "+quant=fp8-weights,w4a16", "gpu=a100-80g", "--dry-run", "--json", "data=embedded")
    code, out, _ = call("sweep", *arguments)
    refused = last_json(out)["refused"]
    assert (code, list(refused)) == (0, ["smollm2-135m fp8-weights"])
    assert refused["smollm2-135m fp8-weights"].startswith("fp8-weights-device: ")


def test_duplicates_are_dropped_and_named(call: Any, tmp_path: Path) -> None:
    code, out, _ = call("sweep", "+model=smollm2-135m", "+quant=fp8-kv", "gpu=cpu", "tracking=off", "engine.seed=0,0")
    assert (code, last_json(out)["expected"]) == (0, 1)
    assert starts(tmp_path / "stub") == ["baseline", "fp8-kv"]


def test_words_that_do_not_fit(call: Any) -> None:
    assert call("sweep")[0] == 2
    code, out, _ = call("sweep", "--help")
    assert code == 0
    assert "small-on-cpu" in out
    code, _, err = call("sweep", *TWO, "--json")
    assert (code, "--json belongs to --dry-run" in err) == (2, True)
    code, _, err = call("sweep", *TWO, "hydra/launcher=submitit_slurm")
    assert (code, "jobs/slurm" in err) == (2, True)
    code, _, err = call("sweep", *TWO, "executor.name=dask")
    assert (code, "executor.name='dask'" in err) == (2, True)
