"""`evalq drift` with stub workers: four records, the answer, the scales, and text that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stub_worker import in_process, plan_command, starts

from evalq import drift as module
from evalq import pipeline
from evalq.cli import drift as cli
from evalq.drift import check_drift
from evalq.errors import ConfigError
from evalq.quantize.saturation import saturation, stored_scales
from evalq.report.progress import QuietWatcher

TEXT = "".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(62))


@pytest.fixture
def cells(tmp_path: Path, cell_config: Any, no_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """cells(increase) -> (config, text file): both texts measured by stubs that add this increase."""
    text = tmp_path / "new.jsonl"
    text.write_text(TEXT)

    def make(**act: Any) -> Any:
        command = plan_command(tmp_path / "stub", {"act": "record"}, w4a16={"act": "record", **act})
        monkeypatch.setattr(pipeline, "run_worker", in_process(command))
        return cell_config("w4a16"), text

    return make


def test_four_records_and_an_answer(cells: Any, tmp_path: Path) -> None:
    config, text = cells(increase=0.02)
    answer = check_drift(config, text, "text", QuietWatcher())
    assert (answer.drift.status, answer.exit_code) == ("FITS", 0)
    assert starts(tmp_path / "stub") == ["baseline", "w4a16", "baseline", "w4a16"]
    assert "nothing to recalibrate" in answer.scales_note
    assert len(set(answer.records)) == 4
    made = list((tmp_path / "root" / "drift").glob("new-*.jsonl"))
    assert json.loads(made[0].read_text().splitlines()[0]) == {"page": "text 0"}
    check_drift(config, text, "text", QuietWatcher())
    assert len(starts(tmp_path / "stub")) == 4  # all four records are used again


def test_the_command_line(cells: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config, text = cells(increase=0.02)
    monkeypatch.setattr("evalq.app.compose", lambda overrides: config)
    assert cli.main(["+model=x", "--text", str(text)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("FITS: the new text costs ")
    assert json.loads(shown.splitlines()[-1])["drift"]["status"] == "FITS"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "line 1 has no text"),
        ('{"page": "x"}', "line 1 has no text in 'text'"),
        ("no json", "cannot be read as JSON lines"),
    ],
)
def test_text_that_cannot_be_used(cells: Any, content: str, said: str) -> None:
    config, text = cells()
    text.write_text(content)
    with pytest.raises(ConfigError, match=said):
        check_drift(config, text, "text", QuietWatcher())


def test_static_scales_against_new_text(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, head_dim=64
    )
    source, made = tmp_path / "source", tmp_path / "made"
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    made.mkdir()
    tensors = load_file(source / "model.safetensors")
    wide, narrow = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
    tensors[f"{wide}.input_scale"], tensors[f"{narrow}.input_scale"] = torch.tensor([1.0]), torch.tensor([1e-9])
    save_file(tensors, made / "model.safetensors")
    scales = stored_scales(made)
    assert scales == {wide: 1.0, narrow: pytest.approx(1e-9)}
    found = {one.module: one for one in saturation(source, scales, [[1, 2, 3, 4]])}
    assert found[wide].share_beyond == 0.0
    assert 0 < found[wide].largest < found[wide].stored_range == 448.0
    assert found[narrow].share_beyond > 0.9
    assert module.EXIT_CODES["DRIFTED"] == 1
