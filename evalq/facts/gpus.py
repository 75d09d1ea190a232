"""What each GPU is and can do: memory, bandwidth, dense arithmetic rates, capabilities, each row with its source.

Memory is what the driver hands to a program, in bytes, as PyTorch prints it ("total capacity of 79.11 GiB"); drivers
differ by under 0.5 %. Bandwidth is bytes per second and rates are dense multiply-adds counted as two operations, per
second, from the maker's data sheet: peaks that no program reaches, so what is derived from them is an upper bound.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from evalq.config import nearest
from evalq.errors import ConfigError

GIB = 1024**3
TERA = 1e12

# The capabilities that quant.needs and the rules refer to.
CAPABILITIES = {
    "bf16": "bfloat16 matrix products",
    "fp8_weights": "FP8 matrix units (weights and activations in 8-bit floating point, at full rate)",
    "fp8_weight_only": "FP8 weights unpacked to 16 bit on the way (less memory, no faster arithmetic)",
    "fp8_kv": "attention kernels that read an E4M3 KV cache",
    "fp8_kv_e5m2": "attention kernels that read an E5M2 KV cache",
    "int8_matmul": "int8 matrix products (W8A8)",
    "int4_weights": "kernels for packed 4-bit integer weights with 16-bit activations",
    "w8a16": "kernels for 8-bit integer weights with 16-bit activations",
    "mxfp4": "MXFP4 matrix units",
    "nvfp4": "NVFP4 matrix units",
}


@dataclass(frozen=True)
class GpuFacts:
    """One device. Rates in operations per second, None where the device has no such unit."""

    name: str
    title: str
    vendor: str  # nvidia | amd | cpu
    arch: str  # sm90, gfx942, cpu
    memory_bytes: int | None
    bandwidth_bytes_per_second: float | None
    bf16_per_second: float | None
    fp8_per_second: float | None
    int8_per_second: float | None
    fp4_per_second: float | None
    capabilities: frozenset[str]
    source: str

    @property
    def is_rocm(self) -> bool:
        return self.vendor == "amd"

    def can(self, capability: str) -> bool:
        return capability in self.capabilities

    def counted(self, count: int) -> str:
        """In words: "1 GPU", "8 GPUs", "1 CPU"."""
        return f"{count} {'CPU' if self.vendor == 'cpu' else 'GPU'}{'' if count == 1 else 's'}"


_AMPERE = frozenset({"bf16", "fp8_weight_only", "fp8_kv_e5m2", "int8_matmul", "int4_weights", "w8a16"})
_ADA = _AMPERE | {"fp8_weights", "fp8_kv"}
_BLACKWELL = (_ADA - {"int8_matmul"}) | {"mxfp4", "nvfp4"}
_CDNA3 = frozenset({"bf16", "fp8_weights", "fp8_kv", "fp8_kv_e5m2", "int8_matmul", "int4_weights", "w8a16"})
_CDNA4 = _CDNA3 | {"mxfp4"}
_CPU = frozenset({"bf16", "fp8_weights", "fp8_kv", "fp8_kv_e5m2", "int8_matmul", "int4_weights"})


def _gpu(
    name: str,
    title: str,
    arch: str,
    gib: float,
    terabytes_per_second: float,
    tera: tuple[float, float | None, float | None, float | None],  # bf16, fp8, int8, fp4
    capabilities: frozenset[str],
    source: str,
) -> GpuFacts:
    bf16, fp8, int8, fp4 = (None if rate is None else rate * TERA for rate in tera)
    vendor = "amd" if arch.startswith("gfx") else "nvidia"
    memory = round(gib * GIB)
    bandwidth = terabytes_per_second * TERA
    return GpuFacts(name, title, vendor, arch, memory, bandwidth, bf16, fp8, int8, fp4, capabilities, source)


_ROWS = (
    _gpu("a100-40g", "NVIDIA A100 40GB", "sm80", 39.39, 1.555, (312, None, 624, None), _AMPERE,
         "NVIDIA A100 Tensor Core GPU data sheet (SXM, 40 GB: 1,555 GB/s; dense rates)"),
    _gpu("a100-80g", "NVIDIA A100 80GB", "sm80", 79.15, 2.039, (312, None, 624, None), _AMPERE,
         "NVIDIA A100 Tensor Core GPU data sheet (SXM, 80 GB: 2,039 GB/s; the PCIe card has 1,935; dense rates)"),
    _gpu("l40s", "NVIDIA L40S", "sm89", 44.4, 0.864, (362.05, 733, 733, None), _ADA,
         "NVIDIA L40S data sheet (GDDR6, 864 GB/s; dense rates)"),
    _gpu("l4", "NVIDIA L4", "sm89", 22.03, 0.300, (121, 242.5, 242.5, None), _ADA,
         "NVIDIA L4 data sheet (GDDR6, 300 GB/s; the sheet's rates are with sparsity, halved here)"),
    _gpu("rtx4090", "NVIDIA GeForce RTX 4090", "sm89", 23.64, 1.008, (165.2, 330.3, 660.6, None), _ADA,
         "NVIDIA Ada GPU architecture white paper, appendix A (dense; BF16 and FP8 with FP32 accumulation)"),
    _gpu("h100", "NVIDIA H100 SXM 80GB", "sm90", 79.11, 3.35, (989.4, 1978.9, 1978.9, None), _ADA,
         "NVIDIA H100 data sheet, SXM column (rates with sparsity there, halved here)"),
    _gpu("h200", "NVIDIA H200 SXM 141GB", "sm90", 139.81, 4.8, (989.4, 1978.9, 1978.9, None), _ADA,
         "NVIDIA H200 data sheet, SXM column (rates with sparsity there, halved here)"),
    _gpu("b200", "NVIDIA B200 SXM 180GB", "sm100", 178.35, 7.7, (2250, 4500, None, 9000), _BLACKWELL,
         "NVIDIA HGX B200 data sheet, per GPU (dense FP4 9 PFLOPS); vLLM has no int8 W8A8 kernel for sm100"),
    _gpu("mi300x", "AMD Instinct MI300X", "gfx942", 191.98, 5.3, (1307.4, 2614.9, 2614.9, None), _CDNA3,
         "AMD Instinct MI300X data sheet (dense rates; CDNA3 has no FP4)"),
    _gpu("mi325x", "AMD Instinct MI325X", "gfx942", 255.98, 6.0, (1307.4, 2614.9, 2614.9, None), _CDNA3,
         "AMD Instinct MI325X data sheet (dense rates; CDNA3 has no FP4)"),
    _gpu("mi355x", "AMD Instinct MI355X", "gfx950", 287.98, 8.0, (2500, 5000, 5000, 10000), _CDNA4,
         "AMD Instinct MI355X data sheet (dense rates; CDNA4 adds MXFP4 and MXFP6)"),
)  # fmt: skip

_CPU_ROW = GpuFacts(
    "cpu", "the host's own processor", "cpu", "cpu", None, None, None, None, None, None, _CPU,
    "seen on the CPU build of vLLM 0.32: W8A8 int8, packed 4-bit weights and FP8 (slowly) run, W8A16 does not",
)  # fmt: skip

GPUS: dict[str, GpuFacts] = {row.name: row for row in (*_ROWS, _CPU_ROW)}

# Names as nvidia-smi, PyTorch and rocm-smi print them. The first pattern that matches wins; None = a device that is
# known and is not one of the rows (a PCIe or NVL card has other memory, bandwidth or clocks than the SXM module).
_PATTERNS: tuple[tuple[str, str | None], ...] = (
    (r"\bGH200\b|\bGB200\b|\bGB300\b|\bB300\b", None),
    (r"\bH100\b.*\b(PCIe|NVL)\b|\bH100L\b|\bH200\b.*\bNVL\b|\bH20\b|\bH800\b", None),
    (r"\bH200\b", "h200"),
    (r"\bH100\b.*\bHBM3\b|\bH100\b.*\bSXM", "h100"),
    (r"\bA100\b.*\b40GB\b", "a100-40g"),
    (r"\bA100\b.*\b80GB\b", "a100-80g"),
    (r"\bL40S\b", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bRTX\s*4090\s*D\b|\bRTX\s*4090\s*Laptop", None),
    (r"\bRTX\s*4090\b", "rtx4090"),
    (r"\bB200\b", "b200"),
    (r"\bMI300X\b", "mi300x"),
    (r"\bMI325X\b", "mi325x"),
    (r"\bMI355X\b", "mi355x"),
)
# nvidia-smi counts memory that the driver keeps to itself: up to 4 % more than what PyTorch shows.
_MEMORY_TOLERANCE = 0.06


def gpu_facts(name: str) -> GpuFacts:
    """Facts of one conf/gpu name. Errors: ConfigError naming the nearest."""
    if name not in GPUS:
        raise ConfigError(f"gpu={name!r} is not known: {nearest(name, tuple(GPUS))}")
    return GPUS[name]


def identify(device_name: str, memory_bytes: int | None = None) -> str:
    """The one row that a device name means. Errors: ConfigError for a device that is no row, or whose memory disagrees.

    A slice of a GPU (MIG) has the name of the whole and other memory, so memory is compared when it is known.
    """
    for pattern, name in _PATTERNS:
        if re.search(pattern, device_name, re.IGNORECASE):
            if name is None:
                break
            _check_memory(device_name, name, memory_bytes)
            return name
    raise ConfigError(
        f"device {device_name!r} is none of the GPUs evalq has facts about ({', '.join(GPUS)}); "
        f"give the nearest one with gpu=NAME and read the figures as rough"
    )


def _check_memory(device_name: str, name: str, memory_bytes: int | None) -> None:
    expected = GPUS[name].memory_bytes
    if memory_bytes is None or expected is None or abs(memory_bytes / expected - 1.0) <= _MEMORY_TOLERANCE:
        return
    raise ConfigError(
        f"device {device_name!r} shows {memory_bytes / GIB:.1f} GiB where {name} has {expected / GIB:.1f} GiB; "
        f"a slice of a GPU or another model: give gpu=NAME yourself"
    )


def host_memory_bytes() -> int:
    """Memory of this host as its kernel shows it; a virtual machine may show less than it has until it is used."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def detect() -> str:
    """Name of the first visible device, "cpu" when there is none. Two seconds at most; needs no torch."""
    found = _ask_nvidia_smi() or _read_amd_name()
    return "cpu" if found is None else identify(*found)


def _ask_nvidia_smi() -> tuple[str, int] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True).stdout
        name, mebibytes = answer.strip().splitlines()[0].rsplit(",", 1)
        return name.strip(), int(mebibytes) * 1024**2
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _read_amd_name(root: Path = Path("/sys/class/drm")) -> tuple[str, int] | None:
    """Product name and memory of the first AMD compute device, from the kernel driver's own files."""
    for total in sorted(root.glob("card*/device/mem_info_vram_total")):
        device = total.parent
        try:
            if (device / "vendor").read_text().strip() == "0x1002":
                return (device / "product_name").read_text().strip(), int(total.read_text())
        except (OSError, ValueError):
            continue
    return None
