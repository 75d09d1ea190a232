"""Row reductions in torch and in the Triton kernel (interpreted, where there is no GPU), against float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from evalq.measure import reductions  # noqa: E402 - after the skip

KERNELS_ON_CPU = """
import torch
from evalq.measure import kernels
torch.manual_seed(0)
for words, dtype in ((37, torch.float32), (4096, torch.bfloat16), (9001, torch.bfloat16)):
    a = (torch.randn(3, words + 5) * 4).to(dtype)[:, :words]  # rows with a stride, as padded vocabularies have
    b = (a.float() + 0.1 * torch.randn(3, words)).to(dtype)
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    targets = torch.randint(0, words, (3,))
    logprob, top, top_logprob = kernels.score(a, targets)
    assert torch.equal(top, a.argmax(-1)), (top, a.argmax(-1))
    torch.testing.assert_close(logprob.double(), p.gather(1, targets[:, None])[:, 0], atol=2e-6, rtol=0)
    torch.testing.assert_close(top_logprob.double(), p.max(-1).values, atol=2e-6, rtol=0)
    wanted = ((p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1), -(p.exp() * p).sum(-1), -(q.exp() * q).sum(-1))
    for found, exact in zip(kernels.compare(a, b), wanted):
        torch.testing.assert_close(found.double(), exact, atol=3e-6, rtol=0)
a = torch.full((2, 9001), -3.0)
a[0, :5000] = -torch.inf  # words that cannot come, in the first chunks too
a[0, 6000], a[1, 17], a[1, 8000] = 90.0, 5.0, 5.0  # far above the rest; a tie, of which the first counts
b = a + torch.where(torch.rand(2, 9001) < 0.5, 0.25, 0.0)
logprob, top, top_logprob = kernels.score(a, torch.tensor([6000, 8000]))
p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
assert top.tolist() == [6000, 17], top
torch.testing.assert_close(logprob.double(), p[[0, 1], [6000, 8000]], atol=2e-6, rtol=0)
forward, reverse, base_entropy, own_entropy = kernels.compare(a, b)
gap = torch.where(p > -torch.inf, p - q, 0.0)
torch.testing.assert_close(forward.double(), (p.exp() * gap).sum(-1), atol=3e-6, rtol=0)
torch.testing.assert_close(reverse.double(), -(q.exp() * gap).sum(-1), atol=3e-6, rtol=0)
torch.testing.assert_close(base_entropy.double(), torch.special.entr(p.exp()).sum(-1), atol=3e-6, rtol=0)
torch.testing.assert_close(own_entropy.double(), torch.special.entr(q.exp()).sum(-1), atol=3e-6, rtol=0)
a[1, 4] = torch.nan
assert kernels.score(a, torch.tensor([6000, 8000]))[0].isnan().tolist() == [False, True]
for found in kernels.compare(a, b)[:3] + kernels.compare(b, a)[:2]:
    assert found.isnan().tolist() == [False, True], found
far = torch.zeros(1, 9001)
far[0, 9000] = 200.0  # what was likely so far is forgotten beside it, also where the other model ruled it out
ruled_out = far.clone()
ruled_out[0, 3], ruled_out[0, 9000] = -torch.inf, 1.0
forward = kernels.compare(far, ruled_out)[0]
torch.testing.assert_close(forward.double(), -ruled_out.double().log_softmax(-1)[:, 9000], atol=1e-5, rtol=0)
print("equal")
"""


def test_kernels_equal_float64() -> None:
    pytest.importorskip("triton")
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERNELS_ON_CPU],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.stdout.strip() == "equal", answer.stderr[-2000:]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 300), st.floats(0.0, 5.0), st.integers(0, 2**31))
def test_divergence_equals_float64_and_is_never_negative(words: int, apart: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(4, words, generator=draw) * 6
    b = a + apart * torch.randn(4, words, generator=draw)
    found = reductions.compare_rows(a, b)
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    torch.testing.assert_close(found.forward.double(), (p.exp() * (p - q)).sum(-1), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found.reverse.double(), (q.exp() * (q - p)).sum(-1), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found.base_entropy.double(), -(p.exp() * p).sum(-1), atol=2e-5, rtol=1e-5)
    assert (found.forward >= 0).all()
    assert (found.reverse >= 0).all()


def test_words_that_cannot_come_add_nothing_and_nan_stays() -> None:
    a = torch.tensor([[-torch.inf, 0.0, 0.0], [0.0, 1.0, -torch.inf], [0.0, torch.nan, 1.0]])
    b = torch.tensor([[-torch.inf, 0.0, 0.0], [0.0, 1.0, 2.0], [0.0, 0.0, 1.0]])
    found = reductions.compare_rows(a, b)
    assert found.forward[0] == found.reverse[0] == 0.0
    assert float(found.base_entropy[0]) == pytest.approx(0.693147, abs=1e-6)
    q = b[1].double().log_softmax(-1)
    p = a[1].double().log_softmax(-1)
    assert float(found.forward[1]) == pytest.approx(float((p.exp()[:2] * (p - q)[:2]).sum()), abs=1e-6)
    assert found.reverse[1] == torch.inf  # the baseline rules out a word that this model may say
    assert found.forward[2].isnan()


def test_divergence_by_hand() -> None:
    """Two words: p = (1/2, 1/2), q = (1/4, 3/4). KL(p||q) = ln 2 / 2 + ln(2/3) / 2 = 0.143841; KL(q||p) = 0.130812."""
    a = torch.log(torch.tensor([[0.5, 0.5]]))
    b = torch.log(torch.tensor([[0.25, 0.75]])) + 7.0  # a shift of all logits changes nothing
    found = reductions.compare_rows(a, b)
    assert float(found.forward) == pytest.approx(0.143841, abs=1e-6)
    assert float(found.reverse) == pytest.approx(0.130812, abs=1e-6)
    assert float(found.base_entropy) == pytest.approx(0.693147, abs=1e-6)
    assert float(found.own_entropy) == pytest.approx(0.562335, abs=1e-6)


def test_memory_of_a_block_is_bounded() -> None:
    cpu = torch.device("cpu")
    assert reductions.rows_per_block(128_256, cpu, 2) * 4 * 128_256 <= reductions.BLOCK_BYTES
    assert reductions.rows_per_block(10**9, cpu, 2) == 16
