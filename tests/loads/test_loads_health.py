"""Sensors against limits: every verdict, and the energy of a window."""

from __future__ import annotations

from typing import Any

import pytest

from evalq.config import HealthConfig
from evalq.loads.health import Sample, assess, joules

GIB = 1 << 30


def samples(count: int = 10, gpu: int = 0, **values: Any) -> list[Sample]:
    return [Sample(time=float(i), gpu=gpu, **values) for i in range(count)]


def verdicts(seen: list[Sample], offload: bool = False, link: float | None = None, **limits: Any) -> dict[str, str]:
    health = assess(seen, [(0.0, 100.0)], HealthConfig(**limits), offload, link, "nvml", [])
    return {check.name: check.verdict for check in health.checks}


@pytest.mark.parametrize(
    ("values", "name", "verdict"),
    [
        ({"compute_busy": 0.71}, "compute busy", "good"),
        ({"compute_busy": 0.70}, "compute busy", "bad"),
        ({"bandwidth_busy": 0.61}, "memory bandwidth busy", "good"),
        ({"bandwidth_busy": 0.2}, "memory bandwidth busy", "bad"),
        ({}, "compute busy", "none"),
        ({}, "memory swing", "none"),
        ({"memory_used_bytes": 10.0 * GIB}, "memory swing", "good"),
        ({"compute_busy": 0.9}, "difference between GPUs", "none"),
    ],
)
def test_verdicts(values: dict[str, float], name: str, verdict: str) -> None:
    assert verdicts(samples(**values))[name] == verdict


@pytest.mark.parametrize(("high", "verdict"), [(10.4, "good"), (11.0, "warning"), (12.0, "bad")])
def test_memory_swing_has_a_target_and_a_limit(high: float, verdict: str) -> None:
    """(10.4 - 10) / 10.2 = 3.9 %; (11 - 10) / 10.5 = 9.5 %; (12 - 10) / 11 = 18 %."""
    seen = [*samples(5, memory_used_bytes=10.0 * GIB), *samples(5, memory_used_bytes=high * GIB)]
    assert verdicts(seen)["memory swing"] == verdict


def test_unequal_gpus_are_bad() -> None:
    seen = [*samples(compute_busy=0.9), *samples(gpu=1, compute_busy=0.75)]
    assert verdicts(seen)["difference between GPUs"] == "bad"
    assert verdicts(seen, gpu_difference=0.2)["difference between GPUs"] == "good"


def test_host_link_counts_only_under_offload() -> None:
    seen = samples(transfer_bytes_per_second=45e9)
    assert verdicts(seen)["host-device traffic"] == "none"
    assert verdicts(seen, offload=True, link=50e9)["host-device traffic"] == "good"
    assert verdicts(seen, offload=True, link=63e9)["host-device traffic"] == "bad"
    assert verdicts(seen, offload=True)["host-device traffic"] == "none"


def test_only_samples_inside_the_windows_count() -> None:
    seen = [Sample(0.0, 0, compute_busy=0.0), Sample(5.0, 0, compute_busy=0.9), Sample(9.0, 0, compute_busy=0.0)]
    health = assess(seen, [(4.0, 6.0)], HealthConfig(), False, None, "nvml", [])
    assert health.samples == 1
    assert health.means["compute_busy_share"] == 0.9
    empty = assess(seen, [(6.0, 7.0)], HealthConfig(), False, None, "nvml", [])
    assert "no sample fell into a measured window" in empty.note


def test_remedy_is_said_unless_good() -> None:
    health = assess(samples(compute_busy=0.1), [(0.0, 9.0)], HealthConfig(), False, None, "nvml", [])
    assert "raise concurrency" in next(c.meaning for c in health.checks if c.name == "compute busy")


def test_throttle_bits_are_named_once() -> None:
    seen = [Sample(1.0, 0, throttle_bits=0x4), Sample(2.0, 0, throttle_bits=0x44), Sample(3.0, 0, throttle_bits=0x1)]
    health = assess(seen, [(0.0, 9.0)], HealthConfig(), False, None, "nvml", [])
    assert [reason.split(":")[0] for reason in health.throttling] == ["power cap", "thermal slowdown by the hardware"]


def test_processes_that_came_later_are_strangers() -> None:
    seen = [Sample(1.0, 0, processes=(5,)), Sample(2.0, 0, processes=(5, 9))]
    assert assess(seen, [(0.0, 9.0)], HealthConfig(), False, None, "nvml", [], {5}).foreign_processes == [9]
    assert assess(seen, [(0.0, 9.0)], HealthConfig(), False, None, "nvml", []).foreign_processes == []


def test_energy_of_a_window_is_linear_between_samples_and_summed_over_gpus() -> None:
    """100 W and 50 W: from 0.5 s to 2.5 s 200 J + 100 J."""
    seen = [Sample(float(i), gpu, energy_joules=i * watts) for i in range(4) for gpu, watts in ((0, 100.0), (1, 50.0))]
    assert joules(seen, (0.5, 2.5)) == pytest.approx(300.0)
    assert joules(seen, (0.5, 3.5)) is None
    assert joules([], (0.0, 1.0)) is None
    assert joules(samples(), (0.0, 1.0)) is None
