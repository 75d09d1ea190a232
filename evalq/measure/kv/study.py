"""The KV stage of one cell: what the config asks for, on the running engine, in an order in which nothing spoils the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evalq.config import KvConfig, RunConfig
from evalq.errors import MeasurementError
from evalq.kvrecord import KvReport, Sensitivity, is_quantised_kv
from evalq.measure.engine import Engine
from evalq.measure.kv.decode import score_decode
from evalq.measure.kv.documents import Document, task_documents
from evalq.measure.kv.generation import score_generations
from evalq.measure.kv.long import score_long
from evalq.measure.kv.needle import score_needles
from evalq.measure.kv.sensitivity import (
    CannotAskError,
    engine_fingerprint,
    keep_answer,
    kept_answer,
    measure_sensitivity,
)
from evalq.records import SCHEMAS, Scalar

if TYPE_CHECKING:
    import pyarrow as pa


class Events(Protocol):
    """The part of spec.Events that is used here."""

    def timed(self, stage: str, label: str) -> Any: ...

    def progress(self, done: int, total: int, unit: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the stage needs to know about the cell."""

    config: RunConfig
    settings: dict[str, Scalar]  # the engine's own
    identity: dict[str, Scalar]  # the part of the fingerprint that the parent knows
    attention_backend: str
    engine_version: str
    store: Path  # where answers are kept, once per engine


def is_wanted(config: RunConfig) -> bool:
    """Whether the stage has anything to do."""
    return config.kv.measures or asks_sensitivity(config)


def asks_sensitivity(config: RunConfig) -> bool:
    """Schemes with a quantised KV cache, unless the weights are random."""
    wanted = is_quantised_kv(config.quant.kv_cache_dtype) or config.kv.selfcheck == "always"
    return wanted and config.engine.load_format != "dummy"


def measure_kv(
    engine: Engine, asked: Asked, tasks: dict[str, Any], limit: int | None, events: Events
) -> tuple[KvReport, dict[str, pa.Table]]:
    """The report and its tables. Errors: MeasurementError."""
    config, kv = asked.config, asked.config.kv
    report, rows = KvReport(), dict[str, list[dict[str, Any]]]()
    if asks_sensitivity(config):
        with events.timed("kv selfcheck", "asking whether scores read the KV cache"):
            report = _with_sensitivity(engine, asked)
    if kv.measures:
        report, rows = _measure(engine, config, kv, task_documents(tasks, limit), report, events)
    return report, _tables(rows)


def _with_sensitivity(engine: Engine, asked: Asked) -> KvReport:
    """An engine that cannot be asked is no failure of the cell: the report says why, and the gate will not pass it."""
    try:
        return KvReport(sensitivity=find_sensitivity(engine, asked))
    except CannotAskError as error:
        return KvReport(notes=[str(error)])


def _measure(
    engine: Engine, config: RunConfig, kv: KvConfig, documents: Sequence[Document], report: KvReport, events: Events
) -> tuple[KvReport, dict[str, list[dict[str, Any]]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    if kv.decode:
        with events.timed("kv decode", "scoring the decode path"):
            decode, found = score_decode(engine, documents, config.tasks.perplexity_window, kv, events.progress)
            report, rows["kv_tokens"] = dataclasses.replace(report, decode=decode), found
    if kv.long:
        with events.timed("kv long", "scoring long context"):
            long, found = score_long(engine, documents, kv, events.progress)
            report, rows["kv_tokens"] = dataclasses.replace(report, long=long), [*rows.get("kv_tokens", []), *found]
    if kv.needle:
        with events.timed("kv needle", "looking for needles"):
            needle, rows["needles"] = score_needles(engine, documents, kv)
            report = dataclasses.replace(report, needle=needle)
    if kv.generation:
        with events.timed("kv generation", "generating"):
            generation, rows["generations"] = score_generations(engine, documents, kv)
            report = dataclasses.replace(report, generation=generation)
    engine.reset_prefix_cache()
    return report, rows


def find_sensitivity(engine: Engine, asked: Asked) -> Sensitivity:
    """The kept answer for this engine, or a new one, which is kept."""
    dtype = asked.config.quant.kv_cache_dtype
    fingerprint = engine_fingerprint(asked.settings, asked.identity, asked.attention_backend, asked.engine_version)
    kept = kept_answer(asked.store, fingerprint) if asked.config.kv.selfcheck == "auto" else None
    if kept is not None:
        return kept
    identity = {"attention_backend": asked.attention_backend, "engine_version": asked.engine_version}
    answer = measure_sensitivity(engine, dtype, {**identity, "fingerprint": fingerprint})
    try:
        keep_answer(asked.store, answer)
    except OSError as error:
        raise MeasurementError(
            f"the answer about the KV cache cannot be kept in {asked.store} ({error.strerror or error}); "
            "free some space or let paths.root name a folder that can be written",
            "disk",
        ) from error
    return answer


def kv_settings(kv: KvConfig) -> str:
    """The settings of what is measured, for the fingerprint: both sides must have the same."""
    return ", ".join(
        f"{name}={value}" for name, value in dataclasses.asdict(kv).items() if name not in ("name", "selfcheck")
    )


def _tables(rows: dict[str, list[dict[str, Any]]]) -> dict[str, pa.Table]:
    import pyarrow as pa

    return {name: pa.Table.from_pylist(found, schema=SCHEMAS[name]()) for name, found in rows.items() if found}
