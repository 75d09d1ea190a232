"""Documents that are left out, a file in place of the set's own, and the texts that calibration must not share."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from evalq.config import DataConfig, RunConfig, TasksConfig, config_hash
from evalq.errors import ConfigError
from evalq.measure import data
from evalq.measure.documents import evaluation_documents


def config(**changes: Any) -> RunConfig:
    return RunConfig(tasks=TasksConfig(hellaswag=False, truthfulqa=False), data=DataConfig(**changes))


def scored(source: data.Source, skipped: int) -> list[str]:
    pytest.importorskip("datasets")
    made = data.task_overrides(source, DataConfig(), skipped)["custom_dataset"]()
    return [row["page"] for row in made["test"]]


def test_documents_at_the_beginning_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "pages.jsonl"
    file.write_text("".join(json.dumps({"page": f"p{n}"}) + "\n" for n in range(5)))
    source = data.find_sources(config(perplexity_file=str(file)))[data.PERPLEXITY]
    assert source.label == "file pages.jsonl"
    assert scored(source, 0) == ["p0", "p1", "p2", "p3", "p4"]
    assert scored(source, 3) == ["p3", "p4"]
    with pytest.raises(ConfigError, match="leaves none of the 5 documents"):
        scored(source, 5)


def test_the_hub_has_no_beginning_to_leave_out() -> None:
    source = data.find_sources(config(name="hub"))[data.PERPLEXITY]
    with pytest.raises(ConfigError, match="needs documents of a file"):
        data.task_overrides(source, DataConfig(name="hub"), 3)


def test_what_is_not_used_changes_no_hash(tmp_path: Path) -> None:
    plain = config()
    with_file = dataclasses.replace(plain, data=DataConfig(perplexity_file="x"))
    assert config_hash(plain) != config_hash(with_file)
    assert "perplexity_file" not in json.dumps(dataclasses.asdict(plain.tasks))


def test_every_item_of_a_file_is_a_document_once() -> None:
    found = evaluation_documents(RunConfig())
    labels = [label for label, _ in found]
    assert len(labels) == len(set(labels)) == 66 + 128 + 94  # mc1 and mc2 share a file
    assert labels[0] == "document 0 of embedded articles (wikitext)"
    assert found[0][1].startswith("The Tides")
