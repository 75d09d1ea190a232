"""lm-eval's tasks on evalq's engine (the only module that imports lm-eval).

The model class below is handed to lm-eval's own evaluator, so any lm-eval task works, and items, prompts and metrics are lm-eval's.
What evalq adds: every sequence of a call is scored together in the engine's batches, identical (context, continuation) pairs are
scored once, BOS is explicit, the window is the task's, truncations are counted, and per-document sums are kept.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval
import lm_eval.utils
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from evalq.errors import ConfigError, EvalqError, MeasurementError
from evalq.measure.engine import Progress
from evalq.measure.saved import SavedScores
from evalq.measure.scores import ScoreRequest, ScoreResult

if TYPE_CHECKING:
    from evalq.measure.divergence import ExactDivergence

FEWSHOT_SEED = 1234  # lm-eval's own default


@dataclass
class ScoredWindow:
    """One window of a document: where its first scored token stands in the document, its ids and its scores."""

    start: int
    context_tokens: int
    ids: list[int]  # scored tokens
    result: ScoreResult


@dataclass
class Tally:
    """What a task's requests amounted to, for its record."""

    ids_hash: Any = field(default_factory=hashlib.sha256)
    truncated: int = 0
    scored_tokens: int = 0
    requests: int = 0


class EngineLM(TemplateLM):  # type: ignore[misc]
    """lm-eval's model interface over evalq's engine."""

    def __init__(
        self,
        engine: Any,
        bos: str,
        perplexity_window: int,
        choice_window: int,
        topk: int = 0,
        share_prefixes: bool = False,
        progress: Progress | None = None,
        reverse: bool = False,
        divergence: ExactDivergence | None = None,
        saved: SavedScores | None = None,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.bos = bos
        self.perplexity_window = perplexity_window
        self.choice_window = choice_window
        self.topk = topk
        self.share_prefixes = share_prefixes
        self.progress = progress
        self.reverse = reverse
        self.divergence = divergence
        self.saved = saved
        self._encoded: dict[str, list[int]] = {}
        self.documents: dict[tuple[str, int], list[ScoredWindow]] = {}
        self.tallies: dict[str, Tally] = {}
        self._scored: dict[tuple[tuple[int, ...], int], tuple[float, bool]] = {}

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The one context token of a window: the tokenizer's BOS, or its EOS where there is no BOS."""
        bos = self.tokenizer.bos_token_id
        return int(bos if bos is not None else self.tokenizer.eos_token_id)

    @property
    def max_length(self) -> int:
        return self.choice_window

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", "")).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids without any special token; BOS is added by the caller, exactly once."""
        known = self._encoded.get(string)
        if known is not None:
            return list(known)
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=False)
        return ids

    def _encode_ahead(self, texts: Sequence[str]) -> None:
        """Token ids of all texts at once, on all cores, for tok_encode to find."""
        unique = list(dict.fromkeys(texts))
        if not unique:
            return
        with _all_cores():
            encoded = self.tokenizer(unique, add_special_tokens=False, return_attention_mask=False, verbose=False)
        self._encoded = dict(zip(unique, encoded["input_ids"], strict=True))

    def tok_decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Sum of log-probabilities (nats) of each document, in disjoint windows of 1 context token + window-1 scored ones."""
        windows: list[ScoreRequest] = []
        owners: list[tuple[str, int, int]] = []
        self._encode_ahead([request.args[0] for request in requests])
        for request in requests:
            tally = self._tally(request.task_name)
            position = 0
            ids = self.tok_encode(request.args[0])
            for context, continuation in map(
                make_disjoint_window,
                get_rolling_token_windows(ids, self.prefix_token_id, self.perplexity_window - 1, 1),
            ):
                windows.append(ScoreRequest([*context, *continuation], len(context)))
                owners.append((request.task_name, int(request.doc_id), position))
                position += len(continuation)
                _count(tally, context, continuation)
        self._encoded.clear()
        results = self._score_windows(windows)
        for (task, doc_id, start), window, result in zip(owners, windows, results, strict=True):
            self.documents.setdefault((task, doc_id), []).append(
                ScoredWindow(start, window.first, window.ids[window.first :], result)
            )
        return [self._document_sum(request.task_name, request.doc_id) for request in requests]

    def _score_windows(self, windows: list[ScoreRequest]) -> list[ScoreResult]:
        exact = self.divergence
        use = exact.begin(self.engine, windows, self.saved) if exact is not None else None
        results: list[ScoreResult] = self.engine.score(
            windows, self.topk, False, self.progress, self.reverse, use, self.saved
        )
        if exact is not None:
            exact.finish(self.engine)
        return results

    def _document_sum(self, task: str, doc_id: int) -> float:
        windows = self.documents.get((task, doc_id), [])
        return float(sum(window.result.logprobs.sum(dtype=np.float64) for window in windows))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(sum of log-probabilities in nats, whether greedy decoding gives it) of each continuation after its context."""
        self._encode_ahead([text for request in requests for text in _texts_of_pair(*request.args)])
        keys = [self._encode_request(request) for request in requests]
        self._encoded.clear()
        self._score_new([key for key in dict.fromkeys(keys) if key not in self._scored])
        return [self._scored[key] for key in keys]

    def _encode_request(self, request: Any) -> tuple[tuple[int, ...], int]:
        """(all ids, index of the first scored one) of one request, cut from the left to the window."""
        text, continuation_text = request.args
        if text:
            context, continuation = self._encode_pair(text, continuation_text)
        else:
            context, continuation = [], self.tok_encode(continuation_text)
        if self.bos == "always" or not context:
            context = [self.prefix_token_id, *(context[1:] if context[:1] == [self.prefix_token_id] else context)]
        tally = self._tally(request.task_name)
        if len(context) + len(continuation) > self.choice_window:
            tally.truncated += 1
            context, continuation = _cut_to_window(context, continuation, self.choice_window, self.bos == "always")
        _count(tally, context, continuation)
        return (*context, *continuation), len(context)

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        """For tasks that hand over token ids."""
        keys = [((*context, *continuation), len(context)) for _, context, continuation in requests]
        self._score_new([key for key in dict.fromkeys(keys) if key not in self._scored])
        return [self._scored[key] for key in keys]

    def _score_new(self, keys: list[tuple[tuple[int, ...], int]]) -> None:
        """Score unseen sequences, those with common beginnings side by side so that the engine can share them."""
        ordered = sorted(keys)
        batch = [ScoreRequest(list(ids), first) for ids, first in ordered]
        results = self.engine.score(batch, 0, self.share_prefixes, self.progress, self.reverse, None, self.saved)
        for key, request, result in zip(ordered, batch, results, strict=True):
            greedy = bool(np.array_equal(result.top1_ids, np.asarray(request.ids[request.first :])))
            self._scored[key] = (float(result.logprobs.sum(dtype=np.float64)), greedy)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy (or as the task asks) generations, cut at the task's stop strings."""
        answers: list[str] = [""] * len(requests)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, request in enumerate(requests):
            settings = request.args[1]
            until = settings.get("until") or []
            stops = tuple([until] if isinstance(until, str) else until)
            temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
            length = int(settings.get("max_gen_toks", 256))
            groups.setdefault((stops, temperature, length), []).append(index)
        for (stops, temperature, length), members in groups.items():
            prompts = [self._generation_prompt(requests[i], length) for i in members]
            outputs, _ = self.engine.generate(prompts, length, stops, temperature, progress=self.progress)
            for index, output in zip(members, outputs, strict=True):
                answers[index] = _cut_at(output.outputs[0].text, stops)
        return answers

    def _generation_prompt(self, request: Any, length: int) -> list[int]:
        ids = self.tok_encode(request.args[0])
        if self.bos == "always" and ids[:1] != [self.prefix_token_id]:
            ids = [self.prefix_token_id, *ids]
        tally = self._tally(request.task_name)
        room = max(2, self.choice_window - length)
        if len(ids) > room:
            tally.truncated += 1
            bos = ids[:1] if self.bos == "always" else []
            ids = [*bos, *ids[len(bos) - room :]]
        _count(tally, ids, [])
        return ids

    def _tally(self, task: str) -> Tally:
        return self.tallies.setdefault(task, Tally())


def _texts_of_pair(context: str, continuation: str) -> list[str]:
    """What TemplateLM._encode_pair will ask tok_encode for: spaces at the end of the context belong to the continuation."""
    stripped = context.rstrip()
    return [context + continuation, stripped] if stripped else [context + continuation]


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Let the tokenizer use its threads; it is told not to elsewhere, because threads and forks do not go together."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _count(tally: Tally, context: Sequence[int], continuation: Sequence[int]) -> None:
    tally.ids_hash.update(np.asarray([len(context), *context, *continuation], dtype=np.int32).tobytes())
    tally.scored_tokens += len(continuation)
    tally.requests += 1


def _cut_to_window(
    context: list[int], continuation: list[int], window: int, keep_bos: bool
) -> tuple[list[int], list[int]]:
    """Drop the oldest context first; of a continuation longer than the window, its beginning. At least one context token stays."""
    bos = context[:1] if keep_bos else []
    continuation = continuation[-(window - 1) :]
    room = window - len(continuation) - len(bos)
    tail = context[len(bos) :][-room:] if room > 0 else []
    return [*bos, *tail], continuation


def _cut_at(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        if stop and stop in text:
            text = text[: text.index(stop)]
    return text


def harness_version() -> str:
    """ "lm-eval" and its version."""
    import importlib.metadata

    return f"lm-eval {importlib.metadata.version('lm-eval')}"


# Definitions of the tasks every run uses, inside lm-eval's own task folder: found without indexing its thousands of files.
STOCK_DEFINITIONS = {
    "wikitext": "wikitext/wikitext.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "truthfulqa_mc1": "truthfulqa/truthfulqa_mc1.yaml",
    "truthfulqa_mc2": "truthfulqa/truthfulqa_mc2.yaml",
}


def load_tasks(specs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """lm-eval task objects by name, with their overrides applied and their data loaded.

    Errors: ConfigError for a name lm-eval does not know or data it cannot load (one sentence each).
    """
    tasks: dict[str, Any] = {}
    for name, overrides in specs.items():
        definition_file = _definition_file(name)
        try:
            tasks[name] = _build_task(name, definition_file, overrides)
        except Exception as error:
            raise _data_error(name, error, from_hub="custom_dataset" not in overrides) from error
    return tasks


def _definition_file(name: str) -> Path:
    """lm-eval's own definition of a task. Errors: ConfigError for a name it does not know."""
    stock = Path(lm_eval.__file__).parent / "tasks" / STOCK_DEFINITIONS.get(name, "-")
    if stock.is_file():
        return stock
    manager = _task_manager()
    entry = manager.task_index.get(name)
    if entry is None or name not in manager.all_subtasks or entry.yaml_path is None:
        close = difflib.get_close_matches(name, manager.all_subtasks, n=5)
        hint = f"did you mean {', '.join(close)}?" if close else "see lm-eval's list: lm-eval ls tasks"
        raise ConfigError(f"tasks.extra names {name!r}, which is not one of lm-eval's single tasks; {hint}")
    return Path(entry.yaml_path)


@functools.cache
def _task_manager() -> Any:
    """lm-eval's index of its tasks; reading its thousands of files takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _build_task(name: str, definition_file: Path, overrides: dict[str, Any]) -> Any:
    """The stock task with our data in place of the hub's."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    definition = {**load_yaml(definition_file, resolve_func=True), **overrides, "task": name}
    for structural in ("tag", "group", "task_list"):
        definition.pop(structural, None)
    if "class" in definition:
        return definition["class"](config=definition)
    return ConfigurableTask(config=definition)


def _data_error(name: str, error: Exception, from_hub: bool) -> EvalqError:
    """One sentence for data that could not be loaded."""
    if isinstance(error, EvalqError):
        return error
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if from_hub:
        return MeasurementError(
            f"the hub gave no data for task {name} ({type(error).__name__}: {first[:200]}); "
            "check the network and HF_HUB_OFFLINE, or use data=embedded or data=local",
            "hub",
        )
    return MeasurementError(f"the data for task {name} does not fit the task ({first[:200]}); check the file", "data")


def _compile_templates_once() -> None:
    """lm-eval compiles a task's Jinja templates anew for every item, which is most of its work around the scoring."""
    environment = getattr(lm_eval.utils, "env", None)
    if environment is not None and not hasattr(environment.from_string, "cache_info"):
        environment.from_string = functools.lru_cache(maxsize=256)(environment.from_string)


def run_tasks(lm: EngineLM, tasks: dict[str, Any], limit: int | None) -> tuple[dict[str, Any], float]:
    """lm-eval's own evaluation of `tasks`; returns its results and the wall seconds.

    `evaluate` is called rather than `simple_evaluate`, which spends ten seconds on a report of the environment.
    """
    from lm_eval.evaluator import evaluate

    _compile_templates_once()
    began = time.monotonic()
    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    results = evaluate(
        lm=lm,
        task_dict={"tasks": tasks, "groups": {}, "group_map": {}},
        limit=limit,
        bootstrap_iters=0,  # evalq computes its own, paired, intervals
        log_samples=True,
        verbosity="ERROR",
    )
    return dict(results or {}), time.monotonic() - began


def sample_rows(task: str, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """items.parquet rows of one choice task from lm-eval's samples."""
    rows: list[dict[str, Any]] = []
    for sample in samples:
        values = _sample_loglikelihoods(sample)
        choices = _sample_choices(sample)
        for metric, value in _numeric_metrics(sample).items():
            rows.append(
                {
                    "task": task,
                    "item_id": int(sample["doc_id"]),
                    "item_hash": str(sample["doc_hash"]),
                    "cluster": _cluster(sample["doc"]),
                    "metric": metric,
                    "value": value,
                    "answer": _answer(metric, values, choices),
                    "gold": _gold(sample),
                    "choice_logprobs": values,
                }
            )
    return rows


def _numeric_metrics(sample: dict[str, Any]) -> dict[str, float]:
    names = sample.get("metrics") or []
    return {name: float(sample[name]) for name in names if isinstance(sample.get(name), int | float | np.number)}


def _sample_loglikelihoods(sample: dict[str, Any]) -> list[float]:
    answers = sample.get("filtered_resps") or []
    if answers and all(isinstance(a, list | tuple) and len(a) == 2 for a in answers):
        return [float(a[0]) for a in answers]
    return []


def _sample_choices(sample: dict[str, Any]) -> list[str]:
    arguments = sample.get("arguments") or {}
    pairs = arguments.values() if isinstance(arguments, dict) else arguments
    texts = []
    for pair in pairs:
        parts = list(pair.values()) if isinstance(pair, dict) else list(pair)
        texts.append(str(parts[1]) if len(parts) > 1 else "")
    return texts


def _answer(metric: str, values: list[float], choices: list[str]) -> int | None:
    """Index of the ending chosen: highest sum, or highest sum per character for acc_norm (as lm-eval divides)."""
    if not values or metric not in ("acc", "acc_norm"):
        return None
    if metric == "acc_norm" and len(choices) == len(values):
        # lm-eval divides by the characters of the choice itself, without the delimiter that precedes it.
        lengths = [max(1, len(choice.lstrip(" "))) for choice in choices]
        return int(np.argmax([v / n for v, n in zip(values, lengths, strict=True)]))
    return int(np.argmax(values))


def _gold(sample: dict[str, Any]) -> int | None:
    target = sample.get("target")
    text = str(target)
    return int(text) if text.lstrip("-").isdigit() else None


def _cluster(doc: Any) -> str:
    """Items from one source share a cluster: the same activity or category, where the data set says so."""
    if isinstance(doc, dict):
        for key in ("source_id", "article_id", "passage_id"):
            if doc.get(key):
                return str(doc[key])
    return ""


def dataset_hash(samples: list[dict[str, Any]]) -> str:
    """sha256 over the items' hashes, in order."""
    digest = hashlib.sha256()
    for sample in sorted(samples, key=lambda s: int(s["doc_id"])):
        digest.update(str(sample["doc_hash"]).encode())
    return digest.hexdigest()


def metric_values(results: dict[str, Any]) -> dict[str, float | None]:
    """lm-eval's aggregate metrics of one task, without filters' suffixes and error bars."""
    values: dict[str, float | None] = {}
    for key, value in results.items():
        name, _, suffix = key.partition(",")
        if not suffix or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        name = name if suffix == "none" else f"{name}_{suffix}"
        values[name] = float(value) if np.isfinite(value) else None
    return values
