"""KV scales measured on a tiny random model, written into a checkpoint beside its weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from evalq.config import QuantConfig
from evalq.errors import MeasurementError
from evalq.measure.kv.scales import checkpoint_scales
from evalq.quantize import add_kv_scales, has_computed_scales, kvscales, verify_checkpoint
from evalq.quantize.kvmeasure import cache_layers, calibration_text, measure, sequences
from evalq.quantize.kvscales import measured_scales, scale_names
from evalq.quantize.tensors import checkpoint_tensors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, two KV heads of 8, and a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=256, eos_token_id=257,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own.add_special_tokens(["<s>", "</s>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )
    return folder


def test_largest_keys_are_those_of_the_cache(tiny: Path) -> None:
    """One short text: the same as a forward pass by hand."""
    found = measure(tiny, ["abc"])
    assert found["tokens"] == 8  # the text by itself, and the stream of all texts, with BOS each
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype="auto")
    ids = transformers.AutoTokenizer.from_pretrained(tiny).encode("abc", add_special_tokens=False)
    with torch.inference_mode():
        cache = model(torch.tensor([[256, *ids]]), use_cache=True).past_key_values
    for number, (key, value) in enumerate(cache_layers(cache)):
        assert found["k"][number] == pytest.approx(float(key.abs().max()))
        assert found["v"][number] == pytest.approx(float(value.abs().max()))


def test_caches_of_older_libraries_are_read_and_unknown_ones_refused() -> None:
    class Old:
        key_cache = [1, 2]  # noqa: RUF012
        value_cache = [3, 4]  # noqa: RUF012

    assert list(cache_layers(Old())) == [(1, 3), (2, 4)]
    with pytest.raises(ValueError, match="object"):
        list(cache_layers(object()))


def test_checkpoint_holds_weights_and_scales(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = measured_scales(tiny)
    monkeypatch.setattr(kvscales, "measured_scales", lambda source: scales)
    made = add_kv_scales(tiny, tiny, tmp_path)
    verify_checkpoint(made)
    before, after = checkpoint_tensors(tiny), checkpoint_tensors(made)
    assert set(after) - set(before) == {f"model.layers.{i}.self_attn.{x}_scale" for i in (0, 1) for x in "kv"}
    for name, info in before.items():
        assert bytes(info.read()) == bytes(after[name].read())
    stored = checkpoint_scales(made)
    for layer in (0, 1):
        assert stored[layer] == {"k": pytest.approx(scales["k"][layer]), "v": pytest.approx(scales["v"][layer])}
    own = json.loads((made / "config.json").read_text())["quantization_config"]
    assert own["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    assert own["config_groups"] == {}
    assert "model.layers.0.self_attn.k_proj" in own["ignore"]
    report = json.loads((made / "quantization_report.json").read_text())["kv_scales"]
    assert report["layers"]["model.layers.1.self_attn"]["k_scale"] == pytest.approx(scales["k"][1])
    assert report["tokens"] > 1000
    stamp = (made / "config.json").stat().st_mtime_ns
    assert add_kv_scales(tiny, tiny, tmp_path) == made
    assert (made / "config.json").stat().st_mtime_ns == stamp, "found, not made again"


def test_models_that_cannot_be_measured_are_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeasurementError, match="has 2 attention layers with a k_proj and the model cached 3"):
        scale_names(tiny, 3)
    broken = tmp_path / "broken"
    broken.mkdir()
    monkeypatch.setattr(kvscales, "MEASURE", [sys.executable, "-c", "import sys; sys.exit('no such model')"])
    with pytest.raises(MeasurementError, match="could not be measured"):
        measured_scales(broken)
    with pytest.raises(MeasurementError, match="all 0 or not finite"):
        kvscales._scales(broken, [1.0, 0.0])


def test_text_is_enough() -> None:
    assert sum(len(text.split()) for text in calibration_text()) > 1000


def test_sequences_are_short_and_long() -> None:
    class Letters:
        bos_token_id, eos_token_id = None, 9

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1] * len(text)

    found = [len(ids) for ids in sequences(Letters(), ["a" * 10, "b" * 2000, ""])]
    assert found == [11, 1024, 1024, 988]


def test_which_schemes_ask_for_it() -> None:
    assert has_computed_scales(QuantConfig(kv_scale_source="computed"))
    assert not has_computed_scales(QuantConfig(kv_scale_source="checkpoint"))
