"""Jobs one after the other in this process: a single cell, and a sweep where only one fits at a time."""

from __future__ import annotations

from collections.abc import Sequence

from evalq.load_stage import measure_with_load
from evalq.pipeline import Measured, identify
from evalq.report.progress import QuietWatcher
from evalq.sweep.jobs import Event, Job, attempt
from evalq.sweep.journal import Journal


class InlineExecutor:
    """`start` returns when the job has ended. The engine is in a process of its own all the same."""

    def __init__(self, watcher: QuietWatcher, command: Sequence[str], journal: Journal) -> None:
        self._watcher = watcher
        self._command = command
        self._journal = journal
        self._ended: list[Event] = []

    def room(self, job: Job) -> bool:
        return not self._ended

    def start(self, job: Job) -> None:
        self._watcher.cell(job.name)
        self._ended.append(Event(job, {}, attempt(lambda: self._measure(job))))

    def _measure(self, job: Job) -> Measured:
        known = identify(job.cell, self._watcher)
        log = str(known.work / "engine.log")
        self._journal.owned(job.key, None, log)
        self._watcher.log(job.name, log)
        return measure_with_load(job.cell, self._watcher, self._command, since=job.since, hint=job.hint, known=known)

    def wait(self, seconds: float) -> list[Event]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        return
