"""Predicted checkpoint bytes against checkpoints that evalq made: every scheme, tensor bytes exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evalq.config import RunConfig
from evalq.facts.models import facts_of, model_facts, read_config
from evalq.plan.compose import compose, parse
from evalq.plan.memory import checkpoint_bytes, tensor_bytes

SCHEMES = ("fp8-weights", "int8-w8a8", "mixed-4-8", "w4a16")
ARCH = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}


def cell(*overrides: str) -> RunConfig:
    request = parse(list(overrides))
    return compose(request, request.cells()[0])


def file_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-like checkpoint with random bfloat16 weights, written by the safetensors library."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder = tmp_path_factory.mktemp("source")
    tensors = {}
    for module in model_facts(ARCH).modules:
        for layer in module.layers or (0,):
            name = module.name.replace("{layer}", str(layer))
            tensors[f"{name}.weight"] = torch.randn(*module.shape).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(ARCH))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def test_the_16_bit_source(tiny_source: Path) -> None:
    from evalq.quantize.tensors import checkpoint_tensors

    facts, quant = model_facts(read_config(tiny_source)), cell("quant=baseline").quant
    assert sum(info.nbytes for info in checkpoint_tensors(tiny_source).values()) == tensor_bytes(facts, quant)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_made_checkpoints_to_the_byte(scheme: str, tiny_source: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from evalq.quantize import make_checkpoint
    from evalq.quantize.tensors import checkpoint_tensors

    quant = cell(f"quant={scheme}", "quant.clip_search=false").quant
    made = make_checkpoint(tiny_source, quant, tmp_path)
    facts, tensors = model_facts(ARCH), checkpoint_tensors(made)
    assert sum(info.nbytes for info in tensors.values()) == tensor_bytes(facts, quant)
    header = file_bytes(made) - tensor_bytes(facts, quant)
    predicted_header = checkpoint_bytes(facts, quant) - tensor_bytes(facts, quant)
    assert abs(predicted_header - header) / len(tensors) < 16


@pytest.mark.engine
def test_smollm2_within_a_tenth_of_a_percent(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from evalq.quantize import make_checkpoint, source_checkpoint

    model = cell("model=smollm2-135m").model
    source = source_checkpoint(model, tmp_path / "models")
    facts = facts_of(model)
    assert checkpoint_bytes(facts, cell("quant=baseline").quant) == pytest.approx(file_bytes(source), rel=0.001)
    for scheme in SCHEMES:
        quant = cell(f"quant={scheme}", "quant.clip_search=false").quant
        made = make_checkpoint(source, quant, tmp_path / "checkpoints")
        assert checkpoint_bytes(facts, quant) == pytest.approx(file_bytes(made), rel=0.001), scheme
