"""What is logged as MLflow's own objects: datasets as inputs, system metrics. mlflow is imported when it is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from evalq.records import Record
from evalq.tracking.system import PREFIX, Sample


def datasets_of(record: Record) -> list[Any]:
    """Each task's data with its hash and what was left out."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for task, scores in record.tasks.items():
        source = json.dumps({"dataset": scores.dataset, "sha256": scores.dataset_hash})
        profile = json.dumps({"n": scores.n, "left_out": scores.left_out, "truncated": scores.truncated})
        dataset = Dataset(
            name=f"{task}: {scores.dataset}"[:500],
            digest=scores.dataset_hash[:36] or "unknown",
            source_type="evalq",
            source=source,
            profile=profile,
        )
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", "evaluation")]))
    return inputs


def system_metrics(samples: Sequence[Sample]) -> list[Any]:
    """As MLflow's own monitor logs them; its page draws what begins with system/."""
    from mlflow.entities import Metric

    return [
        Metric(f"{PREFIX}{name}", value, stamp, step)
        for step, (stamp, values) in enumerate(samples)
        for name, value in values.items()
    ]
