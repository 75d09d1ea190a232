"""Device names map to exactly one row, tables agree with conf/gpu, detection never hangs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from evalq.errors import ConfigError
from evalq.facts import gpus
from evalq.facts.confdir import conf_dir, names
from evalq.facts.gpus import GIB, GPUS, detect, gpu_facts, identify


@pytest.mark.parametrize(
    ("device", "mebibytes", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80g"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA B200", 183359, "b200"),
        ("AMD Instinct MI300X", 196592, "mi300x"),
        ("AMD Instinct MI325X", 262128, "mi325x"),
        ("AMD Instinct MI355X", 294896, "mi355x"),
    ],
)
def test_device_names(device: str, mebibytes: int, name: str) -> None:
    assert identify(device, mebibytes * 1024**2) == name


@pytest.mark.parametrize(
    "device",
    ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA H20", "Tesla T4",
     "NVIDIA GeForce RTX 4090 D", "NVIDIA GB200"],
)  # fmt: skip
def test_neighbours_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="none of the GPUs"):
        identify(device)


def test_a_slice_is_refused_by_its_memory() -> None:
    with pytest.raises(ConfigError, match="slice"):
        identify("NVIDIA H100 80GB HBM3", 20 * GIB)


def test_each_name_matches_one_pattern() -> None:
    for row in GPUS.values():
        hits = [name for pattern, name in gpus._PATTERNS if re.search(pattern, row.title, re.IGNORECASE)]
        assert hits == ([] if row.name == "cpu" else [row.name])


def test_conf_gpu_says_what_the_table_says() -> None:
    assert set(names("gpu")) == {*GPUS, "auto"}
    for row in GPUS.values():
        text = (conf_dir() / "gpu" / f"{row.name}.yaml").read_text(encoding="utf-8")
        assert f"\nname: {row.name}\n" in text
        if row.memory_bytes is not None and row.bandwidth_bytes_per_second is not None:
            assert f"{row.memory_bytes / GIB:.2f} GiB" in text
            assert f"{row.bandwidth_bytes_per_second / 1e9:,.0f} GB/s" in text
            assert row.source in text
            assert ", ".join(sorted(row.capabilities)) in text


def test_capabilities_are_named_and_follow_the_architecture() -> None:
    for row in GPUS.values():
        assert row.capabilities <= set(gpus.CAPABILITIES)
    assert not gpu_facts("a100-80g").can("fp8_weights")
    assert gpu_facts("a100-80g").can("fp8_weight_only")
    assert gpu_facts("h200").can("fp8_kv")
    assert not gpu_facts("mi325x").can("mxfp4")
    assert gpu_facts("mi355x").can("mxfp4")


def test_rates_are_dense() -> None:
    h100 = gpu_facts("h100")
    assert h100.bf16_per_second == pytest.approx(989.4e12)
    assert h100.fp8_per_second == pytest.approx(2 * 989.4e12, rel=0.001)


def test_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean h200"):
        gpu_facts("h20")


def _answering(text: str) -> Any:
    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, stdout=text)

    return run


def test_detect_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(gpus.subprocess, "run", _answering("NVIDIA H200, 143771\nNVIDIA H200, 143771\n"))
    assert detect() == "h200"


@pytest.mark.parametrize("failure", [subprocess.TimeoutExpired("nvidia-smi", 2), OSError("gone")])
def test_detect_survives_a_hanging_driver(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def run(*_: object, **arguments: Any) -> None:
        assert arguments["timeout"] == 2
        raise failure

    monkeypatch.setattr(gpus.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(gpus.subprocess, "run", run)
    monkeypatch.setattr(gpus, "_read_amd_name", lambda: None)
    assert detect() == "cpu"


def test_detect_amd_from_the_kernel_files(tmp_path: Path) -> None:
    device = tmp_path / "card0" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1002\n")
    (device / "product_name").write_text("AMD Instinct MI325X\n")
    (device / "mem_info_vram_total").write_text(str(262128 * 1024**2))
    assert gpus._read_amd_name(tmp_path) == ("AMD Instinct MI325X", 262128 * 1024**2)
    assert gpus._read_amd_name(tmp_path / "nothing") is None
