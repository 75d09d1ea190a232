"""Rules about shapes: parallelism against heads, layers and experts; groups, packing and blocks against each layer."""

from __future__ import annotations

from collections.abc import Iterator

from evalq.facts.modules import Module
from evalq.facts.schemes import PACK_BITS, VISION_NAME, Assigned, LayerScheme, matches
from evalq.plan.memory import kv_bytes_per_token, local_kv_heads
from evalq.plan.rulebook import RULES
from evalq.plan.violation import Look, Violation, broken

FUSED_BEFORE_LAST = (".q_proj", ".k_proj", ".gate_proj")
GROUP_SIZES = (16, 32, 64, 128)


def check_parallelism(look: Look) -> Iterator[Violation]:
    """tp-heads, tp-kv-heads, kv-replicated, pp-layers, ep-experts."""
    facts, settings = look.facts, look.settings
    tp, pp = settings.tensor_parallel_size, settings.pipeline_parallel_size
    if facts.num_heads % tp:
        yield broken(RULES["tp-heads"], f"tensor_parallel_size={tp} does not divide {facts.num_heads} attention heads")
    if facts.attention == "gqa":
        yield from _check_kv_heads(look, tp)
    if pp > facts.num_layers:
        yield broken(RULES["pp-layers"], f"pipeline_parallel_size={pp} exceeds {facts.num_layers} layers")
    if settings.expert_parallel and (not facts.num_experts or facts.num_experts % tp):
        yield broken(
            RULES["ep-experts"],
            f"enable_expert_parallel over {tp} GPUs does not divide {facts.num_experts} experts",
        )


def _check_kv_heads(look: Look, tp: int) -> Iterator[Violation]:
    heads = look.facts.num_kv_heads
    if tp > heads and tp % heads == 0:
        extra = kv_bytes_per_token(look.facts, look.settings.kv_cache_dtype, tp) - kv_bytes_per_token(
            look.facts, look.settings.kv_cache_dtype
        )
        yield broken(
            RULES["kv-replicated"],
            f"tensor_parallel_size={tp} exceeds {heads} KV heads, so each head is kept {tp // heads} times: "
            f"{extra:,} more bytes per token",
        )
    elif max(tp, heads) % min(tp, heads):
        yield broken(RULES["tp-kv-heads"], f"tensor_parallel_size={tp} and {heads} KV heads do not divide one another")


def check_layers(look: Look) -> Iterator[Violation]:
    """group-divides, pack-divides, block-divides: the first layer of each kind that breaks one, by name."""
    if next(check_scheme(look), None) is not None:
        return  # a scheme that does not apply has no shapes worth naming
    seen: set[tuple[str, str]] = set()
    for module, scheme in look.assigned:
        if scheme is None or len(module.shape) != 2:
            continue
        for violation in _layer_problems(module, scheme, look):
            # One sentence per rule and kind of layer: the other layers would repeat it.
            if (violation.rule, module.part) not in seen:
                seen.add((violation.rule, module.part))
                yield violation


def _layer_problems(module: Module, scheme: LayerScheme, look: Look) -> Iterator[Violation]:
    tp = 1 if module.part == "experts" and look.settings.expert_parallel else look.settings.tensor_parallel_size
    rows = module.shape[0] // tp if module.split == "rows" else module.shape[0]
    if module.split == "kv_rows":
        rows = local_kv_heads(look.facts, tp) * look.facts.head_dim
    columns = module.shape[1] // tp if module.split == "columns" else module.shape[1]
    layer = first_layer(module)
    where = f"{layer} on each of {tp} GPUs" if tp > 1 else layer
    if scheme.format == "fp8-block" and scheme.group_size:
        yield from _block_problem(rows, columns, scheme.group_size, tp, module, where)
    elif scheme.strategy == "group" and scheme.group_size and columns % scheme.group_size:
        yield broken(
            RULES["group-divides"],
            f"group_size={scheme.group_size} does not divide in_features={columns} of {where}",
            remedy=_group_advice(columns),
        )
    if scheme.format == "pack-quantized" and columns * scheme.num_bits % PACK_BITS:
        yield broken(
            RULES["pack-divides"],
            f"in_features={columns} of {where} at {scheme.num_bits} bits fills no whole 32-bit words",
        )


def _group_advice(columns: int) -> str | None:
    fitting = [str(size) for size in GROUP_SIZES if columns % size == 0]
    return f"use {' or '.join(fitting)}, or fewer GPUs" if fitting else "use strategy=channel without a group_size"


def _block_problem(rows: int, columns: int, block: int, tp: int, module: Module, where: str) -> Iterator[Violation]:
    """vLLM lets a layer end in part of a block while it is whole on one GPU; a split must fall between blocks."""
    if tp > 1 and module.split == "columns" and columns % block:
        yield broken(RULES["block-divides"], f"block {block} does not divide in_features={columns} of {where}")
    if tp > 1 and module.split in ("rows", "kv_rows") and rows % block:
        yield broken(RULES["block-divides"], f"block {block} does not divide out_features={rows} of {where}")
    if tp == 1 and rows % block and module.name.endswith(FUSED_BEFORE_LAST):
        # Several matrices are one in the engine; all but the first must start at a block.
        yield broken(RULES["block-divides"], f"block {block} does not divide out_features={rows} of {where}")


def first_layer(module: Module) -> str:
    """The name of a module's first layer, as a message shows it."""
    return module.name.replace("{layer}", str(module.layers[0]) if module.layers else "")


def check_scheme(look: Look) -> Iterator[Violation]:
    """quantised-already, target-unmatched, vision-16-bit."""
    quant, own = look.config.quant, look.facts.quantization
    if own and quant.origin in ("evalq", "engine") and not _same_as_published(look):
        method = own.get("quant_method", "unknown")
        yield broken(
            RULES["quantised-already"],
            f"the published weights are quantised already ({method}), so quant={quant.name} has nothing to round",
        )
        return
    yield from _unmatched_targets(look)
    for module, scheme in look.assigned:
        if scheme is not None and VISION_NAME.search(module.name):
            part = VISION_NAME.search(module.name)
            assert part is not None
            yield broken(
                RULES["vision-16-bit"],
                f"quant={quant.name} reaches {first_layer(module)}, a layer of the vision encoder",
                remedy=f"add 're:.*{part[2]}.*' to quant.ignore",
            )
            return


def _same_as_published(look: Look) -> bool:
    own = look.facts.quantization or {}
    return look.config.quant.origin == "engine" and look.config.quant.engine_quantization == own.get("quant_method")


def _unmatched_targets(look: Look) -> Iterator[Violation]:
    if look.config.quant.origin != "evalq":
        return
    for name, group in look.config.quant.groups.items():
        for target in group.targets:
            if target != "Linear" and not any(_hits(entry, target, name) for entry in look.assigned):
                message = f"the target {target!r} of group {name} matches no layer of {look.config.model.name}"
                yield broken(RULES["target-unmatched"], message)


def _hits(entry: Assigned, target: str, group: str) -> bool:
    return entry.scheme is not None and entry.scheme.group == group and matches(first_layer(entry.module), target)
