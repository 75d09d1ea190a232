"""A review in MLflow: one trace per prompt with both outputs under their letters, and reviewers' answers as its feedback.

mlflow is imported when it is used. Label schemas and a review queue (MLflow 3.14 and newer) make the questions a form on
MLflow's own page; older versions take the same answers as feedback of the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evalq.errors import MeasurementError
from evalq.tracking.store import Store, redact, slug

REVIEW_TAG, ITEM_TAG = "evalq.review", "evalq.review_item"
SCALE = ["1", "2", "3", "4", "5"]
QUESTIONS: dict[str, tuple[list[str], str]] = {  # feedback name -> allowed values, instruction
    "preference": (["a", "b", "tie"], "Which output do you prefer?"),
    "coherence_a": (SCALE, "Coherence of A: 1 falls apart, 5 reads as one clear thought"),
    "coherence_b": (SCALE, "Coherence of B: 1 falls apart, 5 reads as one clear thought"),
    "facts_a": (["right", "wrong", "unsure"], "Facts of A, as far as you can tell"),
    "facts_b": (["right", "wrong", "unsure"], "Facts of B, as far as you can tell"),
}


class Shown(Protocol):
    """One prompt with its two outputs, in the order shown."""

    @property
    def item(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def a(self) -> str: ...
    @property
    def b(self) -> str: ...


@dataclass(frozen=True)
class Given:
    """One reviewer's feedback on one item, as it was entered."""

    reviewer: str
    item: str
    values: dict[str, Any]


class ReviewTraces:
    """Traces of one review in one store. Errors: MeasurementError when the store fails."""

    def __init__(self, store: Store, experiment: str) -> None:
        self._store = store
        self._experiment = experiment

    def log_pairs(self, review_id: str, pairs: Sequence[Shown]) -> int:
        """Make the traces that are not there yet, the questions and the queue; returns how many were made."""
        return int(self._guarded(lambda client: self._log_pairs(client, review_id, pairs)))

    def feedback(self, review_id: str) -> list[Given]:
        """What people entered on the traces, by reviewer and item; the latest value of each question."""
        found: list[Given] = self._guarded(lambda client: self._feedback(client, review_id))
        return found

    def _guarded(self, action: Any) -> Any:
        import mlflow

        try:
            mlflow.set_tracking_uri(self._store.mlflow_uri)
            return action(mlflow.MlflowClient())
        except Exception as error:  # MLflow raises whatever its store raises
            reason = " ".join(str(error).split())[:300]
            raise MeasurementError(
                f"MLflow at {redact(self._store.uri)} does not take the review ({type(error).__name__}: {reason}); "
                "the form works without it"
            ) from error

    def _log_pairs(self, client: Any, review_id: str, pairs: Sequence[Shown]) -> int:
        import mlflow

        number = self._experiment_id(client)
        there = {trace.info.tags.get(ITEM_TAG): trace.info.trace_id for trace in self._traces(client, review_id)}
        made = 0
        for pair in pairs:
            if pair.item in there:
                continue
            tags = {REVIEW_TAG: review_id, ITEM_TAG: pair.item}
            span = client.start_trace(pair.item, inputs={"prompt": pair.prompt}, tags=tags, experiment_id=number)
            client.end_trace(span.trace_id, outputs={"A": pair.a, "B": pair.b})
            there[pair.item] = span.trace_id
            made += 1
        mlflow.flush_trace_async_logging()
        self._make_queue(number, review_id, [there[pair.item] for pair in pairs])
        return made

    def _experiment_id(self, client: Any) -> str:
        found = client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        location = (self._store.artifacts / slug(self._experiment)).as_uri() if self._store.artifacts else None
        return str(client.create_experiment(self._experiment, artifact_location=location))

    def _make_queue(self, experiment: str, review_id: str, traces: list[str]) -> None:
        try:
            from mlflow.genai import label_schemas, review_queues
        except ImportError:
            return
        if not hasattr(label_schemas, "list_label_schemas") or not hasattr(review_queues, "create_review_queue"):
            return
        known = {schema.name: schema.schema_id for schema in label_schemas.list_label_schemas(experiment_id=experiment)}
        for name, (options, instruction) in QUESTIONS.items():
            if name not in known:
                known[name] = label_schemas.create_label_schema(
                    name,
                    type="feedback",
                    input=label_schemas.InputCategorical(options=options),
                    instruction=instruction,
                    experiment_id=experiment,
                ).schema_id
        queues = {queue.name: queue.queue_id for queue in review_queues.list_review_queues(experiment_id=experiment)}
        if review_id not in queues:
            queues[review_id] = review_queues.create_review_queue(
                review_id, queue_type="custom", schema_ids=[known[name] for name in QUESTIONS], experiment_id=experiment
            ).queue_id
        review_queues.add_items_to_review_queue(queues[review_id], item_ids=traces)

    def _traces(self, client: Any, review_id: str) -> list[Any]:
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return []
        found: list[Any] = []
        token: str | None = None
        while True:
            page = client.search_traces(
                locations=[experiment.experiment_id],
                filter_string=f"tags.`{REVIEW_TAG}` = '{review_id}'",
                max_results=200,
                include_spans=False,
                page_token=token,
            )
            found.extend(page)
            token = page.token
            if not token:
                return found

    def _feedback(self, client: Any, review_id: str) -> list[Given]:
        given: dict[tuple[str, str], dict[str, Any]] = {}
        for trace in self._traces(client, review_id):
            latest: dict[tuple[str, str], Any] = {}
            for assessment in trace.info.assessments or []:
                if assessment.name in QUESTIONS and str(assessment.source.source_type) == "HUMAN":
                    latest[str(assessment.source.source_id), assessment.name] = assessment
            for (reviewer, name), assessment in sorted(latest.items()):
                given.setdefault((reviewer, str(trace.info.tags[ITEM_TAG])), {})[name] = assessment.value
        return [Given(reviewer, item, values) for (reviewer, item), values in sorted(given.items())]
