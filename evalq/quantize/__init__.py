"""Where checkpoints come from: finding the 16-bit source, rounding it into a compressed-tensors checkpoint.

The only part of evalq that writes compressed-tensors' format. torch, transformers and the hub client are imported when
a function needs them, so importing this package is cheap.
"""

from __future__ import annotations

from evalq.quantize.hashing import verify_checkpoint, weights_hash
from evalq.quantize.kvscales import add_kv_scales, has_computed_scales
from evalq.quantize.make import QUANTIZER_VERSION, make_checkpoint, make_checkpoint_at
from evalq.quantize.sources import source_checkpoint

__all__ = [
    "QUANTIZER_VERSION",
    "add_kv_scales",
    "has_computed_scales",
    "make_checkpoint",
    "make_checkpoint_at",
    "source_checkpoint",
    "verify_checkpoint",
    "weights_hash",
]
