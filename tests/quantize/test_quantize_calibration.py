"""Calibration text: sources, order by seed, and what is refused; the embedded passages share nothing with the embedded sets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from evalq.config import CalibrationConfig, DataConfig, QuantConfig, RunConfig, config_hash, needs_calibration
from evalq.config_check import check
from evalq.errors import ConfigError
from evalq.measure.documents import evaluation_documents, text_of
from evalq.quantize.calibration import calibration_text
from evalq.quantize.contamination import Document, overlaps

TINY = {"samples": 1, "length_tokens": 1}


def local(file: Path, **changes: object) -> CalibrationConfig:
    return CalibrationConfig(source="local", file=str(file), **changes)  # type: ignore[arg-type]


def test_the_embedded_passages_share_nothing_with_the_embedded_sets() -> None:
    given = CalibrationConfig(samples=8)
    texts = calibration_text(given, DataConfig())
    documents = [Document(*pair) for pair in evaluation_documents(RunConfig())]
    assert len(texts.texts) == 30
    assert len(documents) > 200
    assert overlaps(texts.texts, documents) == []


def test_the_embedded_articles_are_refused_for_the_embedded_data() -> None:
    given = CalibrationConfig(file="articles.jsonl", columns=["page"], samples=64)
    texts = calibration_text(given, DataConfig())
    documents = [Document(*pair) for pair in evaluation_documents(RunConfig())]
    found = overlaps(texts.texts, documents)
    assert len(found) == len(texts.texts)
    assert "embedded articles" in found[0].document


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"text {n}"}) for n in range(20)))
    orders = [calibration_text(local(file, seed=seed), DataConfig()) for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0].texts != orders[2].texts
    assert sorted(orders[0].texts) == sorted(orders[2].texts)
    assert orders[0].sha256 != orders[2].sha256


def test_no_more_text_is_kept_than_the_windows_can_need(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl.gz"
    with gzip.open(file, "wt") as out:
        out.writelines(json.dumps({"a": "x" * 100, "b": "y"}) + "\n" for _ in range(50))
    made = calibration_text(local(file, columns=["a", "b"], samples=2, length_tokens=10), DataConfig())
    assert len(made.texts) == 2
    assert made.texts[0] == "x" * 100 + "\n\ny"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}\nnot json', "line 2 is not JSON"),
        ('["a"]', "line 1 is not a JSON object"),
        ('{"page": "a"}', "has no column text; it has page"),
        ('{"text": " "}', "holds no text"),
        ("", "holds no text"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        calibration_text(local(file, **TINY), DataConfig())


def test_a_relative_file_needs_a_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVALQ_DATA", raising=False)
    with pytest.raises(ConfigError, match="is relative and there is no data folder"):
        calibration_text(local(Path("text.jsonl")), DataConfig())
    (tmp_path / "text.jsonl").write_text('{"text": "a"}')
    assert calibration_text(local(Path("text.jsonl")), DataConfig(root=str(tmp_path))).texts == ("a",)
    with pytest.raises(ConfigError, match="calibration text is missing: no file"):
        calibration_text(local(Path("other.jsonl")), DataConfig(root=str(tmp_path)))


def test_text_of_an_item_is_all_its_text() -> None:
    assert text_of({"q": "a", "n": 1, "c": {"choices": ["b", ["c"]], "labels": [1, 0]}}) == "a\nb\nc"


def test_calibration_changes_the_hash_of_calibrated_cells_only() -> None:
    def hashed(method: str, **changes: int) -> str:
        quant = QuantConfig(name="q", origin="evalq", kv_cache_dtype="bfloat16", method=method)
        return config_hash(RunConfig(quant=quant, calibration=CalibrationConfig(**changes)))

    assert hashed("rtn") == hashed("rtn", samples=5)
    assert hashed("gptq") != hashed("gptq", samples=5)
    assert not needs_calibration(QuantConfig(method="gptq", origin="checkpoint"))


def test_bad_calibration_keys_are_listed() -> None:
    config = RunConfig(calibration=CalibrationConfig(source="disk", samples=0, columns=[]))
    with pytest.raises(ConfigError) as caught:
        check(config)
    text = str(caught.value)
    assert "calibration.source='disk'" in text
    assert "calibration.samples=0 must be above 0" in text
    assert "calibration.columns is empty" in text
