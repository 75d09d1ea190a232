"""The server's start with a stand-in for `vllm serve`: ports, proof that it is ours, its end; and the client's raw times."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from evalq.errors import MeasurementError
from evalq.loads.validity import level_problems
from evalq.measure import serving
from evalq.measure.load_client import prompts, read_counters
from evalq.measure.serving import HOST, Served, free_port, serve_environment, serve_flags, start_kind
from evalq.measure.serving_load import repeat_of, requests_of, run_order

STUB = """
import http.server, json, sys, time
arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
port, name = int(arguments["--port"]), arguments["--served-model-name"]
mode = {mode!r}
if mode == "crash":
    print("ERROR 11-30 01:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    sys.exit(1)
if mode == "stranger":
    name = "somebody-elses-model"
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"data": [{{"id": name}}]}}).encode()
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer.allow_reuse_address = False
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def command(mode: str = "ok") -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", STUB.format(mode=mode))


def start(config: Any, folder: Path, mode: str = "ok") -> Served:
    return Served.start(config, Path("/checkpoint"), 512, True, folder / "engine.log", "s3cret", command=command(mode))


@pytest.fixture
def config(cell_config: Any) -> Any:
    return cell_config("baseline", "load=ladder", "engine.start_timeout_seconds=20")


def test_server_that_answers_with_our_name_is_ours_and_ends(config: Any, tmp_path: Path) -> None:
    served = start(config, tmp_path)
    pid = served._process.pid
    assert served.name == "evalq-s3cret-0"
    assert served.start_kind == "eager"
    served.require_alive()
    served.close()
    assert not psutil.pid_exists(pid)


def test_b5_port_taken_between_choosing_and_binding_is_tried_again(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """b5: the first choice is taken by a stranger that listens and answers nothing."""
    with socket.socket() as stranger:
        stranger.bind((HOST, 0))
        stranger.listen()
        choices = iter([stranger.getsockname()[1], free_port()])
        monkeypatch.setattr(serving, "free_port", lambda: next(choices))
        with contextlib.closing(start(config, tmp_path)) as served:
            assert served.name == "evalq-s3cret-1"
            assert served.port != stranger.getsockname()[1]


def test_b5_another_server_on_our_port_is_not_taken_for_ours(config: Any, tmp_path: Path) -> None:
    """b5."""
    with pytest.raises(MeasurementError, match="ports were taken by other programs") as caught:
        start(config, tmp_path, "stranger")
    assert caught.value.kind == "port"


def test_server_that_fails_says_the_engines_cause(config: Any, tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="CUDA out of memory") as caught:
        start(config, tmp_path, "crash")
    assert caught.value.kind == "oom"


def test_flags_are_those_of_the_in_process_engine() -> None:
    arguments = {
        "model": "/m",
        "dtype": "bfloat16",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "attention_backend": None,
        "compilation_config": {"mode": 0},
        "max_num_seqs": 64,
    }
    assert serve_flags(arguments) == [
        *("--model", "/m"),
        *("--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--compilation-config", '{"mode": 0}', "--max-num-seqs", "64"),
    ]


def test_server_runs_as_without_evalq(config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    environment = serve_environment(config, True, tmp_path)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environment
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment
    assert environment["VLLM_CACHE_ROOT"].startswith(str(tmp_path)), "a cold start has caches of its own"
    assert "VLLM_CACHE_ROOT" not in serve_environment(config, True, None)


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("Directly load AOT compilation from path /x", "warm"),
        ("Directly load the compiled graph(s) for compile range (1, 8192) from the cache", "warm"),
        ("Dynamo bytecode transform time: 5.10 s", "cold"),
        ("", "unknown"),
    ],
)
def test_kind_of_a_start_is_read_from_the_log(log: str, kind: str) -> None:
    assert start_kind(log, eager=False) == kind
    assert start_kind(log, eager=True) == "eager"


RAW: dict[str, Any] = {
    "duration": 2.0,
    "window": [10.0, 12.0],
    "wall": 1_796_000_000.0,
    "start_times": [0.0, 0.5],
    "ttfts": [0.25, 0.0],
    "itls": [[0.25, 0.5], []],
    "input_lens": [5, 5],
    "output_lens": [3, 0],
    "wanted_lens": [3, 3],
    "errors": ["", "Traceback"],
    "before": {
        "vllm:prefix_cache_queries_total": 10.0,
        "vllm:prefix_cache_hits_total": 0.0,
        "vllm:num_preemptions_total": 1.0,
    },
    "after": {
        "vllm:prefix_cache_queries_total": 20.0,
        "vllm:prefix_cache_hits_total": 4.0,
        "vllm:num_preemptions_total": 3.0,
    },
}


def test_raw_times_become_requests_by_hand() -> None:
    first, failed = requests_of(RAW)
    assert (first.ok, first.latency, first.tpot) == (True, 1.0, 0.375)
    assert not failed.ok


def test_counters_become_preemptions_and_hits() -> None:
    repeat = repeat_of(RAW, 1, {"ttft_seconds": 0.3}, [])
    assert repeat.preemptions == 2
    assert repeat.prefix_hit_share == pytest.approx(0.4)
    assert (repeat.requests, repeat.requests_failed, repeat.wrong_lengths) == (2, 1, 0)
    assert repeat.figures["output_tokens_per_second"] == 1.5
    assert repeat.figures["goodput_share"] == 0.5
    assert len(level_problems([repeat] * 3, 1)) == 2, "errors and prefix hits"


def test_counters_are_summed_over_labels_without_buckets() -> None:
    text = (
        '# HELP x\nvllm:a_total{m="1"} 2\nvllm:a_total{m="2"} 3.5\nvllm:b_bucket{le="1"} 9\nother 1\nvllm:a_created 7\n'
    )
    assert read_counters(text) == {"vllm:a_total": 5.5}


def test_levels_run_forth_and_back() -> None:
    """A B B A."""
    assert run_order(2, 2) == [0, 1, 1, 0]
    assert run_order(3, 3) == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def test_no_run_repeats_the_prompts_of_another() -> None:
    first, second = (prompts({"seed": seed, "input_lengths": [4, 7]}, 1000) for seed in (1, 2))
    assert [len(p) for p in first] == [4, 7]
    assert first != second
    assert prompts({"seed": 1, "input_lengths": [4, 7]}, 1000) == first
