"""Parameters by part: against transformers on the meta device, against published totals, and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalq.config import ModelConfig
from evalq.errors import ConfigError
from evalq.facts.confdir import conf_dir, names
from evalq.facts.models import facts_of, model_facts, read_config

SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}


def arch(name: str) -> dict[str, Any]:
    data = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    return dict(data["arch"])


def test_small_llama_by_hand() -> None:
    # attention per layer: q 8x8, k and v 4x8, o 8x8 = 192; mlp 3 x 16 x 8 = 384; norms 2 x 8
    parts = model_facts(SMALL_LLAMA).parameters_by_part()
    assert parts == {"attention": 384, "mlp": 768, "embeddings": 80, "head": 80, "norms": 40}


def test_tied_head_counts_once() -> None:
    tied = model_facts({**SMALL_LLAMA, "tie_word_embeddings": True})
    assert "head" not in tied.parameters_by_part()
    # The head's products are done all the same.
    assert tied.active_parameters() == model_facts(SMALL_LLAMA).active_parameters()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
    ],
)
def test_published_totals_exact(name: str, parameters: int) -> None:
    assert model_facts(arch(name)).parameters() == parameters


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [("deepseek-v3.2", 671, 37), ("kimi-k2.5", 1027, 32), ("qwen3-vl-235b", 235, 22)],
)
def test_published_totals_rounded(name: str, billions: float, active_billions: float) -> None:
    facts = model_facts(arch(name))
    assert facts.parameters() / 1e9 == pytest.approx(billions, rel=0.005)
    assert facts.active_parameters() / 1e9 == pytest.approx(active_billions, rel=0.03)


def _meta_count(model_class: Any, config: Any) -> int:
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        model = model_class(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


SYNTHETIC = {
    "Qwen3MoeForCausalLM": {
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "num_experts": 6,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [1], "tie_word_embeddings": False,
    },
    "DeepseekV3ForCausalLM": {
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 100, "n_routed_experts": 8, "n_group": 2,
        "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 24,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "tie_word_embeddings": False,
    },
    "Qwen2ForCausalLM": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": True,
    },
    "Qwen3ForCausalLM": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100, "tie_word_embeddings": False,
    },
    "MistralForCausalLM": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": False,
    },
    "GptOssForCausalLM": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "num_local_experts": 4, "num_experts_per_tok": 2,
        "attention_bias": True, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", list(SYNTHETIC))
def test_meta_device_count_of_written_config(architecture: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = SYNTHETIC[architecture]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"architectures": [architecture], **settings}))
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    counted = _meta_count(getattr(transformers, architecture), config_class(**settings))
    assert model_facts(read_config(tmp_path)).parameters() == counted


@pytest.mark.parametrize("name", ["smollm2-135m", "llama3-8b", "llama3-70b", "llama3.1-405b"])
def test_meta_device_count_of_llama(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**arch(name))
    assert model_facts(arch(name)).parameters() == _meta_count(transformers.LlamaForCausalLM, config)


def test_meta_device_count_of_the_mixtures() -> None:
    pytest.importorskip("transformers")
    deepseek = pytest.importorskip("transformers.models.deepseek_v32")
    qwen = pytest.importorskip("transformers.models.qwen3_vl_moe")
    for name, model_class, config_class in (
        ("deepseek-v3.2", deepseek.DeepseekV32ForCausalLM, deepseek.DeepseekV32Config),
        ("qwen3-vl-235b", qwen.Qwen3VLMoeForConditionalGeneration, qwen.Qwen3VLMoeConfig),
    ):
        settings = arch(name)
        settings.pop("quantization_config", None)
        assert model_facts(arch(name)).parameters() == _meta_count(model_class, config_class(**settings)), name


def test_meta_device_count_of_kimi() -> None:
    kimi = pytest.importorskip("transformers.models.kimi_k25")
    settings = arch("kimi-k2.5")
    text, vision = dict(settings["text_config"]), settings["vision_config"]
    text.pop("quantization_config")
    config = kimi.Kimi_K25Config(
        text_config=text,
        vision_config={
            "patch_size": vision["patch_size"],
            "num_attention_heads": vision["vt_num_attention_heads"],
            "num_hidden_layers": vision["vt_num_hidden_layers"],
            "hidden_size": vision["vt_hidden_size"],
            "intermediate_size": vision["vt_intermediate_size"],
        },
        tie_word_embeddings=False,
    )
    assert model_facts(settings).parameters() == _meta_count(kimi.Kimi_K25ForConditionalGeneration, config)


def test_every_configured_model_has_facts() -> None:
    assert len(names("model")) >= 7
    for name in names("model"):
        facts = model_facts(arch(name))
        assert sum(facts.parameters_by_part().values()) == facts.parameters()


def test_attention_kinds() -> None:
    kinds = {name: model_facts(arch(name)).attention for name in names("model")}
    assert kinds["llama3-8b"] == "gqa"
    assert kinds["kimi-k2.5"] == "mla"
    assert kinds["deepseek-v3.2"] == "sparse-mla"


def test_sliding_windows_by_layer() -> None:
    facts = model_facts({**SMALL_LLAMA, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]})
    assert facts.windows == (4, None)
    assert model_facts({**SMALL_LLAMA, "sliding_window": 4, "use_sliding_window": False}).windows == (None, None)


def test_unknown_architecture_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean LlamaForCausalLM"):
        model_facts({**SMALL_LLAMA, "architectures": ["LamaForCausalLM"]})


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        model_facts({key: value for key, value in SMALL_LLAMA.items() if key != "vocab_size"})


def test_broken_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model config"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="mapping"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_facts_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    model = ModelConfig(name="mine", source="path", path=str(tmp_path), bos="always")
    assert facts_of(model).parameters() == model_facts(SMALL_LLAMA).parameters()
