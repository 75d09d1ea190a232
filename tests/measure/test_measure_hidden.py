"""The store of hidden states: layout, sampling that fits the room, damage; and the scorer that fills and reads it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from evalq.errors import MeasurementError  # noqa: E402 - after the skip
from evalq.measure import hidden  # noqa: E402
from evalq.measure.divergence import announcement  # noqa: E402
from evalq.measure.probe import EngineProbe  # noqa: E402
from evalq.measure.scorer import HiddenSink, HiddenSource, ScoreStore, head_hash, load_head, score_step  # noqa: E402

WORDS, WIDTH = 30, 6


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 4000))
def test_layout_fits_its_room_and_places_every_kept_row_once(scored: list[int], limit: int) -> None:
    keys = [f"k{i}" for i in range(len(scored))]
    layout = hidden.plan_layout(keys, scored, 4, "bfloat16", limit)
    assert layout.bytes <= max(limit, 8)
    assert layout.rows * 8 == layout.bytes
    places: list[int] = []
    for key, count in zip(keys, scored, strict=True):
        numbers, rows = hidden.kept_rows(layout.sequences[key], layout.stride, 0, count)
        assert len(numbers) == layout.sequences[key].count
        assert (numbers % layout.stride == numbers[:1] % layout.stride).all()
        places.extend(rows.tolist())
    assert sorted(places) == list(range(layout.rows))


@given(st.integers(1, 7), st.integers(0, 6), st.integers(0, 50), st.integers(0, 50))
def test_rows_of_chunks_are_the_rows_of_the_whole(stride: int, phase: int, cut: int, count: int) -> None:
    """A sequence computed in two chunks puts the same tokens in the same places as in one."""
    cut, kept = min(cut, count), hidden.Kept(100, 0, phase % stride)
    whole = hidden.kept_rows(kept, stride, 0, count)
    parts = [hidden.kept_rows(kept, stride, 0, cut), hidden.kept_rows(kept, stride, cut, count)]
    for i in (0, 1):
        np.testing.assert_array_equal(whole[i], np.concatenate([part[i] for part in parts]))


def test_all_rows_of_wikitext_at_llama_8b_shapes_do_not_fit_one_gibibyte() -> None:
    """62 documents, 288,000 tokens of 4,096 two-byte values are 2.2 GiB: every third token is 0.73 GiB."""
    layout = hidden.plan_layout([f"d{i}" for i in range(62)], [288_000 // 62] * 62, 4096, "bfloat16", hidden.GIB)
    assert layout.stride == 3
    assert layout.bytes < hidden.GIB
    text = announcement(layout, 288_000)
    assert "0.73 GiB" in text
    assert "every 3rd of 288,000 scored tokens" in text
    assert "2.2" in text


class Model(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.requires_grad_(False)
        self.lm_head.weight.data = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(seed))

    def compute_logits(self, states: Any) -> Any:
        return states @ self.lm_head.weight.T


def runner_of(model: Model, ids: list[int], place: hidden.Kept) -> Any:
    extra = {"evalq": [0, 1, place.offset, place.count, place.phase]}
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args=extra), prompt_token_ids=ids, num_computed_tokens=0
    )
    return SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(get_vocab_size=lambda: WORDS),
        evalq_scores=ScoreStore(topk=0),
        evalq_keeps=True,
        requests={"a": request},
        query_start_loc=SimpleNamespace(np=np.asarray([0])),
        input_batch=SimpleNamespace(req_id_to_index={"a": 0}),
        evalq_sink=None,
        evalq_source=None,
    )


def step(runner: Any, states: Any, chunks: list[int]) -> dict[str, np.ndarray]:
    begin = 0
    for count in chunks:
        runner.requests["a"].num_computed_tokens = begin
        score_step(runner, states[begin : begin + count], {"a": count})
        begin += count
    return EngineProbe.evalq_take_scores(SimpleNamespace(model_runner=runner), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("room_rows", [100, 5])
@pytest.mark.parametrize("same_head", [True, False])
def test_divergence_through_the_store_equals_full_logits(tmp_path: Path, room_rows: int, same_head: bool) -> None:
    ids = [i % WORDS for i in range(17)]
    key = hidden.sequence_key(ids, 1)
    layout = hidden.plan_layout([key], [16], WIDTH, "float32", room_rows * WIDTH * 4)
    place = layout.sequences[key]
    draw = torch.Generator().manual_seed(3)
    base_states, own_states = torch.randn(17, WIDTH, generator=draw), torch.randn(17, WIDTH, generator=draw)
    base, own = Model(1), Model(1 if same_head else 2)

    keeping = runner_of(base, ids, place)
    keeping.evalq_sink = HiddenSink(tmp_path, layout)
    step(keeping, base_states, [4, 9, 4])
    keeping.evalq_sink.sync()
    hidden.write_layout(tmp_path, layout, [head_hash(base)])

    found_layout, heads = hidden.read_layout(tmp_path)
    assert found_layout == layout
    assert (heads[0] == head_hash(own)) is same_head
    comparing = runner_of(own, ids, place)
    comparing.evalq_source = HiddenSource(tmp_path, layout, None if same_head else base.lm_head.weight.data)
    arrays = step(comparing, own_states, [10, 7])

    p = base.compute_logits(base_states[:16]).double().log_softmax(-1)
    q = own.compute_logits(own_states[:16]).double().log_softmax(-1)
    wanted = (p.exp() * (p - q)).sum(-1).detach().numpy()
    kept = ~np.isnan(arrays["kld"])
    assert kept.sum() == layout.rows
    assert layout.stride == (1 if room_rows == 100 else 4)
    np.testing.assert_allclose(arrays["kld"][kept], wanted[arrays["position"][kept] - 1], atol=1e-5)
    np.testing.assert_array_equal(np.flatnonzero(kept), hidden.kept_rows(place, layout.stride, 0, 16)[0])


def test_bfloat16_states_come_back_bit_for_bit(tmp_path: Path) -> None:
    layout = hidden.plan_layout(["k"], [8], WIDTH, "bfloat16", 1 << 20)
    states = torch.randn(8, WIDTH).to(torch.bfloat16)
    sink = HiddenSink(tmp_path, layout)
    sink.put(states, np.arange(8))
    sink.sync()
    source = HiddenSource(tmp_path, layout, torch.eye(WIDTH, dtype=torch.bfloat16))
    back = source.logits(torch.nn.Module(), np.arange(8), torch.device("cpu"))
    assert torch.equal(back, states)


def test_interrupted_store_is_not_read_and_keeps_its_rows(tmp_path: Path) -> None:
    layout = hidden.plan_layout(["k"], [3], 2, "float32", 1 << 20)
    sink = HiddenSink(tmp_path, layout)
    sink.put(torch.ones(1, 2), np.asarray([1]))
    sink.sync()
    assert not hidden.has_store(tmp_path)
    with pytest.raises(MeasurementError, match="measure the baseline anew"):
        hidden.read_layout(tmp_path)
    again = hidden.open_rows(tmp_path, layout, writable=True)  # the next run goes on in the same file
    assert again.view(np.float32)[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("damage", ["cut", "dtype", "outside", "text"])
def test_damaged_store_is_refused_in_one_sentence(tmp_path: Path, damage: str) -> None:
    layout = hidden.plan_layout(["k"], [3], 2, "float32", 1 << 20)
    hidden.open_rows(tmp_path, layout, writable=True)
    hidden.write_layout(tmp_path, layout, ["h"])
    assert hidden.has_store(tmp_path)
    meta = tmp_path / hidden.META_FILE
    content = json.loads(meta.read_text())
    if damage == "cut":
        (tmp_path / hidden.ROWS_FILE).write_bytes(b"1234")
    elif damage == "text":
        meta.write_text("{")
    else:
        content |= {"dtype": "complex64"} if damage == "dtype" else {"sequences": {"k": [2, 3, 0]}}
        meta.write_text(json.dumps(content))
    assert not hidden.has_store(tmp_path)
    with pytest.raises(MeasurementError, match="not readable"):
        hidden.read_layout(tmp_path)


def test_disk_too_small_is_said_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match=r"tasks\.divergence_store_gib") as raised:
        hidden.require_room(tmp_path / "not" / "there", 1 << 60)
    assert raised.value.kind == "disk"


def test_head_of_a_checkpoint_tied_or_not(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    cpu = torch.device("cpu")
    assert load_head(tmp_path, torch.float32, cpu) is None
    save_file({"model.embed_tokens.weight": torch.full((2, 2), 1.0)}, tmp_path / "a.safetensors")
    assert float(load_head(tmp_path, torch.float32, cpu)[0, 0]) == 1.0
    save_file({"lm_head.weight": torch.full((2, 2), 2.0)}, tmp_path / "b.safetensors")
    assert float(load_head(tmp_path, torch.float32, cpu)[0, 0]) == 2.0
