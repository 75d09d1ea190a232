"""Was the scheme applied? Hand-made descriptions of what an engine holds, right and wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from evalq.config import EngineConfig, GpuConfig, ModelConfig, QuantArgs, QuantConfig, QuantGroup, RunConfig
from evalq.measure.applied import check_applied, kv_scale_source, linear_layers, measure_ledger, with_layer_scales

ATTENTION = QuantGroup(
    ["re:.*self_attn[.](q|k|v|o)_proj$"],
    QuantArgs(8, "int", "channel"),
    QuantArgs(8, "int", "token", dynamic=True),
)
FEED_FORWARD = QuantGroup(["re:.*mlp[.](gate|up)_proj$"], QuantArgs(4, "int", "group", 64))
FP8 = QuantGroup(["Linear"], QuantArgs(8, "float", "channel"), QuantArgs(8, "float", "token", dynamic=True))
SCHEMES = {
    "baseline": QuantConfig("baseline", kv_cache_dtype="bfloat16"),
    "fp8-kv": QuantConfig("fp8-kv", kv_cache_dtype="fp8_e4m3", kv_scale_source="default 1.0"),
    "mixed-4-8": QuantConfig(
        "mixed-4-8", "evalq", kv_cache_dtype="bfloat16", ignore=["lm_head"],
        groups={"attention": ATTENTION, "feed_forward": FEED_FORWARD},
    ),
    "fp8-weights": QuantConfig(
        "fp8-weights", "evalq", kv_cache_dtype="bfloat16", groups={"linear": FP8}, ignore=["lm_head", "re:.*[.]gate$"]
    ),
    "fp8-online": QuantConfig("fp8-online", "engine", "fp8", "bfloat16", ignore=["model.layers.0.mlp.down_proj"]),
}  # fmt: skip
# dtype of the weight of each fused layer, as each scheme stores it
HELD = {
    "baseline": {},
    "fp8-kv": {},
    "mixed-4-8": {"qkv_proj": "int8", "o_proj": "int8", "gate_up_proj": "int32"},
    "fp8-weights": dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), "float8_e4m3fn"),
    "fp8-online": dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj"), "float8_e4m3fn"),
}
SHAPES = {"qkv_proj": [960, 576], "o_proj": [576, 576], "gate_up_proj": [3072, 576], "down_proj": [576, 1536]}
BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "int32": 4}
SETTINGS: dict[str, Any] = {
    "enforce_eager": True,
    "enable_chunked_prefill": True,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
    "tensor_parallel_size": 1,
    "seed": 0,
    "dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "num_blocks": 100,
    "block_size": 32,
}


def config_of(quant: str | QuantConfig, **engine: Any) -> RunConfig:
    fixed = EngineConfig(name="cpu", max_num_seqs=64, max_num_batched_tokens=4096, enforce_eager=True)
    return RunConfig(
        model=ModelConfig(name="tiny", bos="never"),
        quant=SCHEMES[quant] if isinstance(quant, str) else quant,
        gpu=GpuConfig("cpu"),
        engine=dataclasses.replace(fixed, **engine),
    )


def rank(
    quant: str = "baseline", kv: str = "bfloat16", held: dict[str, str] | None = None, **scales: float
) -> dict[str, Any]:
    """What evalq_describe says of a one-layer model; `held` replaces the weight dtype of single layers."""
    dtypes = {**dict.fromkeys(SHAPES, "bfloat16"), **HELD[quant], **(held or {})}
    as_loaded: list[list[Any]] = [["model.embed_tokens.weight", "bfloat16", [1000, 576], 2 * 576_000]]
    layers: list[dict[str, Any]] = [
        {"name": "model.embed_tokens", "layer": "VocabParallelEmbedding", "method": "UnquantizedEmbeddingMethod", "scheme": "",
         "kernel": "", "parameters": {"weight": ["bfloat16", [1000, 576]]}},
        {"name": "lm_head", "layer": "ParallelLMHead", "method": "UnquantizedEmbeddingMethod", "scheme": "", "kernel": "",
         "parameters": {"weight": ["bfloat16", [1000, 576]]}},
        {"name": "model.layers.0.self_attn.attn", "layer": "Attention", "method": "KVMethod", "scheme": "", "kernel": "",
         "parameters": {}},
    ]  # fmt: skip
    for part, shape in SHAPES.items():
        name = f"model.layers.0.{'mlp' if 'gate' in part or 'down' in part else 'self_attn'}.{part}"
        dtype = dtypes[part]
        key = "weight_packed" if dtype == "int32" else "weight"
        stored = [shape[0], shape[1] // 8] if dtype == "int32" else shape
        as_loaded.append([f"{name}.{key}", dtype, stored, stored[0] * stored[1] * BYTES[dtype]])
        layers.append(
            {"name": name, "layer": "LinearBase", "method": "M", "scheme": "" if dtype == "bfloat16" else "S", "kernel": "",
             "parameters": {key: [dtype, stored]}}
        )  # fmt: skip
    tensor_dtype = "bfloat16" if kv == "bfloat16" else "uint8"
    size = 2 if tensor_dtype == "bfloat16" else 1
    return {
        "parameters": {"bytes_by_dtype": {"bfloat16": 7}, "tensors_by_dtype": {"bfloat16": 1}},
        "as_loaded": as_loaded,
        "packed_modules": {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]},
        "layers": layers,
        "kv_cache": {"tensors": 1, "bytes": 3200 * 384 * size, "dtypes": [tensor_dtype], "engine_dtype": kv},
        "kv_scales": {"layers": 1, "k_min": 1.0, "k_max": 1.0, "v_min": 1.0, "v_max": 1.0, "attention_backends": ["CPU_ATTN"],
                      **scales},
        "memory": {"peak_bytes": 12345, "source": "resident set"},
    }  # fmt: skip


def problems(quant: str | QuantConfig, description: dict[str, Any], **settings: Any) -> list[str]:
    applied = check_applied(config_of(quant), {**SETTINGS, **settings}, [description])
    assert applied.ok is (not applied.problems)
    return applied.problems


@pytest.mark.parametrize("name", ["baseline", "mixed-4-8", "fp8-weights", "fp8-online"])
def test_scheme_that_was_applied_is_ok(name: str) -> None:
    assert problems(name, rank(name)) == []


@pytest.mark.parametrize("effective", ["fp8_e4m3", "fp8"])
def test_fp8_kv_that_was_applied_is_ok(effective: str) -> None:
    applied = check_applied(
        config_of("fp8-kv"), {**SETTINGS, "kv_cache_dtype": effective}, [rank("fp8-kv", "fp8_e4m3")]
    )
    assert applied.problems == []
    assert applied.kv_scale_source == "default 1.0"
    assert applied.kv_dtype_requested == "fp8_e4m3"
    assert applied.kv_dtype_effective == f"{effective} (uint8)"
    assert applied.attention_backend == "CPU_ATTN"


def test_kv_dtype_that_the_engine_dropped() -> None:
    """a2: asked for fp8, and the engine reports bf16, or says fp8 and holds bf16 tensors."""
    assert problems("fp8-kv", rank("fp8-kv", "bfloat16"), kv_cache_dtype="auto") == [
        "scheme fp8-kv asks for KV dtype fp8_e4m3 and the engine reports auto",
        "scheme fp8-kv asks for KV dtype fp8_e4m3 and the KV tensors are bfloat16",
    ]
    found = problems("fp8-kv", rank("fp8-kv", "bfloat16"), kv_cache_dtype="fp8_e4m3")
    assert found == ["scheme fp8-kv asks for KV dtype fp8_e4m3 and the KV tensors are bfloat16"]


def test_baseline_on_a_quantised_cache_is_no_baseline() -> None:
    """a3: a checkpoint that brings its own kv_cache_scheme must not turn the baseline's cache into fp8."""
    found = problems("baseline", rank("baseline", "fp8_e4m3"), kv_cache_dtype="fp8_e4m3")
    assert len(found) == 2
    assert "asks for KV dtype bfloat16 and the engine reports fp8_e4m3" in found[0]


def test_engine_that_shows_no_kv_tensors_confirms_nothing() -> None:
    description = rank()
    description["kv_cache"]["dtypes"] = []
    assert problems("baseline", description) == [
        "the engine shows no KV cache tensors, so the KV dtype cannot be confirmed"
    ]


@pytest.mark.parametrize("claimed", ["checkpoint", "computed"])
def test_calibrated_scales_that_were_not_loaded(claimed: str) -> None:
    """a4: the scheme claims calibrated scales and the engine uses 1.0."""
    quant = dataclasses.replace(SCHEMES["fp8-kv"], kv_scale_source=claimed)
    found = problems(quant, rank("fp8-kv", "fp8_e4m3"), kv_cache_dtype="fp8_e4m3")
    assert found == [f"scheme fp8-kv claims KV scales from {claimed} and the engine uses default 1.0"]
    assert problems(quant, rank("fp8-kv", "fp8_e4m3", k_max=0.02), kv_cache_dtype="fp8_e4m3") == []


def test_scales_that_nobody_claimed() -> None:
    found = problems("fp8-kv", rank("fp8-kv", "fp8_e4m3", v_min=0.5), kv_cache_dtype="fp8_e4m3")
    assert found == ["scheme fp8-kv claims KV scales of 1.0 and the engine uses checkpoint"]
    silent = dataclasses.replace(SCHEMES["fp8-kv"], kv_scale_source="none")
    assert problems(silent, rank("fp8-kv", "fp8_e4m3"), kv_cache_dtype="fp8_e4m3") == [
        "scheme fp8-kv claims no KV scales and the engine uses default 1.0"
    ]


def test_random_weights_bring_random_scales_which_say_nothing_of_the_scheme() -> None:
    """Seen on a GPU: load_format=dummy filled the scales of an FP8 checkpoint with numbers below 0.001."""
    config = config_of("fp8-kv")
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, load_format="dummy"))
    settings = {**SETTINGS, "kv_cache_dtype": "fp8_e4m3", "load_format": "dummy"}
    applied = check_applied(config, settings, [rank("fp8-kv", "fp8_e4m3", v_min=-0.0007)])
    assert applied.problems == []
    answer = {"model.layers.0.self_attn.attn": {"k_scale": [-0.0007], "v_scale": [-0.0007], "kv_dtype": "fp8_e4m3",
                                                "implementation": "X", "computed_by_engine": False}}  # fmt: skip
    judged = with_layer_scales(applied, config.quant, [answer], {}, random_weights=True)
    assert (judged.problems, judged.kv_scale_source) == ([], "random (dummy weights)")
    assert not with_layer_scales(applied, config.quant, [answer], {}).ok


def test_where_scales_come_from() -> None:
    ones = {"layers": 2, "k_min": 1.0, "k_max": 1.0, "v_min": 1.0, "v_max": 1.0}
    assert kv_scale_source("bfloat16", ones) == "none"
    assert kv_scale_source("fp8_e4m3", ones) == "default 1.0"
    assert kv_scale_source("fp8_e4m3", {**ones, "k_max": 1.5}) == "checkpoint"
    assert kv_scale_source("fp8_e4m3", {"layers": 0}) == "unknown"


@pytest.mark.parametrize(
    ("scheme", "held", "words"),
    [
        ("mixed-4-8", {"qkv_proj": "bfloat16"}, "self_attn.qkv_proj holds bfloat16 weights, expected int8"),
        ("mixed-4-8", {"gate_up_proj": "bfloat16"}, "mlp.gate_up_proj holds bfloat16 weights, expected int32"),
        (
            "mixed-4-8",
            {"down_proj": "int8"},
            "mlp.down_proj holds int8 weights, expected bfloat16 or float16 or float32",
        ),
        ("fp8-weights", {"down_proj": "bfloat16"}, "mlp.down_proj holds bfloat16 weights, expected float8_e4m3fn"),
        ("baseline", {"o_proj": "int8"}, "self_attn.o_proj holds int8 weights"),
        ("fp8-online", {"o_proj": "bfloat16"}, "self_attn.o_proj holds bfloat16 weights"),
        ("fp8-online", {"down_proj": "float8_e4m3fn"}, "mlp.down_proj holds float8_e4m3fn weights"),
    ],
)
def test_weights_that_are_not_what_the_scheme_says(scheme: str, held: dict[str, str], words: str) -> None:
    (problem,) = problems(scheme, rank(scheme, held=held))
    assert problem.startswith(f"scheme {scheme} was not applied: model.layers.0.")
    assert words in problem


def test_untouched_checkpoint_names_one_layer_and_counts_the_rest() -> None:
    (problem,) = problems("fp8-weights", rank("baseline"))
    assert "qkv_proj" in problem
    assert problem.endswith("(and 3 more layers)")


def test_model_that_was_published_quantised_is_its_own_baseline() -> None:
    config = config_of("baseline")
    config.model.arch = {"quantization_config": {"quant_method": "fp8"}}
    assert check_applied(config, SETTINGS, [rank("fp8-weights")]).ok


def test_every_rank_is_looked_at() -> None:
    wrong = rank("mixed-4-8", held={"o_proj": "bfloat16"})
    applied = check_applied(config_of("mixed-4-8"), SETTINGS, [rank("mixed-4-8"), wrong])
    assert len(applied.problems) == 1
    twice = check_applied(config_of("mixed-4-8"), SETTINGS, [wrong, wrong])
    assert len(twice.problems) == 1, "told once"


def test_second_rank_with_another_kv_cache_is_found() -> None:
    applied = check_applied(
        config_of("fp8-kv"),
        {**SETTINGS, "kv_cache_dtype": "fp8_e4m3"},
        [rank("fp8-kv", "fp8_e4m3"), rank("fp8-kv", "bfloat16")],
    )
    assert not applied.ok


def test_without_as_loaded_the_layers_own_parameters_count() -> None:
    description = rank("mixed-4-8")
    description["as_loaded"] = []
    assert problems("mixed-4-8", description) == []
    wrong = rank("mixed-4-8", held={"o_proj": "bfloat16"})
    wrong["as_loaded"] = []
    assert len(problems("mixed-4-8", wrong)) == 1


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("enforce_eager", False),
        ("enable_chunked_prefill", False),
        ("max_num_seqs", 128),
        ("max_num_batched_tokens", 2048),
        ("seed", 1),
        ("dtype", "float16"),
        ("tensor_parallel_size", 2),
        ("enforce_eager", None),
    ],
)
def test_flags_that_the_engine_overrode(name: str, reported: Any) -> None:
    """a13: what was asked for and what the engine itself reports."""
    (problem,) = problems("baseline", rank(), **{name: reported})
    assert f"{name}=" in problem
    assert f"the engine reports {reported}" in problem


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("reported", [True, False])
def test_flags_agree_in_both_directions(asked: bool, reported: bool) -> None:
    config = config_of("baseline", enforce_eager=asked, enable_chunked_prefill=asked)
    settings = {**SETTINGS, "enforce_eager": reported, "enable_chunked_prefill": reported}
    assert check_applied(config, settings, [rank()]).ok is (asked == reported)


def test_block_size_is_checked_where_it_was_asked_for() -> None:
    assert check_applied(config_of("baseline"), {**SETTINGS, "block_size": 16}, [rank()]).ok
    asked = config_of("baseline", block_size=32)
    assert check_applied(asked, SETTINGS, [rank()]).ok
    assert not check_applied(asked, {**SETTINGS, "block_size": 16}, [rank()]).ok


def test_linear_layers_leave_embeddings_head_and_attention_out() -> None:
    assert [layer["name"].rpartition(".")[2] for layer in linear_layers(rank())] == list(SHAPES)


def test_kernels_and_dtypes_are_counted() -> None:
    applied = check_applied(config_of("mixed-4-8"), SETTINGS, [rank("mixed-4-8")])
    assert applied.linear_methods == {"M/S": 3, "M": 1}
    assert applied.parameter_dtypes == {"bfloat16": 2, "int8": 2, "int32": 1}


def test_ledger_by_hand() -> None:
    ledger = measure_ledger(config_of("baseline"), SETTINGS, [rank()], 999)
    weights = 2 * (576_000 + 960 * 576 + 576 * 576 + 3072 * 576 + 576 * 1536)
    assert ledger.weight_bytes == weights
    assert ledger.weight_bytes_by_dtype == {"bfloat16": weights}
    assert ledger.checkpoint_bytes == 999
    assert ledger.kv_pool_tokens == 100 * 32
    assert ledger.kv_pool_bytes == 3200 * 768
    assert ledger.kv_bytes_per_token == 768  # 2 (K and V) x 1 layer x 3 heads x 64 x 2 bytes
    assert ledger.peak_bytes == 12345
    fp8 = measure_ledger(config_of("fp8-kv"), SETTINGS, [rank("fp8-kv", "fp8_e4m3")], None)
    assert fp8.kv_bytes_per_token == 384
    assert fp8.weight_bytes == weights


def test_ledger_counts_packed_weights_as_stored() -> None:
    ledger = measure_ledger(config_of("mixed-4-8"), SETTINGS, [rank("mixed-4-8")], None)
    assert ledger.weight_bytes_by_dtype == {
        "bfloat16": 2 * (576_000 + 576 * 1536),
        "int8": 960 * 576 + 576 * 576,
        "int32": 3072 * 72 * 4,
    }


def test_ledger_sums_ranks_and_takes_the_highest_peak() -> None:
    two = [rank(), rank()]
    two[1]["memory"]["peak_bytes"] = 99999
    one, both = (measure_ledger(config_of("baseline"), SETTINGS, ranks, None) for ranks in (two[:1], two))
    assert both.weight_bytes == 2 * (one.weight_bytes or 0)
    assert both.kv_bytes_per_token == 2 * (one.kv_bytes_per_token or 0)
    assert both.peak_bytes == 99999


def test_online_scheme_is_counted_as_it_is_held_now() -> None:
    """The engine quantised after loading, so what was loaded says nothing."""
    ledger = measure_ledger(config_of("fp8-online"), SETTINGS, [rank("fp8-online")], None)
    assert ledger.weight_bytes_by_dtype == {"bfloat16": 7}


def test_ledger_without_a_pool_says_so() -> None:
    ledger = measure_ledger(config_of("baseline"), {**SETTINGS, "num_blocks": 0}, [rank()], None)
    assert ledger.kv_bytes_per_token is None
    assert ledger.kv_pool_tokens is None
