"""Is the device free? Memory that an earlier process still holds would be measured as ours."""

from __future__ import annotations

import subprocess
import time

from evalq.errors import MeasurementError

WAIT_SECONDS = 30.0


def check_device_clean(utilization: float, wait_seconds: float = WAIT_SECONDS) -> None:
    """Wait for the first visible GPU to have `utilization` of its memory free.

    Errors: MeasurementError (dirty_device) naming the process that holds the memory.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        used_share = memory_used_share()
        if used_share is None or used_share <= 1.0 - utilization + 0.02:
            return
        if time.monotonic() > deadline:
            raise MeasurementError(
                f"the GPU is not clean: {used_share:.0%} of its memory is held by {holders() or 'an unseen process'}; "
                "end that process, or lower gpu.memory_utilization",
                "dirty_device",
            )
        time.sleep(1.0)


def memory_used_share() -> float | None:
    """Share of the first GPU's memory in use, device-wide; None where the driver does not say."""
    answer = _nvidia_smi("--query-gpu=memory.used,memory.total")
    try:
        used, total = (float(part) for part in answer.splitlines()[0].split(","))
        return used / total
    except (IndexError, ValueError, ZeroDivisionError):
        return None


def holders() -> str:
    """ "pid 123 (name), ..." of the processes on the GPUs."""
    lines = [
        line.split(",") for line in _nvidia_smi("--query-compute-apps=pid,process_name").splitlines() if "," in line
    ]
    return ", ".join(f"pid {pid.strip()} ({name.strip()})" for pid, name, *_ in lines)


def _nvidia_smi(query: str) -> str:
    try:
        answer = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return answer.stdout
    except (OSError, subprocess.SubprocessError):
        return ""
