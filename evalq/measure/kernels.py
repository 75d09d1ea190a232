"""Triton kernels of evalq.measure.reductions: one program per row, one pass over its logits.

Each lane of a program keeps the running sums of its own words, and lanes meet once, at the end of the row: nothing waits inside the
pass. A running sum is that of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), with one exponential per
word: with d the distance of a word's logit from the highest so far, either the sum shrinks by exp(-d) and 1 is added, or exp(d) is
added. Weighted sums beside it are rescaled by the same factor.
"""

# Triton's decorator and its own names carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"
# ruff: noqa: N803 - constants of a kernel are written in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

SCORE_COLUMNS, SCORE_WARPS = 4096, 4  # words read at once by a program, and its warps
COMPARE_COLUMNS, COMPARE_WARPS = 1024, 4


@triton.jit
def _step(distance):
    """What a sum so far is multiplied by, and the weight of the new word, for its distance from the highest logit so far."""
    small = tl.exp(-tl.abs(distance))
    return tl.where(distance > 0, small, 1.0), tl.where(distance > 0, 1.0, small)


@triton.jit
def _score_kernel(logits, stride, targets, out_logprob, out_top_id, out_top_logprob, vocabulary, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    lane = tl.arange(0, COLUMNS)
    highest = tl.load(base + lane, mask=lane < vocabulary, other=-float("inf")).to(tl.float32)
    total = tl.where(lane < vocabulary, 1.0, 0.0)
    top = lane  # the word of the lane's highest logit
    for start in range(COLUMNS, vocabulary, COLUMNS):
        index = start + lane
        a = tl.load(base + index, mask=index < vocabulary, other=-float("inf")).to(tl.float32)
        # Equal, also where both are -inf: no distance.
        scale, weight = _step(tl.where(a == highest, 0.0, a - highest))
        total = total * scale + weight
        top = tl.where(a > highest, index, top)
        highest = tl.maximum(highest, a)
    peak = tl.max(highest, axis=0)
    log_total = tl.log(tl.sum(total * tl.exp(highest - peak), axis=0))
    at_target = tl.load(base + tl.load(targets + row)).to(tl.float32)
    tl.store(out_logprob + row, (at_target - peak) - log_total)
    tl.store(out_top_id + row, tl.min(tl.where(highest == peak, top, vocabulary - 1), axis=0))
    tl.store(out_top_logprob + row, -log_total)


@triton.jit
def _compare_kernel(
    base_logits,
    base_stride,
    own_logits,
    own_stride,
    out_forward,
    out_reverse,
    out_base_entropy,
    out_own_entropy,
    vocabulary,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base, own = base_logits + row * base_stride, own_logits + row * own_stride
    lane = tl.arange(0, COLUMNS)
    inside = lane < vocabulary
    a = tl.load(base + lane, mask=inside, other=-float("inf")).to(tl.float32)
    b = tl.load(own + lane, mask=inside, other=-float("inf")).to(tl.float32)
    high_a, high_b = a, b
    sum_a, sum_b = tl.where(inside, 1.0, 0.0), tl.where(inside, 1.0, 0.0)  # of exp
    gap_a = tl.where(inside & (a > -float("inf")), a - b, 0.0)  # of exp times (a - b)
    gap_b = tl.where(inside & (b > -float("inf")), a - b, 0.0)
    mean_a, mean_b = (
        tl.zeros([COLUMNS], tl.float32),
        tl.zeros([COLUMNS], tl.float32),
    )  # of exp times the distance to the highest
    for start in range(COLUMNS, vocabulary, COLUMNS):
        index = start + lane
        a = tl.load(base + index, mask=index < vocabulary, other=-float("inf")).to(tl.float32)
        b = tl.load(own + index, mask=index < vocabulary, other=-float("inf")).to(tl.float32)
        # A word without probability in a model adds nothing there, however far apart the two logits are.
        far_a = tl.where(a == high_a, 0.0, a - high_a)
        far_b = tl.where(b == high_b, 0.0, b - high_b)
        scale_a, weight_a = _step(far_a)
        scale_b, weight_b = _step(far_b)
        # The sum of distances to the highest logit moves with it.
        mean_a = tl.where(far_a > 0, tl.where(scale_a > 0, (mean_a - sum_a * far_a) * scale_a, 0.0), mean_a)
        mean_b = tl.where(far_b > 0, tl.where(scale_b > 0, (mean_b - sum_b * far_b) * scale_b, 0.0), mean_b)
        mean_a += tl.where((far_a < 0) & (weight_a > 0), weight_a * far_a, 0.0)
        mean_b += tl.where((far_b < 0) & (weight_b > 0), weight_b * far_b, 0.0)
        gap_a = gap_a * scale_a + tl.where((a > -float("inf")) & (weight_a > 0), weight_a * (a - b), 0.0)
        gap_b = gap_b * scale_b + tl.where((b > -float("inf")) & (weight_b > 0), weight_b * (a - b), 0.0)
        sum_a = sum_a * scale_a + weight_a
        sum_b = sum_b * scale_b + weight_b
        high_a, high_b = tl.maximum(high_a, a), tl.maximum(high_b, b)
    peak_a, total_a, gap_a, mean_a = _meet(high_a, sum_a, gap_a, mean_a)
    peak_b, total_b, gap_b, mean_b = _meet(high_b, sum_b, gap_b, mean_b)
    shift = (peak_a - peak_b) + tl.log(total_a / total_b)
    tl.store(out_forward + row, tl.maximum(gap_a / total_a - shift, 0.0))
    tl.store(out_reverse + row, tl.maximum(shift - gap_b / total_b, 0.0))
    tl.store(out_base_entropy + row, tl.log(total_a) - mean_a / total_a)
    tl.store(out_own_entropy + row, tl.log(total_b) - mean_b / total_b)


@triton.jit
def _meet(high, total, gap, mean):
    """All lanes' sums as one, against the highest logit of the row."""
    peak = tl.max(high, axis=0)
    factor = tl.exp(high - peak)  # 0 for a lane without a word of any probability
    below = tl.where(factor > 0, total * (high - peak), 0.0)
    return peak, tl.sum(total * factor, axis=0), tl.sum(gap * factor, axis=0), tl.sum((mean + below) * factor, axis=0)


def score(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Target log-probability, first choice and its log-probability; (rows,) each."""
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    top_id = torch.empty(rows, dtype=torch.int64, device=logits.device)
    top_logprob = torch.empty_like(logprob)
    _score_kernel[(rows,)](
        logits,
        logits.stride(0),
        targets,
        logprob,
        top_id,
        top_logprob,
        vocabulary,
        COLUMNS=SCORE_COLUMNS,
        num_warps=SCORE_WARPS,
    )
    return logprob, top_id, top_logprob


def compare(base: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """KL(base || own), KL(own || base), entropy of base, entropy of own; (rows,) float32 each."""
    rows, vocabulary = own.shape
    base = base if base.stride(1) == 1 else base.contiguous()
    own = own if own.stride(1) == 1 else own.contiguous()
    results = tuple(torch.empty(rows, dtype=torch.float32, device=own.device) for _ in range(4))
    _compare_kernel[(rows,)](
        base,
        base.stride(0),
        own,
        own.stride(0),
        *results,
        vocabulary,
        COLUMNS=COMPARE_COLUMNS,
        num_warps=COMPARE_WARPS,
    )
    return results
