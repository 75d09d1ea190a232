"""A worker with all its descendants, and the end of them: whoever dies first, none is left.

Every descendant inherits an environment variable, so those that left the process group or lost their parent are found too.
Run as a script with LEADER and MARK, this file is the guard: it waits until evalq itself is gone, however it went, and ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

MARK = "EVALQ_RUN"
KILL_GRACE_SECONDS = 5.0


class Family:
    """The worker `leader`, its process group, and every process with its mark in the environment."""

    def __init__(self, leader: int, mark: str, name: str = MARK) -> None:
        self.leader = leader
        self._mark = mark
        self._name = name
        self._born = 0.0
        import psutil

        with contextlib.suppress(psutil.Error):
            self._born = psutil.Process(leader).create_time()

    def members(self) -> list[psutil.Process]:
        """Who is alive now. Processes older than the leader are strangers, also when they have its number."""
        import psutil

        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.create_time() >= self._born and self._belongs(process):
                    found.append(process)
        return found

    def _belongs(self, process: psutil.Process) -> bool:
        import psutil

        if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
            return False
        if process.pid == self.leader:
            return process.create_time() == self._born
        with contextlib.suppress(psutil.AccessDenied):
            if process.environ().get(self._name) == self._mark:
                return True
        return self._born > 0 and os.getpgid(process.pid) == self.leader

    def kill(self, grace_seconds: float = KILL_GRACE_SECONDS) -> None:
        """SIGTERM to all, then SIGKILL to whoever is left. A second Ctrl-C meanwhile ends the waiting, not the killing."""
        try:
            self._terminate(grace_seconds)
        except KeyboardInterrupt:
            self._terminate(0.0)
            raise

    def _terminate(self, grace_seconds: float) -> None:
        left = self.members()
        deadline = time.monotonic() + grace_seconds
        for process in left:
            _send(process, signal.SIGTERM)
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = self.members()
        last = time.monotonic() + KILL_GRACE_SECONDS
        while left and time.monotonic() < last:
            for process in left:
                _send(process, signal.SIGKILL)
            time.sleep(0.02)
            left = self.members()


def _send(process: psutil.Process, number: int) -> None:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        process.send_signal(number)  # psutil makes sure that the number still means the same process


def start_guard(leader: int, mark: str) -> subprocess.Popen[bytes]:
    """A process that outlives this one by as long as it takes to end the family; it ends when its standard input does."""
    return subprocess.Popen(
        [sys.executable, "-P", __file__, str(leader), mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def stop_guard(guard: subprocess.Popen[bytes]) -> None:
    """Let the guard end; what it finds left is ended with it."""
    if guard.stdin:
        guard.stdin.close()
    try:
        guard.wait(timeout=KILL_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def main(arguments: list[str]) -> int:
    """The guard: wait for the end of standard input, then end the family without grace."""
    family = Family(int(arguments[0]), arguments[1])
    sys.stdin.buffer.read()
    family.kill(0.0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
