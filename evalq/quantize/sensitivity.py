"""What quantising one group of layers alone does to the model's predictions, by fake quantisation in plain PyTorch.

For each unit: its weights are replaced by rounded ones (and its inputs rounded, where the option says so), everything else
stays as it is, and the divergence KL(16 bit || quantised) is averaged over the tokens, in nats. This is no measurement on the
engine, and every value says how it came about: "fake", or "scaled from X": the fake value of a related option, times the
ratio of the squared errors of the weights (a divergence is quadratic in a small error).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalq.errors import MeasurementError
from evalq.facts.options import Option
from evalq.quantize.hashing import text_sha256
from evalq.quantize.rounding import Codes, round_weight, rounding_threads
from evalq.quantize.store import Progress
from evalq.quantize.units import Unit
from evalq.records import from_mapping, write_text

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import torch

SENSITIVITY_VERSION = "1"  # raise it when the same input would give other values


@dataclass(frozen=True)
class Damage:
    """Mean divergence of one unit under one option, nats per token."""

    unit: str
    option: str
    kld_nats: float
    how: str  # "fake" or "scaled from OPTION"
    relative_squared_error: float  # of the unit's weights, no unit


@dataclass(frozen=True)
class Sensitivity:
    """A table of damages and what it was measured on."""

    damages: list[Damage]
    tokens: int
    device: str
    seconds: float

    def of(self, unit: str, option: str) -> Damage | None:
        return next((d for d in self.damages if (d.unit, d.option) == (unit, option)), None)


@dataclass(frozen=True)
class Question:
    """What is to be measured. `windows`: token ids of equal length."""

    source: Path
    source_hash: str
    dtype: str
    units: Sequence[Unit]
    options: Sequence[Option]
    windows: Sequence[Sequence[int]]
    all_fake: bool  # measure every option; else one of each family, and scale the others

    def key(self) -> str:
        """Equal key = the same table."""
        parts = [
            SENSITIVITY_VERSION,
            self.source_hash,
            self.dtype,
            [unit.modules for unit in self.units],
            [dataclasses.asdict(option) for option in self.options],
            text_sha256(json.dumps([list(row) for row in self.windows])),
            self.all_fake,
        ]
        return text_sha256(json.dumps(parts, sort_keys=True))


def sensitivity(question: Question, cache: Path, progress: Progress | None = None) -> Sensitivity:
    """The table, from the cache or measured; what was measured before an interruption is kept unit by unit.

    Errors: MeasurementError(checkpoint) when the model cannot be run; (disk).
    """
    file = cache / f"{question.key()[:24]}.json"
    with contextlib.suppress(OSError, ValueError):
        found: Sensitivity = from_mapping(Sensitivity, json.loads(file.read_text(encoding="utf-8")), str(file))
        return found
    partial = file.with_suffix(".partial.json")
    known: list[Damage] = []
    with contextlib.suppress(OSError, ValueError):
        known = [from_mapping(Damage, row, str(partial)) for row in json.loads(partial.read_text(encoding="utf-8"))]
    made = _measure(question, known, partial, progress)
    write_text(file, json.dumps(dataclasses.asdict(made), allow_nan=False))
    partial.unlink(missing_ok=True)
    return made


def _measure(question: Question, known: list[Damage], partial: Path, progress: Progress | None) -> Sensitivity:
    import time

    import torch

    began = time.monotonic()
    if progress is not None:
        progress(0, len(question.units), "loading the model for fake quantisation")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    done = {damage.unit for damage in known}
    with rounding_threads() as pool, torch.inference_mode():
        model = FakeModel.load(question, device)
        for number, unit in enumerate(question.units):
            if progress is not None:
                progress(number, len(question.units), f"sensitivity of {unit.name} (fake quantisation)")
            if unit.name not in done:
                known.extend(_damages(model, unit, question, pool))
                write_text(partial, json.dumps([dataclasses.asdict(damage) for damage in known], allow_nan=False))
    tokens = sum(len(row) for row in question.windows)
    return Sensitivity(known, tokens, device, round(time.monotonic() - began, 1))


def _damages(model: FakeModel, unit: Unit, question: Question, pool: Executor) -> list[Damage]:
    """All options that fit the unit; one of each family by running the model, unless every one is asked for."""
    fitting = [option for option in question.options if all(option.fits(into) for _, into in unit.shapes)]
    found: list[Damage] = []
    reference: dict[str, Damage] = {}
    for option in fitting:
        rounded, error = model.rounded(unit, option, pool)
        base = reference.get(option.family)
        if base is None or question.all_fake or base.relative_squared_error <= 0:
            damage = Damage(unit.name, option.name, model.divergence(unit, option, rounded), "fake", error)
            reference.setdefault(option.family, damage)
        else:
            scaled = base.kld_nats * error / base.relative_squared_error
            damage = Damage(unit.name, option.name, scaled, f"scaled from {base.option}", error)
        found.append(damage)
    return found


class FakeModel:
    """A loaded model, the outputs of its layers and its predictions for some windows."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self._model = model
        self._ids = ids
        self._modules = dict(model.named_modules())
        self._layers = _layers(model)
        self._outputs: list[Any] = []
        handles = [layer.register_forward_hook(self._keep) for layer in self._layers]
        self._expected = self._predict()
        for handle in handles:
            handle.remove()

    @classmethod
    def load(cls, question: Question, device: str) -> FakeModel:
        """Errors: MeasurementError(checkpoint) when transformers cannot load or run it."""
        import torch
        from transformers import AutoModelForCausalLM

        dtype = torch.float32 if device == "cpu" else getattr(torch, question.dtype)
        try:
            model = AutoModelForCausalLM.from_pretrained(question.source, dtype=dtype, local_files_only=True).to(device)
            return cls(model.eval(), torch.tensor([list(row) for row in question.windows], device=device))
        except (ValueError, KeyError, RuntimeError, OSError) as error:
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            raise MeasurementError(
                f"{question.source} cannot be run for fake quantisation ({first_line}); give another model.path",
                "checkpoint",
            ) from error

    def _keep(self, module: Any, inputs: Any, output: Any) -> None:
        self._outputs.append(output)

    def _predict(self) -> torch.Tensor:
        """Log-probabilities (tokens, vocab), float32."""
        import torch

        logits = self._model(self._ids, use_cache=False).logits
        return torch.log_softmax(logits.flatten(0, 1).to(torch.float32), dim=-1)

    def rounded(self, unit: Unit, option: Option, pool: Executor) -> tuple[dict[str, torch.Tensor], float]:
        """The unit's matrices as the option would store them, by module, and their relative squared error."""
        import torch

        codes = Codes(option.weights.num_bits, option.weights.type == "float")
        weights: dict[str, torch.Tensor] = {}
        error = norm = 0.0
        for name in unit.modules:
            weight = self._modules[name].weight
            size = option.weights.group_size or weight.shape[1]
            scale_type = torch.bfloat16 if option.input_activations is None else torch.float32
            made = round_weight(weight.detach().cpu(), codes, size, scale_type, True, pool)
            scales = made.scales.to(torch.float32).repeat_interleave(size, dim=1)
            weights[name] = (made.codes.to(torch.float32) * scales).to(weight)
            error, norm = error + made.squared_error, norm + made.squared_norm
        return weights, error / norm if norm else 0.0

    def divergence(self, unit: Unit, option: Option, weights: dict[str, torch.Tensor]) -> float:
        """Mean KL(16 bit || with this unit quantised), nats per token, at least 0."""
        import torch

        with self._skipping(unit.layer), self._replaced(weights), self._rounding_inputs(unit, option):
            found = self._predict()
        kld = (self._expected.exp() * (self._expected - found)).sum(-1)
        return max(0.0, float(kld.mean(dtype=torch.float64)))

    @contextlib.contextmanager
    def _replaced(self, weights: dict[str, torch.Tensor]) -> Iterator[None]:
        kept = {name: self._modules[name].weight.data for name in weights}
        for name, weight in weights.items():
            self._modules[name].weight.data = weight
        try:
            yield
        finally:
            for name, weight in kept.items():
                self._modules[name].weight.data = weight

    @contextlib.contextmanager
    def _rounding_inputs(self, unit: Unit, option: Option) -> Iterator[None]:
        given = option.input_activations
        hook = _rounding_hook(Codes(given.num_bits, given.type == "float")) if given is not None else None
        handles = [self._modules[name].register_forward_pre_hook(hook) for name in unit.modules if hook is not None]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def _skipping(self, layer: int) -> Iterator[None]:
        """Layers before `layer` answer with what they answered in 16 bit: nothing in them has changed."""
        skipped = list(zip(self._layers, self._outputs, strict=False))[: max(0, layer)]
        for module, output in skipped:
            module.forward = _answering(output)
        try:
            yield
        finally:
            for module, _ in skipped:
                del module.forward


def _answering(output: Any) -> Callable[..., Any]:
    return lambda *_, **__: output


def _rounding_hook(codes: Codes) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    """Round the input of a matrix per token, symmetrically, as the dynamic schemes do."""

    def hook(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        value = inputs[0].float()
        largest = value.abs().amax(-1, keepdim=True).clamp(min=1e-8)
        scale = largest / codes.high
        return ((codes.round(value / scale) * scale).to(inputs[0]), *inputs[1:])

    return hook


def _layers(model: Any) -> list[Any]:
    """The decoder layers, in order: the longest list of modules called "layers" or "h"."""
    import torch

    lists = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and name.rpartition(".")[2] in ("layers", "h", "blocks")
    ]
    return list(max(lists, key=len, default=[]))
