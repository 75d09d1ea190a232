"""Load of the machine while it measured, for MLflow's page "System metrics": MLflow's own sensors and names.

Sampled in the process that talks to MLflow and kept beside the record, so that a store that is away costs nothing.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from evalq.records import write_text

SYSTEM_FILE = "system.json"
INTERVAL_SECONDS = 5.0
SAMPLES_AT_MOST = 200  # of one run; a long cell is thinned out evenly
PREFIX = "system/"

Sample = tuple[int, dict[str, float]]  # Unix milliseconds, values by MLflow's name


class Sampler:
    """Samples CPU, memory, disk, network and GPUs until its process ends."""

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._interval = interval_seconds
        self._samples: list[Sample] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name="evalq-system")

    def start(self) -> None:
        """Begin, once."""
        if not self._thread.is_alive():
            self._thread.start()

    def between(self, start_ms: int, end_ms: int) -> list[Sample]:
        """Samples of a window of time, thinned out to SAMPLES_AT_MOST."""
        return thinned([sample for sample in list(self._samples) if start_ms <= sample[0] <= end_ms])

    def _run(self) -> None:
        try:
            sensors = _sensors()
        except Exception:  # a sensor library may fail in any way; then there are no system metrics
            return
        while True:
            time.sleep(self._interval)
            self._samples.append((int(1000 * time.time()), _read(sensors)))


def thinned(samples: list[Sample]) -> list[Sample]:
    """At most SAMPLES_AT_MOST of them, evenly spread."""
    step = -(-len(samples) // SAMPLES_AT_MOST)
    return samples[:: max(step, 1)]


def _sensors() -> list[Any]:
    """MLflow's monitors of what this machine has."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

    found = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    for kind in (GPUMonitor, ROCMMonitor):
        try:
            found.append(kind())
            break
        except Exception:  # each says in its own way that there is no such GPU
            continue
    found[0].collect_metrics()  # the first reading of the CPU's load is of no interval
    found[0].clear_metrics()
    return found


def _read(sensors: list[Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    for sensor in sensors:
        try:
            sensor.collect_metrics()
            values.update({name: float(value) for name, value in sensor.aggregate_metrics().items()})
        except Exception:  # a GPU that is reset, a disk that is unmounted: this reading is left out
            continue
        finally:
            sensor.clear_metrics()
    return values


def keep_samples(folder: Path, samples: list[Sample]) -> None:
    """Write samples beside a record, unless there are some already (a later verdict, a reused baseline) or none."""
    file = folder / SYSTEM_FILE
    if samples and not file.exists():
        try:
            write_text(file, json.dumps({"samples": samples}) + "\n")
        except OSError:
            return


def read_samples(folder: Path) -> list[Sample]:
    """Samples kept beside a record; none where there is no readable file."""
    try:
        data = json.loads((folder / SYSTEM_FILE).read_text(encoding="utf-8"))["samples"]
        return [(int(stamp), {str(k): float(v) for k, v in values.items()}) for stamp, values in data]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
