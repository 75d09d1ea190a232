"""Rounding and packing: hand-worked values, properties, and the library's own reading of what we write."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from evalq.quantize.rounding import (  # noqa: E402 - after importorskip
    Codes,
    best_scales,
    pack_int32,
    round_weight,
    rounding_threads,
    tensor_scale,
)

INT4, INT8, E4M3 = Codes(4, False), Codes(8, False), Codes(8, True)
POOL = ThreadPoolExecutor(1)


def test_hand_worked_min_max() -> None:
    """max|w| = 7.5, half the code range is 7.5, so the scale is 1 and the codes are w rounded half to even, at most 7."""
    weight = torch.tensor([[7.5, -7.5, 0.5, 1.5, -0.4, 3.6, 0.0, -2.5]])
    rounded = round_weight(weight, INT4, 8, torch.float32, clip_search=False, pool=POOL)
    assert rounded.scales.tolist() == [[1.0]]
    assert rounded.codes.tolist() == [[7, -8, 0, 2, 0, 4, 0, -2]]
    # errors: .5 .5 .5 .5 .4 .4 0 .5 -> 5 * .25 + 2 * .16
    assert rounded.squared_error == pytest.approx(1.57)
    assert rounded.squared_norm == pytest.approx(2 * 56.25 + 0.25 + 2.25 + 0.16 + 12.96 + 6.25)


def test_hand_worked_search() -> None:
    """Seven weights at 1 and one at 8: min-max (scale 8/7.5) is beaten by the scale at which 8 is code 7, or by a clip."""
    weight = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 8.0]])
    plain = round_weight(weight, INT4, 8, torch.float32, clip_search=False, pool=POOL)
    # scale 16/15: seven errors of 1/15, and 7 * 16/15 = 7.4667, an error of 8/15
    assert plain.squared_error == pytest.approx((7 + 64) / 225, rel=1e-5)
    found = round_weight(weight, INT4, 8, torch.float32, clip_search=True, pool=POOL)
    # for a scale s with codes (1, ..., 1, 7) the error is 7 (s-1)^2 + (7s-8)^2, least at s = 63/56; 8/7 is a candidate
    candidates = [8 / 7.5 * ratio for ratio in INT4.ratios]

    def error(s: float) -> float:
        return sum((min(7, round(w / s)) * s - w) ** 2 for w in weight[0].tolist())

    best = min(candidates, key=error)
    assert found.scales.item() == pytest.approx(best)
    assert found.squared_error == pytest.approx(error(best), rel=1e-5)
    assert best == pytest.approx(8 / 7)


def test_hand_worked_fp8() -> None:
    """Scale 448/448 = 1; E4M3 near 17 has steps of 2 (16, 18), near 1.06 steps of 1/8."""
    weight = torch.tensor([[448.0, 17.5, 1.05, 0.0]])
    rounded = round_weight(weight, E4M3, 4, torch.float32, clip_search=False, pool=POOL)
    assert rounded.scales.item() == 1.0
    assert rounded.codes.to(torch.float32).tolist() == [[448.0, 18.0, 1.0, 0.0]]


def test_packing_by_hand() -> None:
    """Codes -8..7 become 0..15, the first in the lowest four bits."""
    codes = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1, 7]], dtype=torch.int8)
    words = pack_int32(codes, 4)
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0x76543210, 0x0000000F]
    assert pack_int32(torch.full((1, 8), 7, dtype=torch.int8), 4).tolist() == [[-1]]


weights = st.lists(st.floats(-100, 100, width=32), min_size=16, max_size=16)


@given(weights, st.sampled_from([INT4, INT8, E4M3]), st.sampled_from([4, 8, 16]))
@settings(max_examples=150, deadline=None)
def test_search_is_never_worse_than_min_max(values: list[float], codes: Codes, group_size: int) -> None:
    weight = torch.tensor(values).reshape(2, -1)[:, : 8 // group_size * group_size or 8]
    size = min(group_size, 8)
    errors = []
    for clip_search in (False, True):
        rounded = round_weight(weight, codes, size, torch.bfloat16, clip_search, POOL)
        back = rounded.codes.to(torch.float64).reshape(2, -1, size) * rounded.scales.to(torch.float64).unsqueeze(-1)
        error = (back.reshape(2, -1) - weight.to(torch.float64)).square().reshape(2, -1, size).sum(-1)
        errors.append(error)
        assert rounded.squared_error == pytest.approx(float(error.sum()), rel=1e-4, abs=1e-9)
    assert bool((errors[1] <= errors[0] * (1 + 1e-5) + 1e-12).all())


@given(weights)
@settings(max_examples=50, deadline=None)
def test_search_is_the_exact_minimum_over_its_candidates(values: list[float]) -> None:
    groups = torch.tensor(values).reshape(1, 2, 8)
    _, errors = best_scales(groups, INT4, INT4.ratios, torch.bfloat16)
    each = torch.stack([best_scales(groups, INT4, (ratio,), torch.bfloat16)[1] for ratio in INT4.ratios])
    assert torch.equal(errors, each.min(0).values)


@given(st.integers(1, 3), st.integers(1, 40), st.sampled_from([4, 8]), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_packing_is_the_librarys(rows: int, columns: int, bits: int, seed: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    generator = torch.Generator().manual_seed(seed)
    low = 1 << (bits - 1)
    codes = torch.randint(-low, low, (rows, columns), generator=generator).to(torch.int8)
    assert torch.equal(pack_int32(codes, bits), helpers.pack_to_int32(codes, bits))
    assert torch.equal(helpers.unpack_from_int32(pack_int32(codes, bits), bits, codes.shape), codes)


def test_zeros_and_tiny_weights_have_usable_scales() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = torch.tensor([[0.0] * 8, [1e-38] * 8])
        rounded = round_weight(weight, INT4, 8, dtype, clip_search=True, pool=POOL)
        assert bool((rounded.scales > 0).all())
        assert bool(torch.isfinite(1 / rounded.scales.to(torch.float32)).all())
        assert rounded.codes[0].tolist() == [0] * 8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        round_weight(torch.tensor([[1.0, bad]]), INT8, 2, torch.float32, clip_search=True, pool=POOL)


def test_group_size_must_divide() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        round_weight(torch.ones(1, 6), INT4, 4, torch.float32, clip_search=True, pool=POOL)


@pytest.fixture
def threads() -> Iterator[Executor]:
    with rounding_threads() as pool:
        yield pool


def test_chunks_and_threads_change_nothing(threads: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    whole = round_weight(weight, INT4, 32, torch.bfloat16, clip_search=True, pool=POOL)
    monkeypatch.setattr("evalq.quantize.rounding.CHUNK_ELEMENTS", 64 * 7)
    cut = round_weight(weight, INT4, 32, torch.bfloat16, clip_search=True, pool=threads)
    assert torch.equal(whole.codes, cut.codes)
    assert torch.equal(whole.scales, cut.scales)
    assert cut.squared_error == pytest.approx(whole.squared_error, rel=1e-6)


def test_one_scale_for_a_whole_tensor() -> None:
    weight = torch.tensor([[448.0, 2.0], [-448.0, 1.0]])
    rounded = tensor_scale(weight, E4M3, False, POOL)
    assert rounded.scales.tolist() == [1.0]
    assert rounded.codes.to(torch.float32).tolist() == weight.tolist()
    assert rounded.relative_squared_error == 0.0


def test_clipping_helps_normal_weights() -> None:
    """4-bit groups of normal weights: the search takes at least a tenth off the squared error of min-max rounding."""
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(3))
    plain = round_weight(weight, INT4, 64, torch.bfloat16, clip_search=False, pool=POOL)
    found = round_weight(weight, INT4, 64, torch.bfloat16, clip_search=True, pool=POOL)
    assert found.squared_error < 0.9 * plain.squared_error
