"""Which layer gets what: a scheme's groups matched against the tensors of a checkpoint, checked before any rounding."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from evalq.config import QuantArgs, QuantConfig, QuantGroup, needs_calibration
from evalq.errors import ConfigError
from evalq.facts.schemes import matches
from evalq.quantize.tensors import TensorInfo

FLOAT_DTYPES = ("BF16", "F16", "F32")
EMBEDDING_NAMES = ("wte", "wpe", "embeddings", "embedding")
# Modules that vLLM fuses into one matrix, which therefore have one scheme.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
VISION_PART = re.compile(
    r"(^|\.)(visual|vision_\w+|vision|image_\w+|vit|audio_\w+|mm_projector|multi_modal_projector)(\.|$)"
)
EXPERT = re.compile(r"^(.*\.experts)\.\d+\.")
TRANSPOSED_MODELS = ("gpt2", "openai-gpt")  # their matrices are stored (in, out), unlike a Linear's (out, in)
GROUP_SIZES = (32, 64, 128)
PACKED_BITS = (4, 8)  # 3 does not divide 32, and vLLM and compressed-tensors lay it out differently


@dataclass(frozen=True)
class Layer:
    """A matrix that is rounded. `module` is its name without ".weight"."""

    module: str
    info: TensorInfo
    group: str
    scheme: QuantGroup

    @property
    def weights(self) -> QuantArgs:
        assert self.scheme.weights is not None  # checked by evalq.config_check.check
        return self.scheme.weights


def linear_modules(tensors: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    """Modules with a weight matrix that are no embedding, by name: what "Linear" means without building the model."""
    return {
        info.name.removesuffix(".weight"): info
        for info in tensors
        if info.name.endswith(".weight") and len(info.shape) == 2 and not _is_embedding(info.name)
    }


def _is_embedding(tensor: str) -> bool:
    leaf = tensor.removesuffix(".weight").rpartition(".")[2]
    return "embed" in leaf or leaf in EMBEDDING_NAMES


def assign_layers(tensors: dict[str, TensorInfo], config: dict[str, Any], quant: QuantConfig) -> dict[str, Layer]:
    """The matrices to round, by module name. Errors: one ConfigError listing every problem of scheme and model."""
    check_scheme(quant)
    problems = _source_problems(tensors, config, quant)
    if problems:
        raise ConfigError(*problems)
    modules = linear_modules(tensors.values())
    chosen, problems = _choose(modules, quant)
    layers = {name: Layer(name, modules[name], group, quant.groups[group]) for name, group in chosen.items()}
    problems += [
        *_unmatched(modules, layers, quant),
        *_vision_problems(layers),
        *_fused_problems(modules, layers),
        *_shape_problems(layers),
    ]
    if problems:
        raise ConfigError(*problems)
    return layers


def check_scheme(quant: QuantConfig) -> None:
    """Whether evalq can make this scheme at all, whatever the model. Errors: ConfigError listing every problem."""
    if quant.origin != "evalq" or not quant.groups:
        raise ConfigError(
            f"quant {quant.name} has origin={quant.origin} and no checkpoint to make; use a scheme with origin=evalq"
        )
    problems = _args_problems(quant)
    if problems:
        raise ConfigError(*problems)


def _source_problems(tensors: dict[str, TensorInfo], config: dict[str, Any], quant: QuantConfig) -> list[str]:
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        return [f"the source checkpoint is quantised already ({method}); give its 16-bit original as model.path"]
    if config.get("model_type") in TRANSPOSED_MODELS:
        return [f"model_type={config['model_type']} stores its matrices transposed, which evalq does not round"]
    stacked = [
        t.name for t in tensors.values() if len(t.shape) == 3 and ".experts" in t.name and not _ignored(t.name, quant)
    ]
    if stacked and any("Linear" in group.targets for group in quant.groups.values()):
        return [
            f"{stacked[0]} holds all experts in one 3-dimensional tensor, which evalq does not round; "
            "use quant.origin=engine quant.engine_quantization=fp8, or add it to quant.ignore"
        ]
    return []


def _args_problems(quant: QuantConfig) -> list[str]:
    """What can be made: by llm-compressor where calibration text is read, else by evalq's own rounding."""
    return _calibrated_problems(quant) if needs_calibration(quant) else _rounded_problems(quant)


def _calibrated_problems(quant: QuantConfig) -> list[str]:
    """Packed int weights, symmetric or not; int8 and E4M3 weights with dynamic or (E4M3) static activations."""
    problems: list[str] = []
    for name, group in quant.groups.items():
        weights, inputs, where = group.weights, group.input_activations, f"quant.groups.{name}"
        if weights is None or weights.dynamic:
            problems.append(f"{where}.weights must be given, with dynamic=false")
            continue
        packed = weights.type == "int" and inputs is None
        bits = PACKED_BITS if packed else (8,)
        if weights.num_bits not in bits:
            problems.append(
                f"{where}.weights.num_bits={weights.num_bits}: allowed here {_either(list(map(str, bits)))}"
            )
        if not packed and not weights.symmetric:
            problems.append(
                f"{where}.weights.symmetric=false has kernels for packed int weights only; use symmetric=true"
            )
        strategies = ("channel", "group") if packed else ("tensor", "channel")
        if weights.strategy not in strategies:
            problems.append(f"{where}.weights.strategy={weights.strategy}: allowed here {', '.join(strategies)}")
        if inputs is None:
            continue
        static = not inputs.dynamic
        wanted = ("float", 8, "tensor") if static else (weights.type, 8, "token")
        if (inputs.type, inputs.num_bits, inputs.strategy) != wanted or inputs.type != weights.type:
            problems.append(
                f"{where}.input_activations must be 8 bit, of the weights' type, with strategy=token and dynamic=true, or "
                "(float) strategy=tensor and dynamic=false"
            )
    return problems


def _rounded_problems(quant: QuantConfig) -> list[str]:
    """What evalq rounds: int weights (channel, group; 8 bit with int8 activations), E4M3 weights (tensor, channel)."""
    problems: list[str] = []
    for name, group in quant.groups.items():
        weights, inputs, where = group.weights, group.input_activations, f"quant.groups.{name}"
        if weights is None:
            problems.append(f"{where} has no weights; leave the group out to keep its layers at 16 bit")
            continue
        if not weights.symmetric or weights.dynamic:
            problems.append(f"{where}.weights must have symmetric=true and dynamic=false; evalq uses no zero points")
        allowed = ("channel", "group") if weights.type == "int" and inputs is None else ("tensor", "channel")
        if weights.strategy not in allowed:
            problems.append(
                f"{where}.weights.strategy={weights.strategy} cannot be made; allowed: {', '.join(allowed)}"
            )
        bits = PACKED_BITS if weights.type == "int" and inputs is None else (8,)
        if weights.num_bits not in bits:
            problems.append(
                f"{where}.weights.num_bits={weights.num_bits} cannot be made with type={weights.type} and these "
                f"activations; allowed: {_either([str(b) for b in bits])}"
            )
        if inputs is not None and (inputs.type, inputs.num_bits, inputs.strategy, inputs.dynamic, inputs.symmetric) != (
            weights.type, 8, "token", True, True,
        ):  # fmt: skip
            problems.append(
                f"{where}.input_activations must be 8 bit, of type {weights.type}, strategy=token, dynamic=true and "
                "symmetric=true; others need quant.method=gptq, awq, smoothquant or autoround"
            )
    return problems


def _ignored(module: str, quant: QuantConfig) -> bool:
    return any(matches(module, pattern) for pattern in quant.ignore)


def _choose(modules: dict[str, TensorInfo], quant: QuantConfig) -> tuple[dict[str, str], list[str]]:
    """Module -> group. A name or pattern goes before the class Linear, as in compressed-tensors and vLLM."""
    chosen, problems = {}, []
    for module in modules:
        if _ignored(module, quant):
            continue
        named = [g for g, group in quant.groups.items() if any(matches(module, t) for t in group.targets)]
        by_class = [g for g, group in quant.groups.items() if "Linear" in group.targets]
        candidates = named or by_class
        if len(candidates) > 1:
            problems.append(f"{module} is a target of the groups {' and '.join(candidates)}; let only one match it")
        if candidates:
            chosen[module] = candidates[0]
    return chosen, problems[:1]


def module_kinds(modules: Iterable[str]) -> list[str]:
    """Module names with layer numbers replaced by *, each once."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", module) for module in modules))


def _unmatched(modules: dict[str, TensorInfo], layers: dict[str, Layer], quant: QuantConfig) -> list[str]:
    problems = []
    for name, group in quant.groups.items():
        for target in group.targets:
            hit = (target == "Linear" and any(layer.group == name for layer in layers.values())) or any(
                layer.group == name and matches(module, target) for module, layer in layers.items()
            )
            if not hit:
                problems.append(
                    f"quant.groups.{name}: the target {target!r} matches no layer; the nearest are "
                    f"{', '.join(_nearest_kinds(target, module_kinds(modules)))}"
                )
    return problems


def _nearest_kinds(target: str, kinds: list[str]) -> list[str]:
    plain = re.sub(r"[^A-Za-z0-9_.|]", "", target.removeprefix("re:")).split("|")[0]

    def likeness(kind: str) -> float:
        return max(
            difflib.SequenceMatcher(None, plain, kind).ratio(),
            difflib.SequenceMatcher(None, plain.rpartition(".")[2], kind.rpartition(".")[2]).ratio(),
        )

    return sorted(kinds, key=likeness, reverse=True)[:3] or ["(the checkpoint has no Linear layer)"]


def _vision_problems(layers: dict[str, Layer]) -> list[str]:
    for module, layer in layers.items():
        found = VISION_PART.search(module)
        if found:
            return [
                f"quant.groups.{layer.group} reaches the layer {module} of a vision or audio encoder, which stays "
                f"16 bit; add 're:.*{found[2]}.*' to quant.ignore"
            ]
    return []


def _describe(layer: Layer | None) -> str:
    return f"group {layer.group}" if layer is not None else "16 bit"


def _fused_problems(modules: dict[str, TensorInfo], layers: dict[str, Layer]) -> list[str]:
    """The first pair of modules that vLLM fuses and that would get different schemes."""
    families: dict[str, list[str]] = {}
    for module in modules:
        prefix, _, leaf = module.rpartition(".")
        for family in FUSED:
            if leaf in family:
                families.setdefault(f"{prefix}:{family[0]}", []).append(module)
        expert = EXPERT.match(module)
        if expert:
            families.setdefault(f"{expert[1]}:experts", []).append(module)
    for members in families.values():
        first = members[0]
        for other in members[1:]:
            groups = [layers[name].group if name in layers else None for name in (first, other)]
            if groups[0] != groups[1]:
                return [
                    f"{first} ({_describe(layers.get(first))}) and {other} ({_describe(layers.get(other))}) are one "
                    "matrix in vLLM and must share a scheme; put both in one group or leave both out"
                ]
    return []


def _either(choices: list[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)


def _shape_problems(layers: dict[str, Layer]) -> list[str]:
    problems: dict[tuple[str, int], str] = {}
    for module, layer in layers.items():
        size, columns = layer.weights.group_size, layer.info.shape[1]
        if layer.info.dtype not in FLOAT_DTYPES:
            return [f"{module} is stored as {layer.info.dtype}; give a checkpoint in bfloat16, float16 or float32"]
        if size is None or columns % size == 0:
            continue
        fitting = [str(s) for s in GROUP_SIZES if columns % s == 0]
        advice = f"use {_either(fitting)}" if fitting else "use strategy=channel without a group_size"
        problems.setdefault(
            (layer.group, columns),
            f"group_size={size} does not divide in_features={columns} ({module}, quant.groups.{layer.group}); {advice}",
        )
    return list(problems.values())
