"""A review in a real MLflow store: traces with both outputs, questions and a queue, and feedback read back."""

from __future__ import annotations

from typing import Any

import pytest

from evalq.judge.blind import Pair
from evalq.tracking.store import Store
from evalq.tracking.traces import QUESTIONS, ReviewTraces

pytestmark = pytest.mark.usefixtures("upload")
PAIRS = [Pair(f"p{i:03d}", f"prompt {i}", f"left {i}", f"right {i}") for i in (1, 2)]


def test_traces_are_made_once_and_feedback_comes_back(store: Store, upload: Any) -> None:
    import mlflow
    from mlflow.entities import AssessmentSource

    traces = ReviewTraces(store, "reviews of a test")
    assert traces.log_pairs("review-x", PAIRS) == 2
    assert traces.log_pairs("review-x", PAIRS) == 0, "each prompt is one trace, however often this is called"
    experiment = upload._client.get_experiment_by_name("reviews of a test")
    assert experiment.artifact_location.startswith(store.artifacts.as_uri())
    found = {
        trace.info.tags["evalq.review_item"]: trace
        for trace in mlflow.MlflowClient().search_traces(locations=[experiment.experiment_id])
    }
    root = found["p001"].data.spans[0]
    assert (root.inputs, root.outputs) == ({"prompt": "prompt 1"}, {"A": "left 1", "B": "right 1"})
    assert not any("candidate" in str(trace.to_json()) for trace in found.values()), "blind"

    def answer(item: str, name: str, value: str, who: str = "ann") -> None:
        source = AssessmentSource(source_type="HUMAN", source_id=who)
        mlflow.log_feedback(trace_id=found[item].info.trace_id, name=name, value=value, source=source)

    answer("p001", "preference", "a")
    answer("p001", "coherence_a", "4")
    answer("p002", "preference", "tie", "bob")
    answer("p002", "something else", "x", "bob")
    given = traces.feedback("review-x")
    assert [(one.reviewer, one.item, one.values) for one in given] == [
        ("ann", "p001", {"preference": "a", "coherence_a": "4"}),
        ("bob", "p002", {"preference": "tie"}),
    ]
    assert traces.feedback("another review") == []


def test_the_questions_are_a_form_in_mlflow(store: Store, upload: Any) -> None:
    queues = pytest.importorskip("mlflow.genai.review_queues", reason="needs MLflow 3.14")
    from mlflow.genai.label_schemas import list_label_schemas

    ReviewTraces(store, "reviews with a queue").log_pairs("review-y", PAIRS)
    number = upload._client.get_experiment_by_name("reviews with a queue").experiment_id
    assert set(QUESTIONS) <= {schema.name for schema in list_label_schemas(experiment_id=number)}  # and MLflow's own
    queue = queues.get_review_queue(name="review-y", experiment_id=number)
    assert len(queues.list_review_queue_items(queue.queue_id)) == 2
