"""Making checkpoints: contents, cache, interruption, full disk, two at once."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors import safe_open
from tiny_checkpoint import SCHEMES, int8, mixed, shard, tiny_tensors, w4a16, write_checkpoint

from evalq.config import QuantConfig
from evalq.errors import ConfigError, MeasurementError
from evalq.quantize import make, make_checkpoint, make_checkpoint_at, store, verify_checkpoint
from evalq.quantize.compressed import quantization_config
from evalq.quantize.tensors import check_folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            tensors.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
    return tensors


def unpacked(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a made checkpoint, read by compressed-tensors' own decompressors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    report = json.loads((folder / "quantization_report.json").read_text())
    stored, result = read(folder), {}
    for module, layer in report["layers"].items():
        group = config["config_groups"][layer["group"]]
        own = {
            name.removeprefix(f"{module}."): tensor for name, tensor in stored.items() if name.startswith(f"{module}.")
        }
        compressor = BaseCompressor.get_value_from_registry(group["format"])
        result[module] = compressor.decompress(own, QuantizationScheme.model_validate(group))["weight"]
    return result


@pytest.mark.parametrize("name", SCHEMES)
def test_the_library_reads_what_the_report_says(tiny: Path, tmp_path: Path, name: str) -> None:
    """Decompressed weights differ from the source by exactly the reported squared error; the rest is bit-identical."""
    folder = make_checkpoint(tiny, SCHEMES[name](), tmp_path / "out")
    report = json.loads((folder / "quantization_report.json").read_text())
    source = tiny_tensors()
    for module, weight in unpacked(folder).items():
        original = source.pop(f"{module}.weight").to(torch.float64)
        # bfloat16 decompression rounds once more, so packed weights are compared with that much slack
        error = float((weight.to(torch.float64) - original).square().sum() / original.square().sum())
        assert error == pytest.approx(report["layers"][module]["relative_squared_error"], rel=0.02)
    stored = read(folder)
    for tensor_name, tensor in source.items():
        assert torch.equal(stored[tensor_name].view(torch.int16), tensor.view(torch.int16))
    assert set(report["kept"]) == set(source)
    check_folder(folder)
    verify_checkpoint(folder)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_library_accepts_the_config(name: str) -> None:
    """compressed-tensors' strict schema takes every field, and gives back the same values."""
    from compressed_tensors.quantization import QuantizationConfig

    written = quantization_config(SCHEMES[name](), ["model.layers.0.mlp.down_proj"])
    read_back = QuantizationConfig.model_validate(written).model_dump(mode="json")
    assert {key: read_back[key] for key in ("format", "ignore", "quantization_status", "quant_method")} == {
        key: written[key] for key in ("format", "ignore", "quantization_status", "quant_method")
    }
    for group_name, group in written["config_groups"].items():
        for part in ("weights", "input_activations"):
            library, ours = read_back["config_groups"][group_name][part], group[part]
            assert ours == (library and {key: library[key] for key in ours})


def test_config_is_what_vllm_reads(tiny: Path, tmp_path: Path) -> None:
    folder = make_checkpoint(tiny, mixed(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((tiny / "config.json").read_text())
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["quantization_status"] == "compressed"
    assert quantization["format"] == "mixed-precision"
    formats = {name: group["format"] for name, group in quantization["config_groups"].items()}
    assert formats == {"attention": "int-quantized", "feed_forward": "pack-quantized"}
    assert "model.layers.0.mlp.down_proj" in quantization["ignore"]
    assert (folder / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert {file.suffix for file in folder.iterdir()} == {".json", ".safetensors"}


def test_shards_in_and_out(tiny: Path, tmp_path: Path) -> None:
    whole = make_checkpoint(tiny, mixed(), tmp_path / "whole")
    shard(tiny, tiny_tensors())
    job = make.plan_job(tiny, mixed())
    folder = make._make(job, tmp_path / "cut", None, shard_bytes=20_000)
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    check_folder(folder)
    assert all(torch.equal(tensor, read(whole)[name]) for name, tensor in read(folder).items())
    assert read(folder).keys() == read(whole).keys()


def test_found_again_by_content(tiny: Path, tmp_path: Path) -> None:
    first = make_checkpoint(tiny, w4a16(), tmp_path / "out")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    kv = w4a16()
    kv.name, kv.kv_cache_dtype = "another name", "fp8_e4m3"
    copy = write_checkpoint(tmp_path / "copy", tiny_tensors())
    assert make_checkpoint(copy, kv, tmp_path / "out") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    other = w4a16()
    other.clip_search = False
    assert make_checkpoint(tiny, other, tmp_path / "out") != first
    (copy / "tokenizer.json").write_text('{"model": {"other": 1}}')
    assert make_checkpoint(copy, w4a16(), tmp_path / "out") != first


def test_two_runs_write_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    folders = [make_checkpoint(tiny, mixed(), tmp_path / name) for name in ("a", "b")]
    contents = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders]
    assert contents[0] == contents[1]


def test_a_damaged_checkpoint_is_made_anew(tiny: Path, tmp_path: Path) -> None:
    folder = make_checkpoint(tiny, int8(), tmp_path)
    file = folder / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-10])
    with pytest.raises(MeasurementError, match="damaged checkpoint"):
        verify_checkpoint(folder)
    assert make_checkpoint(tiny, int8(), tmp_path) == folder
    assert file.read_bytes() == good
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))  # same size: only verify_checkpoint reads contents
    with pytest.raises(MeasurementError, match="not the file"):
        verify_checkpoint(folder)
    (folder / "evalq_manifest.json").write_text("{}")
    make_checkpoint(tiny, int8(), tmp_path)
    verify_checkpoint(folder)


def test_into_a_folder_by_name(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    assert make_checkpoint_at(tiny, int8(), out) == out
    assert make_checkpoint_at(tiny, int8(), out) == out
    with pytest.raises(MeasurementError, match="not this checkpoint"):
        make_checkpoint_at(tiny, w4a16(), out)
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    with pytest.raises(MeasurementError, match="not this checkpoint"):
        make_checkpoint_at(tiny, int8(), full)
    assert (full / "thesis.txt").read_text() == "mine"


def test_weights_that_are_no_numbers_name_the_tensor(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    folder = write_checkpoint(tmp_path / "nan", tensors)
    with pytest.raises(MeasurementError, match=r"model\.layers\.1\.mlp\.up_proj\.weight") as error:
        make_checkpoint(folder, int8(), tmp_path / "out")
    assert error.value.kind == "checkpoint"
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".lock"]


def disk_error(folder: Path, quant: QuantConfig, out: Path) -> str:
    with pytest.raises(MeasurementError) as error:
        make_checkpoint(folder, quant, out)
    assert error.value.kind == "disk"
    assert not [path for path in out.glob("*") if path.is_dir()]
    return str(error.value)


def test_no_room_is_found_before_starting(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "free_bytes", lambda folder: 1000)
    text = disk_error(tiny, int8(), tmp_path / "out")
    assert "1000 are free" in text
    assert "bytes are needed" in text


def test_disk_full_while_writing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "are free" in disk_error(tiny, int8(), tmp_path / "out")
    assert not list((tmp_path / "out").glob(".*.tmp"))
    monkeypatch.undo()
    verify_checkpoint(make_checkpoint(tiny, int8(), tmp_path / "out"))


def test_a_place_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write" in disk_error(tiny, int8(), tmp_path / "file")


def test_progress_ends_at_the_whole(tiny: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    make_checkpoint(tiny, mixed(), tmp_path, lambda *step: seen.append(step))
    rounding = [step for step in seen if step[1] > 100]
    assert rounding[-1][0] == rounding[-1][1] == 2 * (64 * 64 * 2 + 32 * 64 * 2 + 128 * 64 * 2)
    assert [step[0] for step in rounding] == sorted(step[0] for step in rounding)


WORKER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {helpers!r})
from tiny_checkpoint import mixed
from evalq.quantize import make_checkpoint
def progress(done, total, stage):
    if {slow} and stage.startswith("rounding model.layers.1"):
        print("half", flush=True)
        time.sleep({slow})
print(make_checkpoint(Path({source!r}), mixed(), Path({out!r}), progress), flush=True)
"""


def start(source: Path, out: Path, slow: float) -> subprocess.Popen[str]:
    script = textwrap.dedent(WORKER).format(
        helpers=str(Path(__file__).parent), source=str(source), out=str(out), slow=slow
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_killed_half_way_then_started_again(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(tiny, out, slow=60)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    assert list(out.glob(".*.tmp"))
    waiter = start(tiny, out, slow=0)  # waits for the lock, which dies with its owner
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    folder = Path(waiter.communicate(timeout=120)[0].strip())
    assert waiter.returncode == 0
    verify_checkpoint(folder)
    assert not list(out.glob(".*.tmp"))
    assert make_checkpoint(tiny, mixed(), out) == folder


def test_ctrl_c_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int, stage: str) -> None:
        if stage.startswith("rounding model.layers.1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tiny, int8(), tmp_path / "out", interrupt)
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_a_scheme_that_does_not_fit_makes_nothing(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        make_checkpoint(tiny, w4a16(group_size=48), tmp_path / "out")
    assert not (tmp_path / "out").exists()
