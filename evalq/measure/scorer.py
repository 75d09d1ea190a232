"""The scorer inside the engine's worker: which rows of a step are scored, their numbers, and the baseline's hidden states.

`score_step` is handed the final hidden states of every token of an engine step. It picks the scored rows of all requests,
computes their logits in blocks of bounded memory, reduces each block on the device (evalq.measure.reductions) and keeps a few
numbers per row. With a sink, the hidden states themselves are kept; with a source, each row is compared with the baseline's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evalq.measure import hidden, reductions

Array = np.ndarray[Any, Any]
WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


@dataclass
class ScoreStore:
    """Rows scored since the last `take`; tensors stay on the device until then."""

    topk: int
    owners: list[Array] = field(default_factory=list)  # (rows,) request number
    positions: list[Array] = field(default_factory=list)  # (rows,) position of the predicted token in its prompt
    logprobs: list[torch.Tensor] = field(default_factory=list)  # (rows,) float32, nats
    top1_ids: list[torch.Tensor] = field(default_factory=list)  # (rows,) int64
    top1_logprobs: list[torch.Tensor] = field(default_factory=list)  # (rows,) float32
    topk_ids: list[torch.Tensor] = field(default_factory=list)  # (rows, k) int64
    topk_logprobs: list[torch.Tensor] = field(default_factory=list)  # (rows, k) float32
    divergences: list[torch.Tensor] = field(
        default_factory=list
    )  # (4, rows) float32, as reductions.Divergence; NaN = none

    def arrays(self) -> dict[str, Array]:
        """Everything as arrays on the host; empty when nothing was scored."""
        if not self.owners:
            return {}
        found = {
            "owner": np.concatenate(self.owners),
            "position": np.concatenate(self.positions),
            "logprob": _to_numpy(self.logprobs, np.float32),
            "top1_id": _to_numpy(self.top1_ids, np.int32),
            "top1_logprob": _to_numpy(self.top1_logprobs, np.float32),
        }
        if self.topk:
            found["topk_id"] = _to_numpy(self.topk_ids, np.int32)
            found["topk_logprob"] = _to_numpy(self.topk_logprobs, np.float32)
        if self.divergences:
            names = ("kld", "reverse_kld", "base_entropy", "entropy")
            values = _to_numpy(self.divergences, np.float32, axis=1)
            found |= dict(zip(names, values, strict=True))
        return found


def _to_numpy(parts: list[torch.Tensor], dtype: Any, axis: int = 0) -> Array:
    array: Array = torch.cat(parts, dim=axis).cpu().numpy().astype(dtype)
    return array


@dataclass
class Step:
    """The scored rows of one engine step, all requests together; arrays (rows,) or, for what is kept, (kept,)."""

    rows: Array  # in the step's hidden states
    targets: Array  # token id each predicts
    owners: Array
    positions: Array
    kept: Array  # of the rows, those with a place in the hidden-state store; ascending
    places: Array  # their rows in that store


class HiddenSink:
    """Writes rows of hidden states to the store; copies from the device run beside the next step."""

    def __init__(self, folder: Path, layout: hidden.Layout) -> None:
        self.stride = layout.stride
        self._file = hidden.open_rows(folder, layout, writable=True)
        self._pending: list[tuple[torch.Tensor, Array, Any]] = []

    def put(self, rows: torch.Tensor, places: Array) -> None:
        """rows: (kept, hidden) on the device, for the rows `places` of the store."""
        self.flush()
        event = None
        if rows.device.type == "cuda":
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host = rows.clone()
        self._pending.append((host, places, event))

    def flush(self) -> None:
        """Put what has arrived on the host into the file."""
        for host, places, event in self._pending:
            if event is not None:
                event.synchronize()
            self._file[places] = host.view(WORDS[host.element_size()]).numpy()
        self._pending.clear()

    def sync(self) -> None:
        """Everything put so far is on disk when this returns: it survives a power cut."""
        self.flush()
        if isinstance(self._file, np.memmap):
            self._file.flush()


class HiddenSource:
    """Reads the baseline's hidden states and turns them into the baseline's logits."""

    def __init__(self, folder: Path, layout: hidden.Layout, head: torch.Tensor | None) -> None:
        self.stride = layout.stride
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._file = hidden.open_rows(folder, layout, writable=False)
        self._head = head  # None: the engine's own head is the baseline's
        self._buffers: list[tuple[torch.Tensor, Any]] = []  # pinned host memory and the event after its last copy
        self._next = 0

    def logits(self, model: Any, places: Array, device: torch.device) -> torch.Tensor | None:
        """The baseline's logits for rows `places`; None where this rank holds no logits."""
        rows = self._rows(places, device)
        if self._head is None:
            logits: torch.Tensor | None = model.compute_logits(rows)
            return logits
        return _after_head(model, torch.nn.functional.linear(rows.to(self._head.dtype), self._head))

    def _rows(self, places: Array, device: torch.device) -> torch.Tensor:
        """Stored rows on the device; through pinned buffers used in turn, so that copies run beside the computation."""
        if device.type != "cuda":
            return torch.from_numpy(np.ascontiguousarray(self._file[places])).view(self._dtype)
        host, event = self._buffer(len(places))
        event.synchronize()
        words = host.view(WORDS[host.element_size()]).numpy()
        done = 0
        for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
            words[done : done + len(run)] = self._file[run[0] : run[0] + len(run)]
            done += len(run)
        rows = host[:done].to(device, non_blocking=True)
        event.record()
        return rows

    def _buffer(self, rows: int) -> tuple[torch.Tensor, Any]:
        if not self._buffers or self._buffers[0][0].shape[0] < rows:
            shape = (max(rows, 1024), self._file.shape[1])
            pinned = [torch.empty(shape, dtype=self._dtype, pin_memory=True) for _ in range(3)]
            self._buffers = [(one, torch.cuda.Event()) for one in pinned]
        self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next]


def _after_head(model: Any, logits: torch.Tensor) -> torch.Tensor:
    """What the model does to its logits after the head: soft cap and scale, the same for both models."""
    processor = getattr(model, "logits_processor", None)
    cap, scale = getattr(processor, "soft_cap", None), getattr(processor, "scale", 1.0)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits * scale if scale != 1.0 else logits


def _to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def find_head(model: Any) -> torch.Tensor | None:
    """The output head's weight as loaded on this rank; None when there is no such tensor."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "lm_head" and isinstance(getattr(module, "weight", None), torch.Tensor):
            return module.weight
    return None


def head_hash(model: Any) -> str:
    """Fingerprint of the head's bits on this rank; "" when the head is not a plain matrix.

    Each row becomes one 64-bit sum of its bits times fixed odd numbers, on the device, and sha256 runs over those: a gigabyte is
    neither copied nor hashed. Enough to tell heads apart, not meant to resist an attacker.
    """
    weight = find_head(model)
    if weight is None or not weight.is_floating_point() or weight.element_size() not in (2, 4):
        return ""
    bits = weight.detach().view(torch.int16 if weight.element_size() == 2 else torch.int32)
    factors = _odd_numbers(bits.shape[1]).to(bits.device)
    block = max(1, (64 << 20) // (8 * bits.shape[1]))
    sums = [(part.to(torch.int64) * factors).sum(dim=1) for part in bits.split(block)]
    digest = hashlib.sha256(f"{weight.dtype} {tuple(weight.shape)}".encode())
    digest.update(torch.cat(sums).cpu().numpy().tobytes())
    return digest.hexdigest()


def _odd_numbers(count: int) -> torch.Tensor:
    """Fixed odd 64-bit numbers without pattern (splitmix64, Steele et al. 2014)."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((state ^ (state >> np.uint64(31))) | np.uint64(1)).view(np.int64))


def load_head(folder: Path, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """The head of a checkpoint in safetensors: lm_head.weight, or the embedding it is tied to; None when neither is there."""
    from safetensors import safe_open

    for ending in ("lm_head.weight", "embed_tokens.weight"):
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                name = next((key for key in list(tensors.keys()) if key.endswith(ending)), None)
                if name is not None:
                    found: torch.Tensor = tensors.get_tensor(name).to(dtype).to(device)
                    return found
    return None


def score_step(runner: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> None:
    """Score the rows of one engine step. hidden_states: (tokens of the step, hidden)."""
    sink: HiddenSink | None = getattr(runner, "evalq_sink", None)
    source: HiddenSource | None = getattr(runner, "evalq_source", None)
    stride = sink.stride if sink is not None else source.stride if source is not None else 0
    step = select_rows(runner, num_scheduled_tokens, stride)
    if step is None:
        return
    store: ScoreStore = runner.evalq_scores
    row_index = _to_device(torch.from_numpy(step.rows), hidden_states.device)
    if sink is not None and len(step.kept):
        sink.put(
            hidden_states.index_select(0, row_index[torch.from_numpy(step.kept).to(row_index.device)]), step.places
        )
    block = _block_rows(runner, hidden_states)
    if score_rows(runner.model, hidden_states, row_index, step, store, block, source, runner.evalq_keeps):
        store.owners.append(step.owners)
        store.positions.append(step.positions)


def _block_rows(runner: Any, hidden_states: torch.Tensor) -> int:
    """Rows whose logits are held at once; from what every rank knows alike, also one that will hold no logits."""
    vocabulary = int(runner.model_config.get_vocab_size())
    return reductions.rows_per_block(vocabulary, hidden_states.device, hidden_states.element_size())


def select_rows(runner: Any, num_scheduled_tokens: dict[str, int], stride: int = 0) -> Step | None:
    """The scored rows of a step; None when it has none. stride: of the hidden-state store, 0 when there is none."""
    rows: list[Array] = []
    targets: list[Array] = []
    owners: list[Array] = []
    positions: list[Array] = []
    kept: list[Array] = []
    places: list[Array] = []
    total = 0
    starts = runner.query_start_loc.np
    index_of = runner.input_batch.req_id_to_index
    for request_id, scheduled in num_scheduled_tokens.items():
        request = runner.requests[request_id]
        asked = (getattr(request.sampling_params, "extra_args", None) or {}).get("evalq")
        if asked is None or request.prompt_token_ids is None:
            continue
        owner, first, *place = asked  # positions first .. len(prompt) - 1 are scored
        start = request.num_computed_tokens
        prompt = request.prompt_token_ids
        low, high = max(start, first - 1), min(start + scheduled, len(prompt) - 1)
        if low >= high:
            continue
        offset = int(starts[index_of[request_id]]) - start
        rows.append(np.arange(low + offset, high + offset))
        targets.append(np.asarray(prompt[low + 1 : high + 1], dtype=np.int64))
        owners.append(np.full(high - low, owner, dtype=np.int64))
        positions.append(np.arange(low + 1, high + 1))
        if stride and place:
            from_first = low + 1 - first
            numbers, stored = hidden.kept_rows(hidden.Kept(*place), stride, from_first, high + 1 - first)
            kept.append(numbers - from_first + total)
            places.append(stored)
        total += high - low
    if not rows:
        return None
    nothing = np.zeros(0, np.int64)
    return Step(
        np.concatenate(rows),
        np.concatenate(targets),
        np.concatenate(owners),
        np.concatenate(positions),
        np.concatenate(kept) if kept else nothing,
        np.concatenate(places) if places else nothing,
    )


def score_rows(
    model: Any,
    hidden_states: torch.Tensor,
    row_index: torch.Tensor,
    step: Step,
    store: ScoreStore,
    block: int,
    source: HiddenSource | None = None,
    keeps: bool = True,
) -> bool:
    """Numbers of all rows of a step, in blocks of `block` rows; False where this rank holds no logits or keeps nothing.

    Every rank computes the logits of every block, because the head may be split over them: `block` is the same on all. One
    rank is enough to reduce and keep them.
    """
    device = hidden_states.device
    targets = _to_device(torch.from_numpy(step.targets), device)
    done, holds_logits = 0, False
    while done < len(row_index):
        stop = min(done + block, len(row_index))
        logits = model.compute_logits(hidden_states.index_select(0, row_index[done:stop]))
        base = _base_block(model, step, done, stop, source, device) if source is not None else None
        if logits is not None and keeps:
            holds_logits = True
            _keep_block(logits, targets[done:stop], store)
            if source is not None:
                store.divergences.append(_compare_block(logits, base, step, done, stop))
        done = stop
    return holds_logits


def _base_block(
    model: Any, step: Step, done: int, stop: int, source: HiddenSource, device: torch.device
) -> torch.Tensor | None:
    """The baseline's logits of the rows of one block that the store holds; None where there are none."""
    low, high = np.searchsorted(step.kept, [done, stop])
    return None if low == high else source.logits(model, step.places[low:high], device)


def _compare_block(logits: torch.Tensor, base: torch.Tensor | None, step: Step, done: int, stop: int) -> torch.Tensor:
    """(4, rows) divergences of one block from the baseline's logits `base`, NaN for rows that the store does not hold."""
    device = logits.device
    result = torch.full((4, stop - done), torch.nan, device=device)
    if base is None:
        return result
    low, high = np.searchsorted(step.kept, [done, stop])
    inside = step.kept[low:high] - done
    whole = len(inside) == stop - done
    index = None if whole else _to_device(torch.from_numpy(inside), device)
    own = logits if index is None else logits.index_select(0, index)
    found = reductions.compare_rows(base[:, : own.shape[1]], own)
    values = torch.stack([found.forward, found.reverse, found.base_entropy, found.own_entropy])
    if index is None:
        return values
    return result.index_copy_(1, index, values)


def _keep_block(logits: torch.Tensor, targets: torch.Tensor, store: ScoreStore) -> None:
    """logits: (rows, vocabulary)."""
    rows = reductions.score_rows(logits, targets)
    store.logprobs.append(rows.logprobs)
    store.top1_ids.append(rows.top1_ids)
    store.top1_logprobs.append(rows.top1_logprobs)
    if store.topk:
        top = torch.topk(logits.log_softmax(dim=-1, dtype=torch.float32), store.topk, dim=-1)
        store.topk_ids.append(top.indices)
        store.topk_logprobs.append(top.values)
