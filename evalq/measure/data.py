"""Where each task's items come from: embedded, local or hub. Which one ran is part of the record; none is swapped in silence."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalq.config import DataConfig, RunConfig
from evalq.errors import ConfigError
from evalq.records import file_sha256

EMBEDDED = Path(__file__).parent.parent / "data" / "embedded"
PERPLEXITY, HELLASWAG, MC1, MC2 = "wikitext", "hellaswag", "truthfulqa_mc1", "truthfulqa_mc2"

# task -> (file, label). Overrides of the stock lm-eval task are in `task_overrides`.
EMBEDDED_FILES = {
    PERPLEXITY: ("articles.jsonl", "embedded articles"),
    HELLASWAG: ("completions.jsonl", "embedded completions"),
    MC1: ("truthfulness.jsonl", "embedded truthfulness"),
    MC2: ("truthfulness.jsonl", "embedded truthfulness"),
}
LOCAL_FILES = {
    PERPLEXITY: ("wikitext2/test.jsonl", "WikiText-2 test"),
    HELLASWAG: ("hellaswag/validation_1000.jsonl", "HellaSwag-1000"),
    MC1: ("truthfulqa/mc.jsonl", "TruthfulQA"),
    MC2: ("truthfulqa/mc.jsonl", "TruthfulQA"),
    "arc_easy": ("arc/arc_easy_test.jsonl", "ARC-Easy test"),
    "arc_challenge": ("arc/arc_challenge_test.jsonl", "ARC-Challenge test"),
    "gsm8k": ("gsm8k/test.jsonl", "GSM8K test"),
}
HUB_DATASETS = {
    PERPLEXITY: "EleutherAI/wikitext_document_level",
    HELLASWAG: "Rowan/hellaswag",
    MC1: "truthfulqa/truthful_qa",
    MC2: "truthfulqa/truthful_qa",
}
COLUMNS = {
    PERPLEXITY: ("page",),
    HELLASWAG: ("query", "choices", "gold"),
    MC1: ("question", "mc1_targets"),
    MC2: ("question", "mc2_targets"),
}


@dataclass(frozen=True)
class Source:
    """One task's items. `file` is None for the hub; `identity` changes when the items do."""

    task: str
    label: str
    file: Path | None
    identity: str


def wanted_tasks(config: RunConfig) -> dict[str, int | None]:
    """Tasks of the config and their limits (None = all), in the order in which they run."""
    tasks = config.tasks
    wanted: dict[str, int | None] = {}
    if tasks.perplexity:
        wanted[PERPLEXITY] = tasks.perplexity_limit
    if tasks.hellaswag:
        wanted[HELLASWAG] = tasks.hellaswag_limit
    if tasks.truthfulqa:
        wanted[MC1] = wanted[MC2] = tasks.truthfulqa_limit
    for name in tasks.extra:
        wanted.setdefault(name, tasks.extra_limit)
    return wanted


def local_root(data: DataConfig) -> Path:
    """Folder of `data=local`: data.root, else $EVALQ_DATA. Errors: ConfigError when neither names a folder."""
    given = data.root or os.environ.get("EVALQ_DATA")
    if not given:
        raise ConfigError("data=local needs a folder; give data.root=/path/to/data or set EVALQ_DATA")
    root = Path(given).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"data.root={given} is not a folder; give one that holds {LOCAL_FILES[PERPLEXITY][0]} and so on"
        )
    return root


def find_sources(config: RunConfig) -> dict[str, Source]:
    """The source of every wanted task. Errors: one ConfigError that lists all that is missing, before anything starts."""
    problems: list[str] = []
    sources: dict[str, Source] = {}
    for task in wanted_tasks(config):
        try:
            sources[task] = _find_source(task, config)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    if not sources and not config.load.enabled and not config.kv.measures and config.kv.selfcheck != "always":
        raise ConfigError("no task is switched on; set tasks.perplexity=true, or name one in tasks.extra=[...]")
    return sources


def _find_source(task: str, config: RunConfig) -> Source:
    data = config.data
    if task == PERPLEXITY and data.perplexity_file:
        file = Path(data.perplexity_file).expanduser()
        return _file_source(task, file, f"file {file.name}")
    if data.name == "hub" or (data.name == "embedded" and task not in EMBEDDED_FILES):
        dataset = HUB_DATASETS.get(task, f"lm-eval task {task}")
        revision = data.revisions.get(dataset, "main")
        return Source(task, f"hub:{dataset}@{revision}", None, f"{dataset}@{revision}")
    if data.name == "embedded":
        name, label = EMBEDDED_FILES[task]
        return _file_source(task, EMBEDDED / name, label)
    root = local_root(data)
    if task not in LOCAL_FILES:
        raise ConfigError(
            f"task {task} has no file known to data=local; use one of {', '.join(sorted(LOCAL_FILES))}, or data=hub"
        )
    name, label = LOCAL_FILES[task]
    return _file_source(task, root / name, label)


def _file_source(task: str, file: Path, label: str) -> Source:
    if not file.is_file():
        raise ConfigError(f"data for {task} is missing: no file {file}; put it there, or choose another data=")
    return Source(task, label, file, file_sha256(file))


def read_rows(source: Source) -> list[dict[str, Any]]:
    """Items of a JSON-lines file (plain or .gz). Errors: ConfigError naming file, line and what is wrong."""
    if source.file is None:
        raise ValueError(f"{source.task} comes from the hub")
    opener = gzip.open if source.file.suffix == ".gz" else open
    rows: list[dict[str, Any]] = []
    try:
        with opener(source.file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_parse_row(line, f"{source.file} line {number}", COLUMNS.get(source.task, ())))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{source.file} cannot be read ({error}); put the data for {source.task} there again"
        ) from error
    if not rows:
        raise ConfigError(f"{source.file} holds no items; put the data for {source.task} there")
    return rows


def _parse_row(line: str, where: str, columns: tuple[str, ...]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}); each line holds one item") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a JSON object; each line holds one item")
    missing = [column for column in columns if column not in row]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; expected the columns {', '.join(columns)}")
    return row


def task_overrides(source: Source, data: DataConfig, skipped: int = 0) -> dict[str, Any]:
    """What to change in the stock lm-eval task so that it reads this source. Scoring is never changed.

    skipped: perplexity documents at the beginning that are left out. Errors: ConfigError when none is left.
    """
    if source.file is None:
        if skipped and source.task == PERPLEXITY:
            raise ConfigError(f"tasks.perplexity_from={skipped} needs documents of a file; use data=embedded or local")
        dataset = HUB_DATASETS.get(source.task)
        revision = data.revisions.get(dataset or "")
        return {"dataset_kwargs": {"revision": revision}} if revision else {}
    rows = read_rows(source)
    if source.task == PERPLEXITY and skipped:
        if skipped >= len(rows):
            raise ConfigError(
                f"tasks.perplexity_from={skipped} leaves none of the {len(rows)} documents of {source.file}"
            )
        rows = rows[skipped:]
    overrides: dict[str, Any] = {"custom_dataset": _dataset_maker(rows)}
    if source.task == PERPLEXITY:
        # The stock splits are for training too; only the test split exists here.
        overrides |= {"training_split": None, "validation_split": None, "test_split": "test"}
    elif source.task == HELLASWAG:
        # The files hold the text after the stock task's process_docs.
        overrides |= {
            "process_docs": None,
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
            "doc_to_target": "{{gold}}",
        }
    elif source.task in (MC1, MC2):
        overrides |= {"validation_split": None, "test_split": "test"}
    else:
        overrides |= {"training_split": None, "validation_split": None, "test_split": "test", "num_fewshot": 0}
    return overrides


def _dataset_maker(rows: list[dict[str, Any]]) -> Any:
    def make(**_: Any) -> Any:
        import datasets

        return {"test": datasets.Dataset.from_list(rows)}

    return make
