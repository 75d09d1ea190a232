"""Leases: a device has one user at a time, whoever that is and however it ends. b3, c5."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalq.measure import device, lease
from evalq.measure.lease import core_numbers, leased

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(lease, "gpu_ids", lambda: ["0", "1"])


def quiet(text: str) -> None: ...


def test_two_cells_get_two_gpus_and_see_only_theirs(two_gpus: None) -> None:
    with leased(False, 1, quiet) as first:
        assert (first, os.environ["CUDA_VISIBLE_DEVICES"]) == (["0"], "0")
        other = {}

        def second() -> None:
            with leased(False, 1, quiet) as mine:
                other["ids"] = mine

        thread = threading.Thread(target=second)
        thread.start()
        thread.join(10)
        assert other["ids"] == ["1"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_whole_machine_changes_nothing_that_the_engine_sees(two_gpus: None) -> None:
    with leased(False, 2, quiet) as ids:
        assert ids == ["0", "1"]
        assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_third_waits_and_says_for_whom(two_gpus: None) -> None:
    said: list[str] = []
    got = threading.Event()

    def third() -> None:
        with leased(False, 1, said.append):
            got.set()

    with leased(False, 2, quiet):
        thread = threading.Thread(target=third)
        thread.start()
        assert not got.wait(0.6)
        assert said == [f"waiting for 1 free GPU: held by evalq with pid {os.getpid()}"]
    assert got.wait(10)
    thread.join()


def test_two_who_want_two_never_end_with_one_each(two_gpus: None) -> None:
    turns: list[str] = []

    def both(name: str) -> None:
        for _ in range(5):
            with leased(False, 2, quiet):
                turns.append(name)
                turns.append(name)

    threads = [threading.Thread(target=both, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(turns) == 20
    assert all(turns[i] == turns[i + 1] for i in range(0, 20, 2))


def test_lease_dies_with_its_owner(tmp_path: Path) -> None:
    code = (
        "import time, pathlib\nfrom evalq.measure.lease import leased\n"
        f"with leased(True, 1, print, '0'):\n    pathlib.Path({str(tmp_path / 'held')!r}).write_text('x')\n    time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 30
    while not (tmp_path / "held").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    owner.kill()
    owner.wait()
    with leased(True, 1, lambda text: pytest.fail(text), "0"):
        pass


def test_cpu_lease_is_of_the_cores_that_the_engine_is_bound_to() -> None:
    with leased(True, 1, quiet, "0"), leased(True, 1, lambda text: pytest.fail(text), "1"):
        pass


@given(st.sets(st.integers(0, 300), min_size=1))
def test_core_lists_are_read_as_the_engine_reads_them(cores: set[int]) -> None:
    assert core_numbers(",".join(map(str, sorted(cores)))) == sorted(cores)
    low, high = min(cores), max(cores)
    assert core_numbers(f"{low}-{high}") == list(range(low, high + 1))


def test_words_that_are_no_cores_mean_all_of_them() -> None:
    assert core_numbers(None) == core_numbers("auto") == sorted(os.sched_getaffinity(0))


def test_ids_are_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_nvidia_smi", lambda query: "0\n1\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device.gpu_ids() == ["0", "1"]
    for given_ids, ids in (("3", ["3"]), ("", []), ("-1", []), ("GPU-ab,GPU-cd", ["GPU-ab", "GPU-cd"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given_ids)
        assert device.gpu_ids() == ids


def test_only_the_leased_gpus_must_be_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """b3: another sweep's GPU may be full; each of ours must be free."""
    asked: list[str] = []

    def smi(query: str) -> str:
        asked.append(query)
        return "100, 80000\n60000, 80000\n" if "--id=2,3" in query else "100, 80000\n"

    monkeypatch.setattr(device, "_nvidia_smi", smi)
    assert device.memory_used_share(["2", "3"]) == 0.75
    assert device.memory_used_share(["1"]) == 100 / 80000
    assert asked == ["--query-gpu=memory.used,memory.total --id=2,3", "--query-gpu=memory.used,memory.total --id=1"]
