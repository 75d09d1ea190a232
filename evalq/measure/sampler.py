"""The device's sensors, sampled by a process of its own so that neither the engine nor the sender of requests waits for them.

`python sampler.py OUT SECONDS` writes one line of JSON about the devices, then one line per look, until its standard input ends.
NVML through pynvml (its own package, or the copy that vLLM carries), else amdsmi; without either it says so and ends.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evalq.loads.health import Sample

PCIE_BYTES_PER_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # per second, one direction
MIB = 1 << 20


class Sampling:
    """Sampling while the `with` block runs; `read` afterwards or meanwhile."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file = file
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sampling:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "evalq.measure.sampler", str(self._file), str(self._seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def read(self) -> tuple[dict[str, Any], list[Sample]]:
        """The line about the devices and all samples so far; a last line cut in half is left out."""
        try:
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except OSError:
            return {"source": "none", "note": "the sampler did not start", "devices": []}, []
        parsed = []
        for line in lines:
            with contextlib.suppress(ValueError):
                parsed.append(json.loads(line))
        if not parsed:
            return {"source": "none", "note": "the sampler said nothing", "devices": []}, []
        return parsed[0], [Sample(**{**row, "processes": tuple(row["processes"])}) for row in parsed[1:]]


def find_source() -> tuple[str, Any, str]:
    """("nvml" | "amdsmi" | "none", the opened library, why there is none)."""
    for load in (lambda: importlib.import_module("pynvml"), _pynvml_of_vllm):
        try:
            library: Any = load()
            library.nvmlInit()
            return "nvml", library, ""
        except Exception:
            continue
    try:
        library = importlib.import_module("amdsmi")
        library.amdsmi_init()
        return "amdsmi", library, ""
    except Exception:
        return "none", None, "no NVIDIA or AMD driver answers here (the CPU engine has no device sensors)"


def _pynvml_of_vllm() -> Any:
    """The file alone: importing it as a part of vLLM would import vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("no vllm")
    file = Path(spec.submodule_search_locations[0]) / "third_party" / "pynvml.py"
    found = importlib.util.spec_from_file_location("evalq_pynvml", file)
    if found is None or found.loader is None:
        raise ImportError(str(file))
    module = importlib.util.module_from_spec(found)
    sys.modules["evalq_pynvml"] = module
    found.loader.exec_module(module)
    return module


def visible(count: int, uuids: Sequence[str]) -> list[int]:
    """Indices of the devices that CUDA_VISIBLE_DEVICES leaves, in its order; all when it is unset."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return list(range(count))
    chosen = []
    for part in filter(None, (piece.strip() for piece in given.split(","))):
        if part.isdigit() and int(part) < count:
            chosen.append(int(part))
        else:
            chosen += [i for i, uuid in enumerate(uuids) if uuid.startswith(part)]
    return chosen


class NvmlDevice:
    """One NVIDIA GPU. What a driver does not offer stays None."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self.index = index
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._gpm = self._first_gpm()
        self._link = self._link_rate()

    def describe(self) -> dict[str, str]:
        nvml, handle = self._nvml, self._handle
        facts = {
            "name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
            "uuid": lambda: _text(nvml.nvmlDeviceGetUUID(handle)),
            "driver": lambda: _text(nvml.nvmlSystemGetDriverVersion()),
            "memory_bytes": lambda: str(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "power_limit_watts": lambda: str(nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            "max_sm_clock_mhz": lambda: str(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "link_bytes_per_second": lambda: str(self._link) if self._link else "",
            "bandwidth_source": lambda: "gpm" if self._gpm is not None else "share of the time with any memory traffic",
        }
        return {name: value for name, ask in facts.items() if (value := _or_none(ask))}

    def look(self) -> dict[str, Any]:
        nvml, handle = self._nvml, self._handle
        busy = _or_none(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        found: dict[str, Any] = {
            "memory_used_bytes": _or_none(lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
            "compute_busy": busy.gpu / 100 if busy else None,
            "bandwidth_busy": busy.memory / 100 if busy else None,
            "power_watts": _or_none(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "energy_joules": _or_none(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000),
            "sm_clock_mhz": _or_none(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            "memory_clock_mhz": _or_none(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))),
            "temperature_celsius": _or_none(lambda: float(nvml.nvmlDeviceGetTemperature(handle, 0))),
            "throttle_bits": self._throttle(),
            "processes": self._processes(),
        }
        return found | (self._gpm_look() if self._gpm is not None else self._pcie_look())

    def _throttle(self) -> int | None:
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            ask = getattr(self._nvml, name, None)
            bits = _or_none(ask, self._handle) if ask else None
            if bits is not None:
                return int(bits)
        return None

    def _processes(self) -> list[int]:
        found = _or_none(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        return sorted({int(process.pid) for process in found or []})

    def _link_rate(self) -> float | None:
        nvml, handle = self._nvml, self._handle
        generation = _or_none(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        width = _or_none(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
        lane = PCIE_BYTES_PER_LANE.get(generation or 0)
        return lane * width if lane and width else None

    def _pcie_look(self) -> dict[str, Any]:
        parts = [_or_none(self._nvml.nvmlDeviceGetPcieThroughput, self._handle, counter) for counter in (0, 1)]
        known = [part for part in parts if part is not None]
        return {"transfer_bytes_per_second": 1000.0 * max(known) if known else None}

    def _first_gpm(self) -> Any:
        """Hopper and newer: how much of the bandwidth was used, rather than whether any was."""
        nvml = self._nvml

        def begin() -> Any:
            if not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                return None
            return nvml.nvmlGpmSampleGet(self._handle, nvml.nvmlGpmSampleAlloc())

        return _or_none(begin)

    def _gpm_look(self) -> dict[str, Any]:
        """Since the look before. The link counts in its busier direction, as its rate is that of one."""
        nvml = self._nvml

        def ask() -> dict[str, Any]:
            now = nvml.nvmlGpmSampleGet(self._handle, nvml.nvmlGpmSampleAlloc())
            wanted = (
                nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
                nvml.NVML_GPM_METRIC_SM_UTIL,
                nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
                nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
            )
            question = nvml.c_nvmlGpmMetricsGet_t()
            question.version, question.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(wanted)
            question.sample1, question.sample2 = self._gpm, now
            for place, metric in enumerate(wanted):
                question.metrics[place].metricId = metric
            nvml.nvmlGpmMetricsGet(question)
            nvml.nvmlGpmSampleFree(self._gpm)
            self._gpm = now
            bandwidth, compute, sent, received = (question.metrics[i].value for i in range(len(wanted)))
            return {
                "bandwidth_busy": bandwidth / 100,
                "compute_busy": compute / 100,
                "transfer_bytes_per_second": max(sent, received) * MIB,
            }

        return _or_none(ask) or {}


class AmdDevice:
    """One AMD GPU through amdsmi. Written after its documentation; not tried on a device."""

    def __init__(self, smi: Any, index: int) -> None:
        self._smi = smi
        self.index = index
        self._handle = smi.amdsmi_get_processor_handles()[index]

    def describe(self) -> dict[str, str]:
        asic = _or_none(lambda: self._smi.amdsmi_get_gpu_asic_info(self._handle)) or {}
        driver = _or_none(lambda: self._smi.amdsmi_get_gpu_driver_info(self._handle)) or {}
        return {"name": str(asic.get("market_name", "")), "driver": str(driver.get("driver_version", ""))}

    def look(self) -> dict[str, Any]:
        smi, handle = self._smi, self._handle
        busy = _or_none(lambda: smi.amdsmi_get_gpu_activity(handle)) or {}
        power = _or_none(lambda: smi.amdsmi_get_power_info(handle)) or {}
        memory = _or_none(lambda: smi.amdsmi_get_gpu_vram_usage(handle)) or {}
        return {
            "memory_used_bytes": _number(memory.get("vram_used"), float(MIB)),
            "compute_busy": _number(busy.get("gfx_activity"), 0.01),
            "bandwidth_busy": _number(busy.get("umc_activity"), 0.01),
            "power_watts": _number(power.get("current_socket_power") or power.get("average_socket_power"), 1.0),
            "processes": [],
        }


def _number(value: Any, factor: float) -> float | None:
    return float(value) * factor if isinstance(value, int | float) else None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _or_none(ask: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return ask(*arguments)
    except Exception:  # each driver refuses other questions, with exceptions of its own
        return None


def open_devices(source: str, library: Any) -> list[Any]:
    """The visible devices of an opened library."""
    if source == "nvml":
        count = int(library.nvmlDeviceGetCount())
        uuids = [
            _text(_or_none(lambda i: library.nvmlDeviceGetUUID(library.nvmlDeviceGetHandleByIndex(i)), i) or "")
            for i in range(count)
        ]
        return [NvmlDevice(library, i) for i in visible(count, uuids)]
    if source == "amdsmi":
        return [AmdDevice(library, i) for i in range(len(library.amdsmi_get_processor_handles()))]
    return []


def main(arguments: list[str]) -> int:
    file, seconds = Path(arguments[0]), float(arguments[1])
    over = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        over.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    source, library, note = find_source()
    devices = open_devices(source, library)
    with open(file, "w", encoding="utf-8", buffering=1) as out:
        header = {"source": source, "note": note, "devices": [device.describe() for device in devices]}
        out.write(json.dumps({**header, "wall_minus_monotonic": time.time() - time.monotonic()}) + "\n")
        while devices and not over.wait(seconds):
            for device in devices:
                out.write(json.dumps({"time": time.monotonic(), "gpu": device.index, **device.look()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
