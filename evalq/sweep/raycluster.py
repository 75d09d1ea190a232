"""Jobs as tasks of a Ray cluster (the only module that imports ray). Ray places, watches and cleans up; none of it is done here.

A cell takes as many of a machine's `evalq_<gpu>` resource (else of Ray's own accelerator type) as it has GPUs, and that many
num_gpus. Its task runs the same cell process as on one machine. Records come back through the object store, or lie in a folder that
all machines share. Ray retries nothing by itself: a cell whose machine was lost is told as lost, and the scheduler asks again.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from evalq.config import ExecutorConfig
from evalq.errors import ConfigError, EvalqError, InfeasibleError, MeasurementError, MissingExtraError, RecordError
from evalq.facts.gpus import detect
from evalq.measure.cells import find_hinted
from evalq.measure.device import gpu_ids
from evalq.measure.launch import WORKER
from evalq.pipeline import Measured
from evalq.preparation import Places
from evalq.records import RECORD_FILE, read_record, sync_folder
from evalq.sweep.cell import CELL
from evalq.sweep.jobs import Event, Job, Outcome, known_error
from evalq.sweep.local import CellProcess, outcome_of, request_of
from evalq.tracking.store import slug

UNPLACED_SECONDS = 120.0  # a job that no machine has room for by then is told to the user, once
ANSWER_SECONDS = 15.0  # patience with a head that is about to start; Ray asks a wrong address for many minutes
MOST_PER_TASK = 64 * 1024**2  # bytes of one file that is sent back; larger ones are logs and are cut

# Ray's names for what it finds on a machine by itself.
ACCELERATORS = {
    "a100-40g": ("A100-40G", "A100"),
    "a100-80g": ("A100-80G", "A100"),
    "h100": ("H100",),
    "h200": ("H200",),
    "b200": ("B200",),
    "l4": ("L4",),
    "l40s": ("L40S",),
    "mi300x": ("AMD-Instinct-MI300X-OAM", "AMD-Instinct-MI300X-HF"),
    "mi325x": ("AMD-Instinct-MI325X-OAM",),
    "mi355x": ("AMD-Instinct-MI355X-OAM",),
}


def cell_task(request: dict[str, Any], command: list[str] | None, returned: bool) -> Iterator[dict[str, Any]]:
    """Runs on the machine that Ray chose: the cell process's events, and last its end, with the record's files when `returned`."""
    root = node_root()
    if returned:
        request = {**request, "root": str(root)}
    process = CellProcess(request, root / "logs" / f"cell-{os.getpid()}.log", command or CELL)
    last: dict[str, Any] | None = None
    code = 0
    try:
        closed = False
        while not closed:
            select.select([process.output], [], [], 1.0)
            told, closed = process.lines()
            closed = closed or (not told and process.process.poll() is not None)
            for event in told:
                if event.get("event") in ("ended", "failed", "known"):
                    last = event
                else:
                    yield event
    finally:
        code = process.end()
    yield {"event": "task", "last": last, "code": code, "files": _files(last) if returned else {}}


def node_root() -> Path:
    """The store of this machine: its own $EVALQ_HOME, else a folder of this user."""
    given = os.environ.get("EVALQ_HOME")
    root = Path(given) if given else Path(tempfile.gettempdir()) / f"evalq-{os.getuid()}"
    root.mkdir(parents=True, exist_ok=True)
    return root


def _files(last: dict[str, Any] | None) -> dict[str, bytes]:
    folder = (last or {}).get("folder")
    if not folder:
        return {}
    return {file.name: file.read_bytes()[-MOST_PER_TASK:] for file in Path(folder).iterdir() if file.is_file()}


class RayExecutor:
    """Every job a task. `places` are those of this machine, where records end up."""

    def __init__(
        self,
        config: ExecutorConfig,
        places: Places,
        say: Callable[[str], None],
        command: Sequence[str] = WORKER,
        cell_command: Sequence[str] = CELL,
    ) -> None:
        self._ray = _connect(config.address, say)
        self._config = config
        self._records = places.records
        self._say = say
        self._command = list(command)
        self._cell_command = None if tuple(cell_command) == CELL else list(cell_command)
        self._task = self._ray.remote(cell_task)
        self._running: dict[Any, Job] = {}
        self._began: dict[str, float] = {}
        self._stored: dict[str, tuple[str, str, str]] | None = None
        self._ended: list[Event] = []

    def room(self, job: Job) -> bool:
        """A task more than the cluster holds now, so that a machine never waits for us; Ray keeps the order."""
        holds = sum(self._per_machine(self._resource(job)) or [1.0]) // max(1, job.devices)
        return len(self._running) < (self._config.workers or max(1, int(holds)) + 1)

    def start(self, job: Job) -> None:
        try:
            options = self._options(job)
        except EvalqError as error:
            self._ended.append(Event(job, {}, Outcome(error=error)))
            return
        request = {**request_of(job, self._command), "known": self._known(job)}
        if self._config.records == "returned":
            request["hint"] = ""  # the record is here, not there
        task = self._task.options(max_retries=0, num_returns="streaming", name=job.name, **options)
        self._running[task.remote(request, self._cell_command, self._config.records == "returned")] = job
        self._began[job.key] = time.monotonic()

    def _options(self, job: Job) -> dict[str, Any]:
        """What the task takes. Errors: InfeasibleError when no machine has as many GPUs."""
        resource = self._resource(job)
        if job.cell.config.engine.extra.get("distributed_executor_backend") == "ray":
            return {"num_cpus": 1, "num_gpus": 0, "resources": {resource: 0.001}}  # vLLM asks Ray for its GPUs itself
        largest = max(self._per_machine(resource), default=float(job.devices))
        if job.devices > largest and not resource.startswith("accelerator_type:"):
            raise InfeasibleError(
                f"{job.name} needs {job.devices} GPUs and the largest machine of the Ray cluster has {largest:g} of {resource}; "
                "add a larger machine, or let vLLM spread over several with +engine.extra.distributed_executor_backend=ray"
            )
        share = 0.001 * job.devices if resource.startswith("accelerator_type:") else job.devices
        return {"num_cpus": 1, "num_gpus": 0 if job.cell.is_cpu else job.devices, "resources": {resource: share}}

    def _resource(self, job: Job) -> str:
        """The resource that stands for the cell's GPU. Errors: none; what no machine has is told after a while."""
        if self._config.resource:
            return self._config.resource
        gpu = job.cell.config.gpu.name
        own = f"evalq_{gpu}"
        known = [own, *(f"accelerator_type:{name}" for name in ACCELERATORS.get(gpu, ()))]
        return next((name for name in known if self._per_machine(name)), own)

    def _per_machine(self, resource: str) -> list[float]:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        key = "GPU" if resource.startswith("accelerator_type:") else resource
        return [float(node[key]) for node in nodes if node.get(resource) and node.get(key)]

    def _known(self, job: Job) -> dict[str, str]:
        """Reuse key -> id of the records here that the job would take, so that they are not measured there again."""
        if self._config.records == "shared" or (job.since is None and not job.hint):
            return {}
        names = (job.cell.config.model.name, job.cell.config.quant.name)
        found = {}
        for record_id, (key, model, quant) in self._stored_records().items():
            if (model, quant) == names and (job.since == 0.0 or record_id == job.hint):
                found[key] = record_id
        return found

    def _stored_records(self) -> dict[str, tuple[str, str, str]]:
        if self._stored is None:
            self._stored = {}
            for file in self._records.glob(f"[!.]*/{RECORD_FILE}"):
                with contextlib.suppress(RecordError, OSError):
                    record = read_record(file)
                    if record.status == "complete":
                        self._stored[record.record_id] = (record.reuse_key, record.cell.model, record.cell.quant)
        return self._stored

    def wait(self, seconds: float) -> list[Event]:
        events, self._ended = self._ended, []
        deadline = time.monotonic() + seconds
        while self._running:
            left = 0.0 if events else max(0.0, deadline - time.monotonic())
            ready = self._ready(left)
            if not ready:
                break
            events.extend(self._next(ready[0]))
        self._tell_unplaced()
        return events

    def _ready(self, seconds: float) -> list[Any]:
        """A task that has something to tell. Errors: MeasurementError when the cluster is gone."""
        try:
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
            return list(ready)
        except (self._ray.exceptions.RaySystemError, ConnectionError) as error:
            raise MeasurementError(
                f"the Ray cluster is gone ({error}); start it again and give the same command: finished cells are kept",
                "engine",
            ) from error

    def _next(self, generator: Any) -> list[Event]:
        """The next thing that a task told, or its end."""
        job = self._running[generator]
        lost = self._ray.exceptions
        try:
            told = self._ray.get(next(generator))
        except StopIteration:
            return self._end(generator, Outcome(error=_lost("its task ended without a word"), lost=True))
        except (lost.WorkerCrashedError, lost.NodeDiedError, lost.LocalRayletDiedError, lost.ObjectLostError) as error:
            return self._end(generator, Outcome(error=_lost(type(error).__name__), lost=True))
        except lost.OutOfMemoryError as error:
            text = f"Ray ended the cell because its machine ran out of memory: {str(error).splitlines()[0]}"
            return self._end(generator, Outcome(error=MeasurementError(text, "oom")))
        except Exception as error:  # of the task's own code: a defect, told as one
            return self._end(generator, Outcome(error=known_error(error), trace=str(error)))
        self._began.pop(job.key, None)
        if told["event"] != "task":
            return [Event(job, told)]
        return self._end(generator, self._outcome(told))

    def _end(self, generator: Any, outcome: Outcome) -> list[Event]:
        job = self._running.pop(generator)
        self._began.pop(job.key, None)
        return [Event(job, {}, outcome)]

    def _outcome(self, told: dict[str, Any]) -> Outcome:
        last = told["last"]
        try:
            if last is not None and last["event"] == "known":
                record = read_record(self._records / last["record"])
                found = find_hinted(self._records, record.reuse_key, record.record_id)
                if found is not None:
                    return Outcome(Measured(*found, reused=True))
                raise RecordError(f"record {record.record_id} is damaged; remove its folder and run it again")
            if told["files"] and last is not None:
                last = {**last, "folder": str(self._keep(Path(str(last["folder"])).name, told["files"]))}
        except (EvalqError, OSError) as error:
            return Outcome(error=known_error(error))
        return outcome_of(last, told["code"])

    def _keep(self, record_id: str, files: dict[str, bytes]) -> Path:
        """Put a record that came back into the store, by rename, whole or not at all."""
        target = self._records / record_id
        incoming = self._records / ".work" / f"incoming-{slug(record_id)}"
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir(parents=True)
        for name, content in files.items():
            with open(incoming / Path(name).name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if target.exists():  # an earlier start of the sweep took it already
            shutil.rmtree(incoming)
        else:
            os.replace(incoming, target)
            sync_folder(self._records)
        return target

    def _tell_unplaced(self) -> None:
        for job in self._running.values():
            began = self._began.get(job.key)
            if began is not None and time.monotonic() - began > UNPLACED_SECONDS:
                del self._began[job.key]
                self._say(
                    f"{job.name} has waited {UNPLACED_SECONDS:g} s for a machine with {self._resource(job)}: {job.devices}; "
                    f"the cluster offers {self._offers()}"
                )

    def _offers(self) -> str:
        found = self._ray.cluster_resources()
        shown = {n: f"{v:g}" for n, v in sorted(found.items()) if n.startswith(("evalq_", "accelerator_type:", "GPU"))}
        return ", ".join(f"{name}: {value}" for name, value in shown.items()) or "no GPU and no evalq_ resource"

    def close(self) -> None:
        for generator in self._running:
            with contextlib.suppress(Exception):
                self._ray.cancel(generator, force=True)
        self._running.clear()
        self._ray.shutdown()


def _lost(how: str) -> MeasurementError:
    return MeasurementError(f"the cell's machine or its process was lost ({how})", "incomplete")


def _connect(address: str | None, say: Callable[[str], None]) -> Any:
    """ray, connected. Errors: MissingExtraError, ConfigError when no cluster answers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingExtraError("executor=ray", "ray", "ray") from error
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    wanted = address or os.environ.get("RAY_ADDRESS")
    try:
        if wanted:
            _wait_for_answer(wanted)
            ray.init(address=wanted, **quiet)
        else:
            here = detect()
            count = max(1, len(gpu_ids())) if here != "cpu" else 1
            ray.init(resources={f"evalq_{here}": count}, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {wanted or 'this machine'} ({str(error).splitlines()[0]}); start one with "
            "ray start --head, or leave executor.address out to have one started here"
        ) from error
    say(f"Ray: {wanted or 'a cluster on this machine'}, {len([n for n in ray.nodes() if n['Alive']])} machines")
    return ray


def _wait_for_answer(address: str) -> None:
    """Until somebody listens at HOST:PORT; auto, local and ray:// are for Ray to find. Errors: ConnectionError."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0):
                return
        except (OSError, OverflowError) as error:
            if time.monotonic() >= deadline:
                raise ConnectionError(str(error)) from error
            time.sleep(0.5)
