"""Where items come from: embedded, local, hub; what is missing or damaged is said in one sentence, never swapped."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from evalq.config import DataConfig
from evalq.errors import ConfigError
from evalq.measure import data
from evalq.measure.data import Source, find_sources, read_rows, task_overrides

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_data_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVALQ_DATA", raising=False)


def local_folder(root: Path) -> Path:
    rows: dict[str, dict[str, Any]] = {
        "wikitext2/test.jsonl": {"page": "a page"},
        "hellaswag/validation_1000.jsonl": {"query": "q", "choices": ["a", "b"], "gold": 0},
        "truthfulqa/mc.jsonl": {"question": "q", "mc1_targets": {}, "mc2_targets": {}},
    }
    for name, row in rows.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(json.dumps(row) + "\n")
    return root


def test_embedded_is_labelled_and_hashed(cell_config: Any) -> None:
    sources = find_sources(cell_config("baseline"))
    assert list(sources) == ["wikitext", "hellaswag", "truthfulqa_mc1", "truthfulqa_mc2"]
    assert sources["wikitext"].label == "embedded articles"
    assert len(sources["wikitext"].identity) == 64
    assert sources["truthfulqa_mc1"].file == sources["truthfulqa_mc2"].file


def test_tasks_that_are_switched_off_are_not_looked_for(cell_config: Any, tmp_path: Path) -> None:
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "test.jsonl").write_text('{"page": "x"}\n')
    config = cell_config("baseline", "data=local", "tasks=perplexity", f"data.root={tmp_path}")
    assert list(find_sources(config)) == ["wikitext"]


def test_local_without_a_folder_says_how_to_give_one(cell_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"give data.root=/path/to/data or set EVALQ_DATA"):
        find_sources(cell_config("baseline", "data=local"))


def test_local_folder_from_the_environment(cell_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALQ_DATA", str(local_folder(tmp_path)))
    sources = find_sources(cell_config("baseline", "data=local"))
    assert sources["hellaswag"].label == "HellaSwag-1000"
    assert sources["hellaswag"].file == tmp_path / "hellaswag" / "validation_1000.jsonl"


def test_data_root_wins_over_the_environment(cell_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALQ_DATA", "/somewhere/else")
    config = cell_config("baseline", "data=local", f"data.root={local_folder(tmp_path)}")
    assert find_sources(config)["wikitext"].file == tmp_path / "wikitext2" / "test.jsonl"


def test_every_missing_file_is_listed_at_once(cell_config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_sources(cell_config("baseline", "data=local", f"data.root={tmp_path}"))
    text = str(caught.value)
    assert all(f"data for {task} is missing: no file {tmp_path}" in text for task in ("wikitext", "hellaswag"))
    with pytest.raises(ConfigError, match="is not a folder"):
        find_sources(cell_config("baseline", "data=local", f"data.root={tmp_path / 'none'}"))


def test_task_that_local_has_no_file_for(cell_config: Any, tmp_path: Path) -> None:
    config = cell_config("baseline", "data=local", "tasks.extra=[mmlu]", f"data.root={local_folder(tmp_path)}")
    with pytest.raises(
        ConfigError, match="task mmlu has no file known to data=local; use one of arc_challenge, arc_easy"
    ):
        find_sources(config)


def test_hub_source_is_named_with_its_revision(cell_config: Any) -> None:
    config = cell_config("baseline", "data=hub", "data.revisions={Rowan/hellaswag: 1e5}", "tasks.extra=[arc_easy]")
    sources = find_sources(config)
    assert sources["hellaswag"].label == "hub:Rowan/hellaswag@1e5"
    assert sources["wikitext"].label == "hub:EleutherAI/wikitext_document_level@main"
    assert sources["arc_easy"].file is None
    assert task_overrides(sources["hellaswag"], config.data) == {"dataset_kwargs": {"revision": "1e5"}}
    assert task_overrides(sources["wikitext"], config.data) == {}


def test_extra_task_of_embedded_data_comes_from_the_hub_and_says_so(cell_config: Any) -> None:
    sources = find_sources(cell_config("baseline", "tasks.extra=[arc_easy]"))
    assert sources["arc_easy"].label.startswith("hub:")
    assert sources["wikitext"].label == "embedded articles"


def test_changed_items_change_the_identity(cell_config: Any, tmp_path: Path) -> None:
    config = cell_config("baseline", "data=local", f"data.root={local_folder(tmp_path)}")
    first = find_sources(config)["wikitext"].identity
    (tmp_path / "wikitext2" / "test.jsonl").write_text('{"page": "another page"}\n')
    assert find_sources(config)["wikitext"].identity != first


def rows_of(
    tmp_path: Path, content: bytes | str, task: str = "wikitext", name: str = "items.jsonl"
) -> list[dict[str, Any]]:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_rows(Source(task, "label", file, "identity"))


def test_rows_plain_and_compressed(tmp_path: Path) -> None:
    text = '{"page": "one"}\n\n  \n{"page": "zwei ü"}\n'
    expected = [{"page": "one"}, {"page": "zwei ü"}]
    assert rows_of(tmp_path, text) == expected
    assert rows_of(tmp_path, gzip.compress(text.encode()), name="items.jsonl.gz") == expected


@pytest.mark.parametrize(
    ("content", "task", "words"),
    [
        ('{"page": "one"}\n{"page": \n', "wikitext", "line 2 is not JSON"),
        ("[1]\n", "wikitext", "line 1 is not a JSON object"),
        ('{"text": "one"}\n', "wikitext", "line 1 lacks page; expected the columns page"),
        ('{"query": "q", "gold": 1}\n', "hellaswag", "lacks choices"),
        ('{"question": "q"}\n', "truthfulqa_mc2", "lacks mc2_targets"),
        ("\n\n", "wikitext", "holds no items"),
        ("", "wikitext", "holds no items"),
        (b'{"page": "\xff\xfe"}\n', "wikitext", "cannot be read"),
    ],
)
def test_damaged_files_are_one_sentence(tmp_path: Path, content: Any, task: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rows_of(tmp_path, content, task)
    assert words in str(caught.value)
    assert "items.jsonl" in str(caught.value)


@pytest.mark.parametrize("content", [b"no gzip at all", gzip.compress(b'{"page": "x"}\n' * 100, mtime=0)[:-20]])
def test_damaged_compressed_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"items.jsonl.gz cannot be read"):
        rows_of(tmp_path, content, name="items.jsonl.gz")


def test_hub_rows_are_not_read_here() -> None:
    with pytest.raises(ValueError, match="comes from the hub"):
        read_rows(Source("wikitext", "label", None, "identity"))


def test_shared_data_has_the_documented_shape() -> None:
    root = Path(os.environ.get("EVALQ_DATA") or REPOSITORY.parent / "shared" / "data")
    if not root.is_dir():
        pytest.skip("no evaluation data: set EVALQ_DATA")
    counts = {}
    for task, (name, label) in data.LOCAL_FILES.items():
        counts[task] = len(read_rows(Source(task, label, root / name, "")))
    assert counts["wikitext"] == 62
    assert counts["hellaswag"] == 1000
    assert counts["truthfulqa_mc1"] == counts["truthfulqa_mc2"] == 817


def test_overrides_never_touch_scoring(cell_config: Any) -> None:
    """Only where items come from and how they are split; prompts, targets' texts and metrics stay lm-eval's."""
    allowed = {"custom_dataset", "training_split", "validation_split", "test_split", "process_docs", "doc_to_target"}
    for source in find_sources(cell_config("baseline")).values():
        assert set(task_overrides(source, DataConfig())) <= allowed
