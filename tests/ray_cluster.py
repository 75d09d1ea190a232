"""A Ray cluster of several machines that are all this one: `ray start` processes with declared resources, which can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
OBJECT_STORE_BYTES = 80 * 1024**2
START_SECONDS = 420.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody had a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]
    finally:
        for free in sockets:
            free.close()


def own_address() -> str:
    """This machine's address as others see it; Ray does not find nodes by 127.0.0.1. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:  # no network at all
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class Cluster:
    """`machines` processes; each declares one of `resource`, and has a store and device locks of its own."""

    def __init__(self, folder: Path, machines: int = 3, resource: str = "evalq_cpu") -> None:
        self._folder = folder
        self._resource = resource
        self.machines: list[subprocess.Popen[bytes]] = []
        self.homes = [folder / f"machine-{number}" for number in range(machines)]
        self._port = free_ports(1)[0]
        self._host = own_address()

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    def __enter__(self) -> Self:
        try:
            self._start(self.homes[0], ["--head", f"--port={self._port}", "--include-dashboard=false"])
            self._wait_for_machines(1)
            # One by one: raylets that start together on one machine may choose the same port.
            for number, home in enumerate(self.homes[1:], 2):
                self._start(home, [f"--address={self.address}"])
                self._wait_for_machines(number)
        except BaseException:
            self.close()
            raise
        return self

    def _start(self, home: Path, where: list[str]) -> None:
        home.mkdir(parents=True, exist_ok=True)
        own = {"EVALQ_HOME": str(home), "EVALQ_LEASES": str(home / "leases"), "RAY_USAGE_STATS_ENABLED": "0"}
        # A busy machine takes longer than Ray's patience to start its own helpers.
        own |= {"RAY_raylet_start_wait_time_s": "300", "RAY_agent_register_timeout_ms": "300000"}
        own |= {"RAY_health_check_timeout_ms": "30000"}
        command = [
            *RAY,
            "start",
            *where,
            "--block",
            "--node-ip-address=127.0.0.1",
            "--num-cpus=2",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
        ]
        command.append(f"--resources={json.dumps({self._resource: 1})}")
        with open(home / "ray.log", "ab") as log:
            self.machines.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **own},
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    def _wait_for_machines(self, count: int) -> None:
        """Until so many machines have joined, as a process of its own sees it."""
        code = (
            "import ray, sys, json\n"
            f"ray.init(address={self.address!r}, log_to_driver=False, logging_level='ERROR')\n"
            "print('machines', sum(n['Alive'] for n in ray.nodes()))"
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that comes too early may hang
                done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
                said = [
                    line.split() for line in done.stdout.splitlines() if line.startswith("machines ")
                ]  # Ray talks too
                if done.returncode == 0 and said and int(said[0][1]) >= count:
                    return
            time.sleep(0.5)
        raise TimeoutError(f"{count} machines have not joined within {START_SECONDS:g} s")

    def kill(self, number: int) -> list[int]:
        """SIGKILL to everything of one machine, as if its power went; returns who was killed."""
        victims = [
            *psutil.Process(self.machines[number].pid).children(recursive=True),
            psutil.Process(self.machines[number].pid),
        ]
        for process in victims:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.machines[number].wait()
        return [process.pid for process in victims]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for number in reversed(range(len(self.machines))):
            if self.machines[number].poll() is None:
                self.kill(number)
