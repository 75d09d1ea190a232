"""The device's sensors in the measured windows against the limits of the config, each with a verdict and a remedy. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from evalq.config import HealthConfig
from evalq.loads.results import Health, HealthCheck

Window = tuple[float, float]  # seconds on the samples' clock
# NVML's bits of "clocks event reasons"; the words before the colon decide whether a figure still counts.
THROTTLE_REASONS = {
    0x4: "power cap: the power limit of the device",
    0x8: "hardware slowdown: temperature, power or current",
    0x10: "sync boost: held to the slowest GPU of a group",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "hardware power brake",
}
MEANS = {
    "power_watts": "power_watts",
    "sm_clock_mhz": "sm_clock_mhz",
    "memory_clock_mhz": "memory_clock_mhz",
    "temperature_celsius": "temperature_celsius",
    "compute_busy": "compute_busy_share",
    "bandwidth_busy": "bandwidth_busy_share",
    "memory_used_bytes": "memory_used_bytes",
    "transfer_bytes_per_second": "transfer_bytes_per_second",
}


@dataclass(frozen=True)
class Sample:
    """One look at one GPU. None where the device does not say. Shares of 1."""

    time: float
    gpu: int
    memory_used_bytes: float | None = None  # device-wide
    compute_busy: float | None = None
    bandwidth_busy: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None  # counter
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_celsius: float | None = None
    transfer_bytes_per_second: float | None = None  # host link, both directions
    throttle_bits: int | None = None
    processes: tuple[int, ...] = ()


def inside(samples: Iterable[Sample], windows: Sequence[Window]) -> list[Sample]:
    """The samples of the measured windows."""
    return [sample for sample in samples if any(low <= sample.time <= high for low, high in windows)]


def joules(samples: Sequence[Sample], window: Window) -> float | None:
    """Energy of all GPUs in the window, from their counters, linear between samples; None where none covers it."""
    total = 0.0
    gpus = sorted({sample.gpu for sample in samples})
    for gpu in gpus:
        points = [(s.time, s.energy_joules) for s in samples if s.gpu == gpu and s.energy_joules is not None]
        ends = [_at([(t, e) for t, e in points if e is not None], moment) for moment in window]
        if ends[0] is None or ends[1] is None:
            return None
        total += ends[1] - ends[0]
    return total if gpus else None


def _at(points: Sequence[tuple[float, float]], moment: float) -> float | None:
    for (t0, e0), (t1, e1) in pairwise(points):
        if t0 <= moment <= t1:
            return e0 + (e1 - e0) * (moment - t0) / (t1 - t0) if t1 > t0 else e0
    return None


def assess(
    samples: Sequence[Sample],
    windows: Sequence[Window],
    limits: HealthConfig,
    offload: bool,
    link_bytes_per_second: float | None,
    source: str,
    devices: list[dict[str, str]],
    own_processes: Iterable[int] = (),
) -> Health:
    """All checks over the windows. own_processes: those on the device when the engine was ready, before any request."""
    seen = inside(samples, windows)
    checks = [
        memory_swing(seen, limits),
        at_least("compute busy", _mean(seen, "compute_busy"), limits.compute_busy, COMPUTE_REMEDY),
        at_least("memory bandwidth busy", _mean(seen, "bandwidth_busy"), limits.bandwidth_busy, BANDWIDTH_REMEDY),
        gpu_difference(seen, limits),
        transfer(seen, limits, offload, link_bytes_per_second),
    ]
    bits = 0
    for sample in seen:
        bits |= sample.throttle_bits or 0
    known = set(own_processes)
    means = {name: value for key, name in MEANS.items() if (value := _mean(seen, key)) is not None}
    return Health(
        source=source,
        note=""
        if seen
        else "no sample fell into a measured window; make it longer or load.health.interval_seconds shorter",
        checks=checks,
        throttling=[name for bit, name in THROTTLE_REASONS.items() if bits & bit],
        foreign_processes=sorted({pid for sample in seen for pid in sample.processes} - known) if known else [],
        devices=devices,
        means=means,
        samples=len(seen),
    )


def without_sensors(note: str) -> Health:
    """Health where nothing can be sampled, with the reason."""
    return Health("none", note, [], [], [], [], {}, 0)


COMPUTE_REMEDY = "the device waits for work: raise concurrency or engine.max_num_seqs, or look for time on the host"
BANDWIDTH_REMEDY = "memory is not what limits: raise concurrency, or a scheme with smaller weights gains little here"


def at_least(name: str, value: float | None, limit: float, remedy: str) -> HealthCheck:
    """A share that ought to be above its limit."""
    if value is None:
        return HealthCheck(name, None, limit, "none", "the device does not report it")
    if value > limit:
        return HealthCheck(name, value, limit, "good", f"{value:.0%}, above {limit:.0%}")
    return HealthCheck(name, value, limit, "bad", f"{value:.0%}, not above {limit:.0%}: {remedy}")


def memory_swing(seen: Sequence[Sample], limits: HealthConfig) -> HealthCheck:
    """(highest - lowest) / mean of the memory in use, the worst GPU."""
    name, target, limit = "memory swing", limits.memory_swing_target, limits.memory_swing_limit
    swings = []
    for gpu in {sample.gpu for sample in seen}:
        used = [s.memory_used_bytes for s in seen if s.gpu == gpu and s.memory_used_bytes is not None]
        if used and sum(used):
            swings.append((max(used) - min(used)) / (sum(used) / len(used)))
    if not swings:
        return HealthCheck(name, None, limit, "none", "the device does not report it")
    value = max(swings)
    if value <= target:
        return HealthCheck(name, value, limit, "good", f"{value:.1%}, at most {target:.0%}")
    verdict = "warning" if value <= limit else "bad"
    return HealthCheck(
        name,
        value,
        limit,
        verdict,
        f"{value:.1%}, above {target if verdict == 'warning' else limit:.0%}: something outside the engine's own pool "
        "grows; lower gpu.memory_utilization, and look for other processes",
    )


def gpu_difference(seen: Sequence[Sample], limits: HealthConfig) -> HealthCheck:
    """Busiest minus idlest GPU."""
    name, limit = "difference between GPUs", limits.gpu_difference
    means = []
    for gpu in sorted({sample.gpu for sample in seen}):
        mean = _mean([s for s in seen if s.gpu == gpu], "compute_busy")
        if mean is not None:
            means.append(mean)
    if len(means) < 2:
        return HealthCheck(
            name, None, limit, "none", "one GPU: nothing to compare" if means else "no sensor reports it"
        )
    value = max(means) - min(means)
    if value < limit:
        return HealthCheck(name, value, limit, "good", f"{value:.0%}, below {limit:.0%}")
    return HealthCheck(
        name,
        value,
        limit,
        "bad",
        f"{value:.0%}, not below {limit:.0%}: the GPUs do unequal work; check the links between them, clocks, and the "
        "split of heads and experts",
    )


def transfer(
    seen: Sequence[Sample], limits: HealthConfig, offload: bool, link_bytes_per_second: float | None
) -> HealthCheck:
    """Traffic between host and device as a share of the link, under KV offload."""
    name, limit = "host-device traffic", limits.transfer_busy
    if not offload:
        return HealthCheck(name, None, limit, "none", "no KV offload: nothing to transfer")
    rate = _mean(seen, "transfer_bytes_per_second")
    if rate is None or not link_bytes_per_second:
        return HealthCheck(name, None, limit, "none", "the device does not report it")
    value = rate / link_bytes_per_second
    if value > limit:
        return HealthCheck(name, value, limit, "good", f"{value:.0%} of the link, above {limit:.0%}")
    return HealthCheck(
        name,
        value,
        limit,
        "bad",
        f"{value:.0%} of the link, not above {limit:.0%}: the link is not what limits; the offloaded blocks are few or seldom "
        "read again, so offload brings little here",
    )


def _mean(samples: Sequence[Sample], key: str) -> float | None:
    values = [value for sample in samples if (value := getattr(sample, key)) is not None]
    return math.fsum(values) / len(values) if values else None
