"""Groups of tasks: loaded, scored together, and kept on disk as soon as they are, so that a run that dies goes on behind them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalq.config import RunConfig
from evalq.errors import EvalqError, MeasurementError
from evalq.measure import data
from evalq.measure.spec import Events, WorkerSpec
from evalq.records import Scalar, TaskScores, from_mapping, write_text

if TYPE_CHECKING:
    import pyarrow as pa

    from evalq.measure.divergence import ExactDivergence
    from evalq.measure.engine import Engine
    from evalq.measure.tasks import EngineLM

DONE_FOLDER = "done"
PARTIAL_FOLDER = "partial"


@dataclass(frozen=True)
class Group:
    """Tasks that are scored together: mc1 and mc2 share most of their answers. `limit`: items of each at most."""

    name: str
    tasks: dict[str, Any]
    limit: int | None


@dataclass(frozen=True)
class GroupScores:
    """What a group of tasks scored: by task, the parts of the fingerprint it adds, and the record's tables."""

    scores: dict[str, TaskScores]
    identity: dict[str, Scalar]
    tables: dict[str, pa.Table]

    @property
    def metrics(self) -> dict[str, dict[str, float | None]]:
        return {name: score.metrics for name, score in self.scores.items()}


def load_groups(config: RunConfig) -> list[Group]:
    """Task objects by group, in the order in which they are scored."""
    sources = data.find_sources(config)
    if not sources:
        return []
    from evalq.measure.tasks import load_tasks

    skipped = config.tasks.perplexity_from
    loaded = load_tasks({name: data.task_overrides(source, config.data, skipped) for name, source in sources.items()})
    limits = data.wanted_tasks(config)
    groups: dict[str, Group] = {}
    for name, task in loaded.items():
        group = "truthfulqa" if name in (data.MC1, data.MC2) else name
        groups.setdefault(group, Group(group, {}, limits[name])).tasks[name] = task
    return list(groups.values())


def score_or_resume(
    engine: Engine,
    spec: WorkerSpec,
    config: RunConfig,
    group: Group,
    events: Events,
    divergence: ExactDivergence | None,
) -> GroupScores:
    """What the group scored before an interruption, or scores now."""
    with events.timed(f"score {group.name}", f"scoring {group.name}"):
        done = read_done(Path(spec.work_dir), group.name, spec.owner)
        if done is not None:
            events.send("stage", stage=events.stage, label=f"{group.name} was scored before the interruption")
        else:
            done = _score(engine, spec, config, group, events, divergence)
        events.send("scored", group=group.name, metrics=done.metrics)
        return done


def _score(
    engine: Engine,
    spec: WorkerSpec,
    config: RunConfig,
    group: Group,
    events: Events,
    divergence: ExactDivergence | None,
) -> GroupScores:
    """Score one group of tasks and keep the result on disk at once."""
    from evalq.measure.saved import SavedScores
    from evalq.measure.tables import item_tables, token_table
    from evalq.measure.tasks import EngineLM, run_tasks
    from evalq.measure.texts import kept_texts

    work = Path(spec.work_dir)
    saved = SavedScores(work / PARTIAL_FOLDER / group.name, spec.owner)
    if len(saved):
        label = f"scoring {group.name}, {len(saved)} sequences of which are there from before the interruption"
        events.send("stage", stage=events.stage, label=label)
    lm = EngineLM(
        engine,
        config.model.bos,
        config.tasks.perplexity_window,
        config.tasks.choice_window,
        config.tasks.topk,
        share_prefixes=shares_prefixes(config),
        progress=events.progress,
        reverse=config.tasks.request_order == "reverse",
        divergence=divergence,
        saved=saved,
    )
    results, seconds = run_tasks(lm, group.tasks, group.limit)
    documents: list[dict[str, Any]] = []
    scores: dict[str, TaskScores] = {}
    identity: dict[str, Scalar] = {}
    for name in group.tasks:
        score, rows = _task_scores(config, group, name, results, lm, seconds / len(group.tasks))
        scores[name] = score
        documents += rows
        identity |= _task_identity(score, lm.tallies[name].ids_hash.hexdigest())
    samples = {name: results["samples"][name] for name in group.tasks}
    items = {name: rows for name, rows in samples.items() if not _is_rolling(group.tasks[name])}
    tables = item_tables(documents, items)
    if config.tasks.keep_tokens and lm.documents:
        tables["tokens"] = token_table(lm.documents)
    if config.tasks.keep_texts:
        tables |= kept_texts(samples, tables.get("tokens"), lm.tokenizer)
    done = GroupScores(scores, identity, tables)
    write_done(work, group.name, spec.owner, done)
    saved.clear()
    return done


def _task_scores(
    config: RunConfig, group: Group, name: str, results: dict[str, Any], lm: EngineLM, seconds: float
) -> tuple[TaskScores, list[dict[str, Any]]]:
    """One task's scores, and its rows by document where it is a perplexity."""
    from evalq.measure.tables import document_rows, merge_metrics
    from evalq.measure.tasks import dataset_hash, harness_version, metric_values

    task, samples, tally = group.tasks[name], results["samples"][name], lm.tallies[name]
    rolling = _is_rolling(task)
    rows = document_rows(name, samples, lm.documents) if rolling else []
    metrics, reasons = merge_metrics(metric_values(results["results"][name]), rows)
    score = TaskScores(
        task=name,
        kind="perplexity" if rolling else "choice" if task.OUTPUT_TYPE == "multiple_choice" else "other",
        dataset=data.find_sources(config)[name].label,
        dataset_hash=dataset_hash(samples),
        n=len(samples),
        left_out=left_out(task, group.limit, len(samples)),
        truncated=tally.truncated,
        window_tokens=config.tasks.perplexity_window if rolling else config.tasks.choice_window,
        metrics=metrics,
        metric_reasons=reasons,
        harness_version=harness_version(),
        task_version=str(results["versions"].get(name, "")),
        seconds=round(seconds, 3),
        scored_tokens=tally.scored_tokens,
    )
    return score, rows


def shares_prefixes(config: RunConfig) -> bool:
    """Whether choice tasks read common prefixes from the cache: never for a quantised cache, where it would change scores."""
    wanted = config.tasks.share_prefixes and config.engine.enable_prefix_caching
    return wanted and config.quant.kv_cache_dtype in ("bfloat16", "float16")


def _is_rolling(task: Any) -> bool:
    return bool(task.OUTPUT_TYPE == "loglikelihood_rolling")


def left_out(task: Any, limit: int | None, scored: int) -> int:
    """Items that were asked for and not scored."""
    available = len(task.eval_docs)
    return max(0, (available if limit is None else min(limit, available)) - scored)


def _task_identity(score: TaskScores, ids_hash: str) -> dict[str, Scalar]:
    return {
        f"dataset.{score.task}": score.dataset,
        f"dataset_hash.{score.task}": score.dataset_hash,
        f"first_ids_hash.{score.task}": ids_hash,
        f"window_tokens.{score.task}": score.window_tokens,
        f"truncated.{score.task}": score.truncated,
        f"task_version.{score.task}": score.task_version,
    }


def stop_on_implausible(config: RunConfig, spec: WorkerSpec, scored: dict[str, TaskScores]) -> None:
    """A baseline far outside what a language model does means a wrong BOS, tokenizer or checkpoint: stop before more is spent."""
    score = scored.get(data.PERPLEXITY)
    if not spec.cell.is_baseline or score is None or config.engine.load_format == "dummy":
        return
    value = score.metrics.get("word_perplexity")
    if value is None or not 1.0 < value <= config.model.max_perplexity:
        raise MeasurementError(
            f"the baseline's word perplexity is {value}, outside 1 to {config.model.max_perplexity:g}: the BOS rule "
            f"(model.bos={config.model.bos}), the tokenizer or the checkpoint is wrong; raise model.max_perplexity only "
            "if the model is really this weak on this text",
            "data",
        )


def write_done(work: Path, group: str, owner: str, done: GroupScores) -> None:
    """Keep what a group scored; the folder appears whole or not at all."""
    import pyarrow.parquet as pq

    final = work / DONE_FOLDER / group
    temporary = final.with_name(f".{group}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, table in done.tables.items():
        pq.write_table(table, temporary / f"{name}.parquet")
    content = {
        "reuse_key": owner,
        "scores": {name: dataclasses.asdict(score) for name, score in done.scores.items()},
        "identity": done.identity,
        "tables": sorted(done.tables),
    }
    write_text(temporary / "scores.json", json.dumps(content, allow_nan=False))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)


def read_done(work: Path, group: str, owner: str) -> GroupScores | None:
    """What an earlier, interrupted run of the same cell already scored; None when there is nothing usable."""
    import pyarrow.parquet as pq

    folder = work / DONE_FOLDER / group
    try:
        content = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        if content["reuse_key"] != owner:
            return None
        scores = {name: from_mapping(TaskScores, value, name) for name, value in content["scores"].items()}
        tables = {name: pq.read_table(folder / f"{name}.parquet") for name in content["tables"]}
    except (OSError, ValueError, KeyError, EvalqError):
        return None
    return GroupScores(scores, content["identity"], tables)
