"""Triton kernels of evalq.measure.reductions: one program per row, one pass over its logits, running sums rescaled on the way.

The running form of log-sum-exp is Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). For scores, each
lane keeps the sum of its own words, with one exponential per word, and lanes meet at the end of the row. For divergence, a row has
one sum of each kind: eight per lane would not fit into its registers (measured: a third slower).
"""

# Triton's decorator and its own names carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"
# ruff: noqa: N803 - constants of a kernel are written in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

SCORE_COLUMNS, SCORE_WARPS = 4096, 8  # words read at once by a program, and its warps
COMPARE_COLUMNS, COMPARE_WARPS = 4096, 4


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
    high_a, high_b = -float("inf"), -float("inf")
    sum_a, sum_b = 0.0, 0.0  # of exp
    gap_a, gap_b = 0.0, 0.0  # of exp times (a - b)
    mean_a, mean_b = 0.0, 0.0  # of exp times the distance to the highest logit so far
    for start in range(0, vocabulary, COLUMNS):
        index = start + tl.arange(0, COLUMNS)
        inside = index < vocabulary
        a = tl.load(base + index, mask=inside, other=-float("inf")).to(tl.float32)
        b = tl.load(own + index, mask=inside, other=-float("inf")).to(tl.float32)
        gap = tl.where(inside, a - b, 0.0)
        new_a = tl.maximum(high_a, tl.max(a, axis=0))
        new_b = tl.maximum(high_b, tl.max(b, axis=0))
        # Logits of -inf, and a beginning of the row of nothing else, weigh nothing; NaN stays NaN.
        scale_a = tl.where(high_a == new_a, 1.0, tl.exp(high_a - new_a))
        scale_b = tl.where(high_b == new_b, 1.0, tl.exp(high_b - new_b))
        weight_a = tl.where(a == -float("inf"), 0.0, tl.exp(a - new_a))
        weight_b = tl.where(b == -float("inf"), 0.0, tl.exp(b - new_b))
        # A sum of distances to an older highest logit moves with it; nothing has been summed when that is -inf.
        mean_a = tl.where(sum_a > 0, (mean_a + sum_a * (high_a - new_a)) * scale_a, 0.0)
        mean_b = tl.where(sum_b > 0, (mean_b + sum_b * (high_b - new_b)) * scale_b, 0.0)
        mean_a += tl.sum(tl.where(weight_a > 0, weight_a * (a - new_a), 0.0), axis=0)
        mean_b += tl.sum(tl.where(weight_b > 0, weight_b * (b - new_b), 0.0), axis=0)
        gap_a = tl.where(scale_a == 0, 0.0, gap_a * scale_a) + tl.sum(
            tl.where(weight_a > 0, weight_a * gap, 0.0), axis=0
        )
        gap_b = tl.where(scale_b == 0, 0.0, gap_b * scale_b) + tl.sum(
            tl.where(weight_b > 0, weight_b * gap, 0.0), axis=0
        )
        sum_a = sum_a * scale_a + tl.sum(weight_a, axis=0)
        sum_b = sum_b * scale_b + tl.sum(weight_b, axis=0)
        high_a, high_b = new_a, new_b
    shift = (high_a - high_b) + tl.log(sum_a / sum_b)
    forward, reverse = gap_a / sum_a - shift, shift - gap_b / sum_b
    tl.store(out_forward + row, tl.where(forward < 0, 0.0, forward))  # a maximum would make 0 of NaN
    tl.store(out_reverse + row, tl.where(reverse < 0, 0.0, reverse))
    tl.store(out_base_entropy + row, tl.log(sum_a) - mean_a / sum_a)
    tl.store(out_own_entropy + row, tl.log(sum_b) - mean_b / sum_b)


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
