"""Reading checkpoint folders: complete, truncated, pickled, foreign."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tiny_checkpoint import shard, tiny_tensors, write_checkpoint

from evalq.config import ModelConfig
from evalq.errors import ConfigError, EvalqError, MeasurementError
from evalq.quantize import source_checkpoint, weights_hash
from evalq.quantize.tensors import check_folder


def checkpoint_error(folder: Path) -> str:
    with pytest.raises(MeasurementError) as error:
        check_folder(folder)
    assert error.value.kind == "checkpoint"
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_complete_folder(tiny: Path) -> None:
    tensors = check_folder(tiny)
    assert tensors.keys() == tiny_tensors().keys()
    first = tensors["model.norm.weight"]
    assert (first.dtype, first.shape, first.nbytes) == ("BF16", (64,), 128)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_anywhere(tiny: Path, keep: int) -> None:
    file = tiny / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: keep if keep >= 0 else len(data) + keep])
    assert str(file) in checkpoint_error(tiny)


def test_longer_than_its_header(tiny: Path) -> None:
    with open(tiny / "model.safetensors", "ab") as file:
        file.write(b"x")
    assert "model.safetensors" in checkpoint_error(tiny)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": 5}',
    ],
)
def test_damaged_headers(tiny: Path, header: bytes) -> None:
    (tiny / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "model.safetensors" in checkpoint_error(tiny)


def test_shards_and_their_index(tiny: Path) -> None:
    tensors = tiny_tensors()
    shard(tiny, tensors)
    assert check_folder(tiny).keys() == tensors.keys()
    second = tiny / "model-00002-of-00002.safetensors"
    moved = second.rename(tiny / "elsewhere.bin")
    assert second.name in checkpoint_error(tiny)
    moved.rename(second)
    index = tiny / "model.safetensors.index.json"
    for bad in ('{"weight_map": {"a": "../model.safetensors"}}', "{}", "[", '{"weight_map": {}}', '{"weight_map": 3}'):
        index.write_text(bad)
        assert "index" in checkpoint_error(tiny)
    index.write_text(json.dumps({"weight_map": {"model.missing.weight": second.name}}))
    assert "model.missing.weight" in checkpoint_error(tiny)


def test_missing_parts(tiny: Path, tmp_path: Path) -> None:
    (tiny / "tokenizer.json").unlink()
    assert "tokenizer" in checkpoint_error(tiny)
    (tiny / "config.json").write_text("{")
    assert "config.json" in checkpoint_error(tiny)
    (tiny / "config.json").unlink()
    assert "config.json" in checkpoint_error(tiny)
    with pytest.raises(ConfigError, match="no checkpoint folder"):
        check_folder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no safetensors file" in checkpoint_error(tmp_path / "empty")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused(tiny: Path, name: str) -> None:
    (tiny / "model.safetensors").rename(tiny / name)
    with pytest.raises(ConfigError, match="pickled"):
        check_folder(tiny)


def test_source_is_a_folder_of_ones_own(tiny: Path, tmp_path: Path) -> None:
    def source(path: Path) -> Path:
        return source_checkpoint(
            ModelConfig(name="own", source="path", path=str(path), bos="never"), tmp_path / "models"
        )

    assert source(tiny) == tiny
    with pytest.raises(ConfigError, match="is a file"):
        source(tiny / "model.safetensors")
    with pytest.raises(ConfigError, match="nowhere"):
        source(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(name="x", source="package", package="no_such_package_at_all"),
        ModelConfig(name="x", source="package", package="json"),
        ModelConfig(name="x", source="package", package="a.b"),
        ModelConfig(name="x", source="package"),
        ModelConfig(name="x", source="path"),
        ModelConfig(name="x", source="hub"),
    ],
)
def test_sources_that_do_not_exist(model: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(EvalqError) as error:
        source_checkpoint(model, tmp_path)
    assert error.value.exit_code == 2


def test_weights_hash_follows_contents(tiny: Path, tmp_path: Path) -> None:
    first = weights_hash(tiny)
    assert weights_hash(tiny) == first  # from the cache beside it
    (tiny / ".evalq_hashes.json").write_text("[]")
    assert weights_hash(tiny) == first
    assert weights_hash(write_checkpoint(tmp_path / "copy", tiny_tensors())) == first
    changed = tiny_tensors()
    changed["model.norm.weight"][0] += 1
    write_checkpoint(tiny, changed)
    assert weights_hash(tiny) != first
    (tiny / "config.json").write_text('{"model_type": "other"}')
    assert weights_hash(tiny) != first
