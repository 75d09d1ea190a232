"""Triton kernels of evalq.measure.reductions: one program per row, one pass over its logits, running sums rescaled on the way.

The running form of log-sum-exp is Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); the weighted
sums beside it are rescaled by the same factor.
"""

# Triton's decorator and its own names carry no types.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"
# ruff: noqa: N803 - constants of a kernel are written in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 4096  # words read at once by a program
WARPS = 8


@triton.jit
def _score_kernel(logits, stride, targets, out_logprob, out_top_id, out_top_logprob, vocabulary, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    highest = -float("inf")
    total = 0.0
    top_id = 0
    for start in range(0, vocabulary, COLUMNS):
        index = start + tl.arange(0, COLUMNS)
        inside = index < vocabulary
        a = tl.load(base + index, mask=inside, other=-float("inf")).to(tl.float32)
        here, where = tl.max(a, axis=0, return_indices=True)
        top_id = tl.where(here > highest, start + where, top_id)
        new = tl.maximum(highest, here)
        total = total * tl.exp(highest - new) + tl.sum(tl.exp(a - new), axis=0)
        highest = new
    log_total = tl.log(total)
    at_target = tl.load(base + tl.load(targets + row)).to(tl.float32)
    tl.store(out_logprob + row, (at_target - highest) - log_total)
    tl.store(out_top_id + row, top_id)
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
        scale_a, scale_b = tl.exp(high_a - new_a), tl.exp(high_b - new_b)
        weight_a, weight_b = tl.exp(a - new_a), tl.exp(b - new_b)
        # A sum of distances to an older highest logit moves with it; nothing has been summed when that is -inf.
        mean_a = tl.where(sum_a > 0, (mean_a + sum_a * (high_a - new_a)) * scale_a, 0.0)
        mean_b = tl.where(sum_b > 0, (mean_b + sum_b * (high_b - new_b)) * scale_b, 0.0)
        mean_a += tl.sum(tl.where(weight_a > 0, weight_a * (a - new_a), 0.0), axis=0)
        mean_b += tl.sum(tl.where(weight_b > 0, weight_b * (b - new_b), 0.0), axis=0)
        gap_a = gap_a * scale_a + tl.sum(tl.where(weight_a > 0, weight_a * gap, 0.0), axis=0)
        gap_b = gap_b * scale_b + tl.sum(tl.where(weight_b > 0, weight_b * gap, 0.0), axis=0)
        sum_a = sum_a * scale_a + tl.sum(weight_a, axis=0)
        sum_b = sum_b * scale_b + tl.sum(weight_b, axis=0)
        high_a, high_b = new_a, new_b
    shift = (high_a - high_b) + tl.log(sum_a / sum_b)
    tl.store(out_forward + row, tl.maximum(gap_a / sum_a - shift, 0.0))
    tl.store(out_reverse + row, tl.maximum(shift - gap_b / sum_b, 0.0))
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
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return logprob, top_id, top_logprob


def compare(base: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """KL(base || own), KL(own || base), entropy of base, entropy of own; (rows,) float32 each."""
    rows, vocabulary = own.shape
    base = base if base.stride(1) == 1 else base.contiguous()
    own = own if own.stride(1) == 1 else own.contiguous()
    results = tuple(torch.empty(rows, dtype=torch.float32, device=own.device) for _ in range(4))
    _compare_kernel[(rows,)](
        base, base.stride(0), own, own.stride(0), *results, vocabulary, COLUMNS=COLUMNS, num_warps=WARPS
    )
    return results
