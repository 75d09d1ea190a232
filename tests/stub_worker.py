"""A worker without an engine: `python stub_worker.py PLAN.json SPEC.json` acts as the plan says for the spec's scheme.

PLAN is {"log": where starts are noted, "cells": {scheme: act}, "default": act}; an act is {"act": NAME, ...}, the name of
a function below without its underscore, and its keyword arguments.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS / "judge"), str(TESTS / "loads")]

CHILD = "import time\nwhile True: time.sleep(1)"
DEAF_CHILD = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)"


def plan_command(folder: Path, default: dict[str, Any] | None = None, **cells: dict[str, Any]) -> tuple[str, ...]:
    """The command of a stub worker; scheme names are given with underscores for dashes. Starts are noted in folder/starts."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = {
        "log": str(folder / "starts"),
        "cells": {name.replace("_", "-"): act for name, act in cells.items()},
        "default": default or {"act": "record"},
    }
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    return (sys.executable, str(TESTS / "stub_worker.py"), str(folder / "plan.json"))


def starts(folder: Path) -> list[str]:
    """Schemes whose worker was started, in order."""
    file = folder / "starts"
    return file.read_text(encoding="utf-8").split() if file.is_file() else []


def in_process(command: tuple[str, ...]) -> Any:
    """A stand-in for launch.run_worker that acts out the plan of `command` without starting a process: the same, in no time."""
    plan_file = command[-1]

    def run_worker(spec: Any, watcher: Any, *_: Any, **__: Any) -> Any:
        from evalq.errors import MeasurementError
        from evalq.measure.launch import _accept, _failure

        act = _note_start(plan_file, spec)
        kind = act.pop("act")
        if kind == "serve":
            return _serve_in_process(spec, **act)
        if kind == "fail":
            raise _failure({"exit_code": act.pop("code", 5), **act})
        if kind == "killed":
            return _accept(spec, -signal.SIGKILL)
        if kind != "record":
            raise MeasurementError(f"{kind} needs a process", "engine")
        watcher.stage("start", "starting the engine")
        write(spec, **act)
        return _accept(spec, 0)

    return run_worker


def _serve_in_process(spec: Any, load: dict[str, Any] | None = None, **settings: Any) -> Any:
    """What launch.run_worker and launch.run_load_worker return or raise for `_serve`, without a process."""
    from evalq.errors import MeasurementError
    from evalq.measure.launch import _accept, _how_it_ended

    if spec.stage == "cell":
        write(spec, **{**settings, "loads_missing": [spec.config["load"]["name"]]})
        return _accept(spec, 0)
    if load is not None:
        raise MeasurementError(f"{_how_it_ended(-signal.SIGKILL)} before the load was measured", "incomplete")
    return _served(spec)


def _served(spec: Any) -> Any:
    from load_builder import level, result

    rates = [100.0 + spec.round, 101.0, 99.0]
    return result(level(*rates, minute=10 * spec.round, round=spec.round), name=spec.config["load"]["name"])


def send(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def write(spec: Any, increase: float = 0.0, noise: float = 0.002, documents: int = 62, **changes: Any) -> None:
    """A complete record in the work folder: word perplexity `increase` above the baseline's."""
    import record_builder as build

    rows = build.baseline_rows(documents=documents, items=40)
    if not spec.cell.is_baseline:
        rows = build.damaged(rows, increase, noise)
    fields = {"run_id": spec.run_id, "record_id": spec.record_id, "cell": spec.cell}
    fields["created_at"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    fields |= {"config_hash": spec.config_hash, "reuse_key": spec.reuse_key, "quant": spec.cell.quant, **changes}
    made = build.record(spec.cell.quant, rows, fingerprint=spec.identity, **fields)
    build.write(Path(spec.work_dir) / "record", made, rows)


def _record(spec: Any, seconds: float = 0.0, seen: str = "", meet: str = "", **settings: Any) -> int:
    send("stage", stage="start", label="starting the engine")
    begin = time.monotonic()
    time.sleep(seconds)
    while meet and len(Path(meet).read_text(encoding="utf-8").split()) < 3 and time.monotonic() < begin + 60.0:
        time.sleep(0.02)  # until the baseline and two more have started: these two run at once
    if seen:  # which GPUs this worker sees, and when it had them
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        note = {"quant": spec.cell.quant, "gpus": gpus, "begin": begin, "end": time.monotonic()}
        with open(seen, "a", encoding="utf-8") as log:
            log.write(json.dumps(note) + "\n")
    send("started", seconds=0.1)
    send("stage", stage="score wikitext", label="scoring wikitext")
    send("progress", done=1, total=2, unit="sequences")
    write(spec, **settings)
    send("scored", group="wikitext", metrics={"wikitext": {"word_perplexity": 30.0}})
    send("record", record_id=spec.record_id, run_id=spec.run_id)
    return 0


def _serve(spec: Any, load: dict[str, Any] | None = None, **settings: Any) -> int:
    """A cell whose record lacks its load on a server; asked for the load, it acts as `load` says, or measures one."""
    if spec.stage == "cell":
        return _record(spec, **{**settings, "loads_missing": [spec.config["load"]["name"]]})
    if load is not None:
        return int(globals()[f"_{load.pop('act')}"](spec, **load))

    from evalq.measure.spec import LOAD_FILE

    found = _served(spec)
    content = {"run_id": spec.run_id, "result": dataclasses.asdict(found)}
    (Path(spec.work_dir) / LOAD_FILE).write_text(json.dumps(content), encoding="utf-8")
    send("record", record_id=spec.record_id, run_id=spec.run_id)
    return 0


def _never(spec: Any) -> int:
    while True:
        time.sleep(1)


def _hang_after_record(spec: Any, close: bool = False) -> int:
    _record(spec)
    if close:
        os.close(1)
    return _never(spec)


def _noise(spec: Any) -> int:
    """Lines that are no events, around a good record."""
    for line in ("not json", "[1, 2]", '{"event": 7}', '{"no": "event"}', '{"event": "progress"}', "\udcff", ""):
        sys.stdout.buffer.write(line.encode("utf-8", "surrogateescape") + b"\n")
    sys.stdout.flush()
    send("progress", done="many", total=None, unit=3)
    send("stage", stage="start")
    write(spec)
    print("Engine core proc died unexpectedly", flush=True)
    print("EngineCore died unexpectedly", file=sys.stderr)
    return 0


def _nothing(spec: Any, code: int = 0) -> int:
    return code


def _foreign(spec: Any) -> int:
    write(spec, run_id="another-run")
    return 0


def _cut_table(spec: Any) -> int:
    write(spec)
    file = Path(spec.work_dir) / "record" / "documents.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    return 0


def _failed_record(spec: Any) -> int:
    write(spec, status="failed")
    return 0


def _killed(spec: Any, number: int = signal.SIGKILL) -> int:
    os.kill(os.getpid(), number)
    return _never(spec)


def _fail(spec: Any, message: str = "it failed", kind: str = "", code: int = 5) -> int:
    send("failure", kind=kind, message=message, stage="start", exit_code=code)
    return code


def _chatter(spec: Any) -> int:
    """Talks without end and says nothing."""
    while True:
        send("hum")
        time.sleep(0.02)


def _family(spec: Any, pids: str = "", then: str = "never") -> int:
    """Grandchildren: a plain one, one in a session of its own, one deaf to SIGTERM, and an orphan of a child that ended."""
    plain = subprocess.Popen([sys.executable, "-S", "-c", CHILD])
    session = subprocess.Popen([sys.executable, "-S", "-c", CHILD], start_new_session=True)
    deaf = subprocess.Popen([sys.executable, "-S", "-c", DEAF_CHILD], start_new_session=True)
    script = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', {CHILD!r}], start_new_session=True, "
    script += "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); print(p.pid)"
    orphan = int(subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, check=True).stdout)
    time.sleep(0.2)  # the deaf one must have become deaf
    Path(pids).write_text(json.dumps([os.getpid(), plain.pid, session.pid, deaf.pid, orphan]), encoding="utf-8")
    return int(globals()[f"_{then}"](spec))


def _die_with_parent(spec: Any, pids: str) -> int:
    from evalq.measure import worker

    worker.die_with_parent()
    return _family(spec, pids)


def _note_start(plan_file: str, spec: Any) -> dict[str, Any]:
    """Write the scheme's name down and return its act."""
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    with open(plan["log"], "a", encoding="utf-8") as log:
        log.write(f"{spec.cell.quant}{'' if spec.stage == 'cell' else '+load'}\n")
    return dict(plan["cells"].get(spec.cell.quant, plan["default"]))


def main(plan_file: str, spec_file: str) -> int:
    from evalq.measure.spec import read_spec

    spec = read_spec(Path(spec_file))
    act = _note_start(plan_file, spec)
    return int(globals()[f"_{act.pop('act')}"](spec, **act))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
