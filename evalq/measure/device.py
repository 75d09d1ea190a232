"""Is the device free? Memory that an earlier process still holds would be measured as ours."""

from __future__ import annotations

import os
import subprocess
import time

from evalq.errors import MeasurementError

WAIT_SECONDS = 30.0


def check_device_clean(utilization: float, wait_seconds: float = WAIT_SECONDS, ids: list[str] | None = None) -> None:
    """Wait for the GPUs `ids` (None = the first visible one) to have `utilization` of their memory free.

    Errors: MeasurementError (dirty_device) naming the process that holds the memory.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        used_share = memory_used_share(ids)
        if used_share is None or used_share <= 1.0 - utilization + 0.02:
            return
        if time.monotonic() > deadline:
            raise MeasurementError(
                f"the GPU is not clean: {used_share:.0%} of its memory is held by {holders(ids) or 'an unseen process'}; "
                "end that process, or lower gpu.memory_utilization",
                "dirty_device",
            )
        time.sleep(1.0)


def check_device_alone(allowed: bool, ids: list[str] | None = None, wait_seconds: float = WAIT_SECONDS) -> None:
    """Wait for these GPUs to have no program on them: speed beside another program means nothing.

    Errors: MeasurementError (dirty_device) naming the programs, unless that is `allowed`.
    """
    deadline = time.monotonic() + wait_seconds
    while not allowed and (found := holders(ids)):
        if time.monotonic() > deadline:
            raise MeasurementError(
                f"the GPU is shared with {found}, so no speed can be measured on it; end that, choose another GPU with "
                "CUDA_VISIBLE_DEVICES, or leave the load out with load=off",
                "dirty_device",
            )
        time.sleep(1.0)


def gpu_ids() -> list[str]:
    """Ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES or the driver names them; empty where nobody does."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [part.strip() for part in given.split(",") if part.strip() not in ("", "-1")]
    return [line.strip() for line in _nvidia_smi("--query-gpu=index").splitlines() if line.strip()]


def memory_used_share(ids: list[str] | None = None) -> float | None:
    """Largest share of memory in use, device-wide, over these GPUs (None = the first); None where the driver does not say."""
    lines = _nvidia_smi("--query-gpu=memory.used,memory.total" + _only(ids)).splitlines()
    shares = []
    for line in lines[: len(ids) if ids else 1]:
        try:
            used, total = (float(part) for part in line.split(","))
            shares.append(used / total)
        except (ValueError, ZeroDivisionError):
            return None
    return max(shares, default=None)


def holders(ids: list[str] | None = None) -> str:
    """ "pid 123 (name), ..." of the processes on the GPUs."""
    answer = _nvidia_smi("--query-compute-apps=pid,process_name" + _only(ids))
    lines = [line.split(",") for line in answer.splitlines() if "," in line]
    return ", ".join(f"pid {pid.strip()} ({name.strip()})" for pid, name, *_ in lines)


def _only(ids: list[str] | None) -> str:
    return f" --id={','.join(ids)}" if ids else ""


def _nvidia_smi(query: str) -> str:
    try:
        answer = subprocess.run(
            ["nvidia-smi", *query.split(), "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return answer.stdout
    except (OSError, subprocess.SubprocessError):
        return ""
