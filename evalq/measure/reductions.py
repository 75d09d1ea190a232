"""From logits to the few numbers per row that are kept: exact, over the whole vocabulary, on the device.

On a GPU one Triton kernel per block reads the logits once, in the dtype they have; elsewhere torch does it in float32. Both
take log-sum-exp over all words, so that nothing is estimated and no (rows, vocabulary) float32 tensor is needed on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BLOCK_BYTES = 128 << 20  # float32 logits held at once where torch reduces them
KERNEL_BLOCK_BYTES = 256 << 20  # logits of one model held at once where the kernel reduces them


@dataclass(frozen=True)
class Rows:
    """What is kept of each row's distribution; each tensor (rows,), logarithms in nats."""

    logprobs: torch.Tensor  # float32, of the target
    top1_ids: torch.Tensor  # int64
    top1_logprobs: torch.Tensor  # float32


@dataclass(frozen=True)
class Divergence:
    """Two distributions over the same vocabulary, row by row; each tensor (rows,) float32, nats."""

    forward: torch.Tensor  # KL(base || own)
    reverse: torch.Tensor  # KL(own || base)
    base_entropy: torch.Tensor
    own_entropy: torch.Tensor


def rows_per_block(vocabulary: int, device: torch.device, element_bytes: int) -> int:
    """How many rows of logits are computed at once, so that their memory stays bounded."""
    if uses_kernel(device):
        rows = KERNEL_BLOCK_BYTES // (element_bytes * vocabulary)
        return max(16, rows // 256 * 256 or rows)  # whole tiles of the matrix product
    return max(16, BLOCK_BYTES // (4 * vocabulary))


def uses_kernel(device: torch.device) -> bool:
    """Whether the Triton kernel reduces logits on `device`."""
    return device.type == "cuda" and _kernels() is not None


def _kernels() -> Any:
    try:
        from evalq.measure import kernels
    except ImportError:  # an engine without Triton
        return None
    return kernels


def score_rows(logits: torch.Tensor, targets: torch.Tensor) -> Rows:
    """logits: (rows, vocabulary), any float dtype; targets: (rows,) int64."""
    if uses_kernel(logits.device):
        return Rows(*_kernels().score(logits, targets))
    return score_by_torch(logits, targets)


def score_by_torch(logits: torch.Tensor, targets: torch.Tensor) -> Rows:
    """By the very call that the engine makes for its own prompt log-probabilities, so that both are equal to the bit.

    On a CPU torch's float32 log_softmax over 49,152 words is 6e-6 nats a token off float64; equality is worth more than that.
    """
    logs = logits.log_softmax(dim=-1, dtype=torch.float32)
    top1 = logs.max(dim=-1)
    return Rows(logs.gather(1, targets[:, None]).squeeze(1), top1.indices, top1.values)


def compare_rows(base: torch.Tensor, own: torch.Tensor) -> Divergence:
    """base, own: (rows, vocabulary) logits of the two models after the same tokens."""
    if uses_kernel(own.device):
        return Divergence(*_kernels().compare(base, own))
    return compare_by_torch(base, own)


def compare_by_torch(base: torch.Tensor, own: torch.Tensor) -> Divergence:
    """As compare_rows, in float32.

    KL(p || q) = sum p (a - b) - (lse a - lse b) for logits a, b: the differences of logits are small numbers, so little is
    lost where the two models nearly agree.
    """
    a, b = base.float(), own.float()
    lse_a, lse_b = torch.logsumexp(a, dim=-1), torch.logsumexp(b, dim=-1)
    shift = lse_a - lse_b
    difference = a - b
    log_p, log_q = a - lse_a[:, None], b - lse_b[:, None]
    forward = _mean(log_p, difference) - shift
    reverse = shift - _mean(log_q, difference)
    return Divergence(forward.clamp_min(0.0), reverse.clamp_min(0.0), -_mean(log_p, log_p), -_mean(log_q, log_q))


def _mean(log_weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Mean of values under a distribution; a word that cannot come (a logit of -inf) adds nothing, whatever its value."""
    weight = torch.exp(log_weight)
    return torch.where(weight == 0, 0.0, weight * values).sum(-1)
