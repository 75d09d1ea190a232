"""What runs inside the engine for the KV cache, on layers and caches of a few lines."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from evalq.measure.kv.probe import KvProbe, scheduled_rows  # noqa: E402 - after the skip


class Backend:
    """Writes to its cache what it is given."""

    def __init__(self) -> None:
        self.written = 0

    def do_kv_cache_update(self, *_: Any) -> None:
        self.written += 1


class Attention(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, k: float, v: float) -> None:
        super().__init__()
        self.register_buffer("_k_scale", torch.tensor(k))
        self.register_buffer("_v_scale", torch.tensor(v))
        self._k_scale_float, self._v_scale_float = k, v
        self._k_scale_cpu = torch.tensor(k)
        self.kv_cache_dtype = "fp8_e4m3"
        self.impl = Backend()


class Worker(KvProbe):
    def __init__(self) -> None:
        self.layers = [Attention(1.0, 1.0), Attention(0.5, 0.25)]
        model = torch.nn.ModuleDict({"a": self.layers[0], "b": self.layers[1], "mlp": torch.nn.Linear(2, 2)})
        with torch.inference_mode():  # as some engines allocate
            caches = [torch.full((4, 8), 7, dtype=torch.uint8), torch.full((4, 8), 9, dtype=torch.uint8)]
        self.model_runner = SimpleNamespace(model=model, kv_caches=[caches[0], (caches[1], caches[1][:2])])


def test_scales_are_harmed_in_place_and_exactly_restored() -> None:
    worker = Worker()
    address = worker.layers[1]._k_scale.data_ptr()
    assert worker.evalq_scale_kv(1e3) == 2
    assert worker.layers[1]._k_scale.item() == pytest.approx(500.0)
    assert worker.layers[1]._k_scale_float == pytest.approx(500.0)
    assert worker.layers[1]._k_scale_cpu.item() == pytest.approx(500.0)
    assert worker.evalq_scale_kv(1e-3) == 2
    assert worker.layers[1]._v_scale.item() == pytest.approx(0.00025), "from the scale as loaded, not from the last one"
    worker.evalq_scale_kv(1.0)
    assert worker.layers[1]._k_scale.item() == 0.5
    assert worker.layers[1]._v_scale_float == 0.25
    assert worker.layers[1]._k_scale.data_ptr() == address


def test_layers_are_described() -> None:
    answer = json.loads(Worker().evalq_kv_layers())
    assert answer["b"] == {
        "k_scale": [0.5], "v_scale": [0.25], "kv_dtype": "fp8_e4m3", "implementation": "Backend", "computed_by_engine": False,
    }  # fmt: skip
    assert list(answer) == ["a", "b"]


def test_cache_is_erased_once_per_storage() -> None:
    worker = Worker()
    assert worker.evalq_erase_kv() == 64
    assert worker.model_runner.kv_caches[0].sum() == 0
    assert worker.model_runner.kv_caches[1][0].sum() == 0


def test_writes_can_be_blocked_and_let_through_again() -> None:
    worker = Worker()
    backend: Any = worker.layers[0].impl
    assert worker.evalq_block_kv_writes(True) == 2
    backend.do_kv_cache_update(1, 2)
    assert backend.written == 0
    worker.evalq_block_kv_writes(False)
    worker.evalq_block_kv_writes(False)
    backend.do_kv_cache_update(1, 2)
    assert backend.written == 1


def test_steps_are_noted_for_scored_requests_only() -> None:
    def request(asked: Any, computed: int) -> Any:
        return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=asked), num_computed_tokens=computed)

    worker = Worker()
    runner = worker.model_runner
    assert "has no _get_prompt_logprobs_dict" in worker.evalq_watch_steps()
    calls: list[Any] = []
    runner._get_prompt_logprobs_dict = lambda *given: calls.append(given) or "own answer"
    runner.requests = {"x": request({"evalq": [3, 1]}, 64), "y": request(None, 0)}
    assert worker.evalq_watch_steps() == "" == worker.evalq_watch_steps()
    assert runner._get_prompt_logprobs_dict("states", {"x": 1, "y": 9}) == "own answer"
    assert len(calls) == 1
    assert worker.evalq_take_steps() == [(3, 64, 1)]
    assert worker.evalq_take_steps() == []
    assert scheduled_rows(runner, {"y": 4}) == []
