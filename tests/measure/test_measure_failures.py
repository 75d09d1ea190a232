"""What engines say when they fail, as they say it, and what becomes of it; a device that is not free."""

from __future__ import annotations

import pytest

from evalq.errors import ConfigError, InfeasibleError, MeasurementError
from evalq.measure import device
from evalq.measure.failures import causes, classify, classify_text

SAID = [
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "no_kv_room"),
    ("To serve at least one request with the models's max seq len (8192), (4.00 GiB KV cache is needed, which is larger than "
     "the available KV cache memory (1.00 GiB)", "no_kv_room"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "oom"),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried", "oom"),
    ("Free memory on device (3.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB)", "oom"),
    ("OSError: [Errno 98] Address already in use", "port"),
    ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", "port"),
    ("safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata", "checkpoint"),
    ("RuntimeError: Cannot find any model weights with `/models/x`", "checkpoint"),
    ("OSError: [Errno 28] No space left on device", "disk"),
    ("ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 89.", "unsupported"),
    ("NotImplementedError: no kernel", "unsupported"),
    ("RuntimeError: something else entirely", "engine"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind"), SAID)
def test_engine_texts_have_their_kind(text: str, kind: str) -> None:
    assert classify_text(text)[0] == kind


@pytest.mark.parametrize(("text", "kind"), SAID)
def test_only_the_unsupported_is_infeasible(text: str, kind: str) -> None:
    error = classify(RuntimeError(text), "start")
    if kind == "unsupported":
        assert type(error) is InfeasibleError
        assert error.exit_code == 4
    else:
        assert isinstance(error, MeasurementError)
        assert (error.kind, error.exit_code) == (kind, 5)
    assert "\n" not in str(error).strip()
    assert str(error).startswith("the engine failed at start: ")


def test_cause_behind_the_engines_own_wrapper_decides() -> None:
    try:
        try:
            raise MemoryError("out of memory while loading layer 7")
        except MemoryError as error:
            raise RuntimeError("Engine core initialization failed. See root cause above.") from error
    except RuntimeError as error:
        known = classify(error, "start")
    assert isinstance(known, MeasurementError)
    assert known.kind == "oom"
    assert "layer 7" in str(known)


def test_own_errors_pass_through() -> None:
    own = ConfigError("unknown key")
    assert classify(own, "start") is own


def test_circle_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert causes(first) == [first, second]
    assert isinstance(classify(first, "run"), MeasurementError)


def test_error_without_words_still_has_a_name() -> None:
    assert "KeyError" in str(classify(KeyError(), "run"))


def smi(monkeypatch: pytest.MonkeyPatch, memory: str, processes: str = "") -> None:
    monkeypatch.setattr(device, "_nvidia_smi", lambda query: memory if "memory.used" in query else processes)


def test_free_device_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    smi(monkeypatch, "1000, 80000\n")
    device.check_device_clean(0.9, wait_seconds=0.0)
    smi(monkeypatch, "")
    device.check_device_clean(0.9, wait_seconds=0.0)


def test_device_in_use_names_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """b3."""
    smi(monkeypatch, "40000, 80000\n", "123, /usr/bin/python\n456, other\n")
    monkeypatch.setattr(device.time, "sleep", lambda seconds: None)
    with pytest.raises(
        MeasurementError, match=r"50% of its memory is held by pid 123 \(/usr/bin/python\), pid 456 \(other\)"
    ) as caught:
        device.check_device_clean(0.9, wait_seconds=-1.0)
    assert caught.value.kind == "dirty_device"


def test_device_that_becomes_free_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["70000, 80000", "60000, 80000", "100, 80000"])
    monkeypatch.setattr(device, "_nvidia_smi", lambda query: next(answers))
    monkeypatch.setattr(device.time, "sleep", lambda seconds: None)
    device.check_device_clean(0.9, wait_seconds=60.0)


def test_small_share_fits_beside_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    smi(monkeypatch, "40000, 80000\n")
    device.check_device_clean(0.5, wait_seconds=0.0)


def test_assertion_without_words_is_told_by_its_line() -> None:
    """Seen: vLLM 0.26 on an H200 takes an E5M2 cache as an argument and then asserts that it is another one."""

    class Layer:
        kv_cache_dtype = "fp8_e5m2"

        def forward(self) -> None:
            assert self.kv_cache_dtype in {"fp8", "fp8_e4m3", "nvfp4"}

    with pytest.raises(AssertionError) as caught:
        Layer().forward()
    plain = AssertionError()
    plain.__traceback__ = caught.value.__traceback__  # pytest writes words into its own assertions
    found = classify(plain, "start")
    assert isinstance(found, InfeasibleError)
    assert 'assert self.kv_cache_dtype in {"fp8"' in str(found)
