"""Rounding weights to nearest, with a search of the clipping range that minimises the squared error of each group.

Symmetric: value = scale * code. Integer codes of b bits run from -2^(b-1) to 2^(b-1)-1; float codes are E4M3 (largest
448). Plain min-max rounding takes scale = max|w| / half the code range (compressed-tensors' convention); clipping
takes a smaller scale, so that the few largest weights saturate and all others are rounded more finely.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Candidate scales, as multiples of the min-max scale; 1.0 first, so that a tie keeps plain rounding.
INT_RATIOS = (1.0, *(1.0 - step / 80 for step in range(1, 33)))  # 0.9875 ... 0.6
FLOAT_RATIOS = (1.0, *(1.0 - step / 20 for step in range(1, 9)))  # 0.95 ... 0.6: E4M3's steps grow with the value
CHUNK_ELEMENTS = 1 << 17  # 512 KiB of float32: the search stays in the processor's cache
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Codes:
    """Codes of one kind: integers of `num_bits`, or E4M3."""

    num_bits: int
    is_float: bool

    @property
    def low(self) -> float:
        return -E4M3_MAX if self.is_float else float(-(1 << (self.num_bits - 1)))

    @property
    def high(self) -> float:
        return E4M3_MAX if self.is_float else float((1 << (self.num_bits - 1)) - 1)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Candidates of the search; for integers also the scale at which max|w| is the largest positive code."""
        if self.is_float:
            return FLOAT_RATIOS
        return (*INT_RATIOS, (self.high - self.low) / 2 / self.high)

    def round(self, scaled: torch.Tensor) -> torch.Tensor:
        """The nearest codes, as float32 of the same shape; half goes to even."""
        clamped = scaled.clamp_(self.low, self.high)
        return clamped.to(torch.float8_e4m3fn).to(torch.float32) if self.is_float else clamped.round_()

    def store(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes in their 8-bit container."""
        return codes.to(torch.float8_e4m3fn if self.is_float else torch.int8)


@dataclass(frozen=True)
class Rounded:
    """A rounded matrix. codes: (rows, columns) int8 or float8; scales: (rows, groups) of the stored dtype."""

    codes: torch.Tensor
    scales: torch.Tensor
    squared_error: float
    squared_norm: float

    @property
    def relative_squared_error(self) -> float:
        return self.squared_error / self.squared_norm if self.squared_norm > 0 else 0.0


@contextmanager
def rounding_threads() -> Iterator[Executor]:
    """One thread per usable core, each with torch operations of one thread.

    torch's own threads meet after each of thousands of short operations; on a busy machine that took ten times as long.
    """
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores, "rounding", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool


def round_weight(
    weight: torch.Tensor, codes: Codes, group_size: int, scale_dtype: torch.dtype, clip_search: bool, pool: Executor
) -> Rounded:
    """Round a matrix (rows, columns) in groups of `group_size` neighbouring columns; the best candidate per group.

    Errors: ValueError when group_size does not divide the columns or a weight is not finite.
    """
    columns = weight.shape[1]
    if columns % group_size:
        raise ValueError(f"group_size={group_size} does not divide {columns}")
    ratios = codes.ratios if clip_search else (1.0,)
    parts = weight.split(max(1, CHUNK_ELEMENTS // columns))
    rounded = list(pool.map(lambda part: _round_rows(part, codes, group_size, scale_dtype, ratios), parts))
    return Rounded(
        torch.cat([part.codes for part in rounded]),
        torch.cat([part.scales for part in rounded]),
        sum(part.squared_error for part in rounded),
        sum(part.squared_norm for part in rounded),
    )


def _round_rows(
    part: torch.Tensor, codes: Codes, group_size: int, scale_dtype: torch.dtype, ratios: tuple[float, ...]
) -> Rounded:
    groups = part.to(torch.float32).reshape(part.shape[0], -1, group_size)
    if not bool(torch.isfinite(groups).all()):
        raise ValueError("a weight is not a finite number")
    scales, errors = best_scales(groups, codes, ratios, scale_dtype)
    stored = codes.store(codes.round(groups / scales.to(torch.float32).unsqueeze(-1))).reshape(part.shape)
    return Rounded(
        stored, scales, float(errors.sum(dtype=torch.float64)), float(groups.square().sum(dtype=torch.float64))
    )


def best_scales(
    groups: torch.Tensor, codes: Codes, ratios: tuple[float, ...], scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and squared error of each group: the exact minimum over the candidates, as stored in `scale_dtype`.

    groups: (rows, groups, group_size) float32; both results: (rows, groups).
    """
    base = groups.abs().amax(-1) / ((codes.high - codes.low) / 2)
    best_scale = torch.ones_like(base, dtype=scale_dtype)
    best_error = torch.full_like(base, torch.inf)
    for ratio in ratios:
        scale = usable_scale(base * ratio, scale_dtype)
        wide = scale.to(torch.float32).unsqueeze(-1)
        rounded = codes.round(groups / wide).mul_(wide)
        error = rounded.sub_(groups).square_().sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale, best_error


def usable_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale as stored: never 0 (a group of zeros), subnormal or infinite, which engines cannot divide by."""
    limits = torch.finfo(dtype)
    return scale.clamp(limits.tiny, limits.max).to(dtype)


def tensor_scale(weight: torch.Tensor, codes: Codes, clip_search: bool, pool: Executor) -> Rounded:
    """Round a whole matrix (rows, columns) with one scale, searched over the same candidates in float32."""
    flat = weight.to(torch.float32).reshape(1, -1)
    whole = round_weight(flat, codes, flat.shape[1], torch.float32, clip_search, pool)
    return Rounded(whole.codes.reshape(weight.shape), whole.scales.reshape(1), whole.squared_error, whole.squared_norm)


def pack_int32(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """compressed-tensors' pack-quantized layout: codes + 2^(b-1), 32 // b of them per int32, the first in the low bits.

    codes: (rows, columns) int8 -> (rows, ceil(columns / per_word)) int32
    """
    rows, columns = codes.shape
    per_word = 32 // num_bits
    unsigned = codes.to(torch.int64) + (1 << (num_bits - 1))
    padded = torch.nn.functional.pad(unsigned, (0, -columns % per_word))
    shifts = torch.arange(per_word, dtype=torch.int64) * num_bits
    words = (padded.reshape(rows, -1, per_word) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
