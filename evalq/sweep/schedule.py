"""Runs flows: asks the executor for what they want, each job once, lower ranks first, and hands every outcome to all who wait."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from evalq.report.progress import QuietWatcher
from evalq.sweep.jobs import Event, Executor, Flow, Job, Outcome, failure_folder
from evalq.sweep.journal import Journal
from evalq.tracking.manifest import Owner

LISTEN_SECONDS = 0.5


class Scheduler:
    """One per sweep. `finished` hears of every job's outcome before the cells that wait for it."""

    def __init__(
        self,
        executor: Executor,
        journal: Journal,
        watcher: QuietWatcher,
        finished: Callable[[Job, Outcome], None],
        retries: int = 0,
    ) -> None:
        self._executor = executor
        self._journal = journal
        self._watcher = watcher
        self._finished = finished
        self._retries = retries
        self._queue: list[tuple[int, int, Job]] = []
        self._count = 0
        self._waiting: dict[str, list[Flow]] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._running: dict[str, Job] = {}
        self._tries: dict[str, int] = {}

    def run(self, flows: Iterable[Flow]) -> None:
        """Until every flow has ended."""
        for flow in flows:
            self._advance(flow, None)
        while self._queue or self._running:
            self._start_what_fits()
            for event in self._executor.wait(LISTEN_SECONDS):
                self._hear(event)

    def _advance(self, flow: Flow, outcome: Outcome | None) -> None:
        """Give a flow its outcome, and note what it wants next; what is known already it gets at once."""
        while True:
            try:
                job = next(flow) if outcome is None else flow.send(outcome)
            except StopIteration:
                return
            outcome = self._outcomes.get(job.key)
            if outcome is None:
                self._ask(job, flow)
                return

    def _ask(self, job: Job, flow: Flow) -> None:
        waiting = self._waiting.setdefault(job.key, [])
        waiting.append(flow)
        if len(waiting) == 1:
            self._push(job)
            self._watcher.state(job.name, "planned")

    def _push(self, job: Job) -> None:
        self._count += 1
        heapq.heappush(self._queue, (job.rank, self._count, job))

    def _start_what_fits(self) -> None:
        """In order; a job that finds no room lets smaller ones behind it pass."""
        left: list[tuple[int, int, Job]] = []
        while self._queue:
            entry = heapq.heappop(self._queue)
            job = entry[2]
            if self._executor.room(job):
                self._journal.started(job.key, job.name, job.devices)
                self._watcher.state(job.name, "running")
                self._running[job.key] = job
                self._executor.start(job)
            else:
                left.append(entry)
                if len(left) > 64:  # there is no room; do not turn over a thousand cells to find that out
                    break
        for entry in left:
            heapq.heappush(self._queue, entry)

    def _hear(self, event: Event) -> None:
        job = event.job
        if event.outcome is not None:
            self._end(job, event.outcome)
        elif event.told.get("event") == "running":
            owner = event.told.get("owner")
            log = event.told.get("log")
            self._journal.owned(job.key, Owner(**owner) if isinstance(owner, dict) else None, log)
            self._watcher.log(job.name, log)
        else:
            self._watcher.cell(job.name)
            relay(self._watcher, event.told)

    def _end(self, job: Job, outcome: Outcome) -> None:
        del self._running[job.key]
        self._watcher.cell(job.name)
        tries = self._tries[job.key] = self._tries.get(job.key, 0) + 1
        if outcome.lost and tries <= self._retries:
            self._watcher.say(f"{outcome.error}; trying again ({tries} of {self._retries})")
            self._watcher.state(job.name, "planned")
            self._push(job)
            return
        if outcome.measured is not None:
            record = outcome.measured.record
            self._journal.done(job.key, job.name, record.record_id, outcome.measured.reused)
            self._watcher.state(job.name, "done", "stored" if outcome.measured.reused else "")
        elif outcome.error is not None:
            folder = failure_folder(outcome.error)
            self._journal.failed(job.key, job.name, outcome.error, folder.name if folder else None)
            self._watcher.say(f"failed: {outcome.error}" + (f"\n{outcome.trace}" if _is_defect(outcome) else ""))
            self._watcher.state(job.name, "failed", getattr(outcome.error, "kind", ""))
        if (
            job.cell.is_baseline
        ):  # a candidate is asked for once; what a thousand of them measured need not stay in memory here
            self._outcomes[job.key] = outcome
        self._finished(job, outcome)
        for flow in self._waiting.pop(job.key, []):
            self._advance(flow, outcome)


def _is_defect(outcome: Outcome) -> bool:
    return str(outcome.error).startswith("an unexpected ")


def relay(watcher: QuietWatcher, told: dict[str, object]) -> None:
    """Hand a line of a cell's process to the watcher; a line that is none of its words is dropped."""
    kind = told.get("event")
    try:
        if kind == "stage":
            watcher.stage(str(told["stage"]), str(told["label"]))
        elif kind == "progress":
            watcher.progress(int(str(told["done"])), int(str(told["total"])), str(told["unit"]))
        elif kind == "scored":
            metrics = told["metrics"]
            watcher.scored(str(told["group"]), metrics if isinstance(metrics, dict) else {})
        elif kind == "say":
            watcher.say(str(told["text"]))
        elif kind == "line":
            watcher.line(str(told["text"]))
    except (KeyError, ValueError):
        return
