"""The verbs plan and explain: output, exit codes, and what they must not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evalq.cli import explain as explain_verb
from evalq.cli.plan import main

HEAVY = ("vllm", "torch", "hydra", "omegaconf", "pandas", "mlflow", "lm_eval", "datasets", "transformers", "pyarrow",
         "numpy", "scipy", "rich")  # fmt: skip


def test_one_cell(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["+model=llama3.1-405b", "+quant=fp8-weights-kv", "+gpu=mi325x"]
    assert main([*overrides, "--context", "32768", "--concurrency", "1000"]) == 0
    text = capsys.readouterr().out
    assert "feasible on 8 GPUs, TP 8" in text
    assert "258,048 B on all GPUs" in text
    assert "1,000 requests" in text


def test_a_refused_cell_ends_with_4_and_names_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+model=llama3-8b", "+quant=fp8-kv", "+gpu=a100-80g"]) == 4
    assert "fp8-kv-device" in capsys.readouterr().out


def test_matrix_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["+model=llama3-8b,llama3-70b", "+quant=baseline,fp8-kv", "+gpu=h200,a100-80g"]
    assert main(overrides) == 0
    assert len(capsys.readouterr().out.strip().splitlines()) == 2 + 8
    assert main([*overrides, "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert len(cells) == 8
    assert {cell["gpu"] for cell in cells} == {"h200", "a100-80g"}
    assert all(isinstance(cell["predicted"]["weight_bytes"], int) for cell in cells)


def test_any_config_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 4096}
        )
    )  # fmt: skip
    for where in (folder, folder / "config.json"):
        assert main(["--config", str(where), "+gpu=l4", "--json"]) == 0
        cell = json.loads(capsys.readouterr().out)[0]
        assert cell["model"] == "mine"
        assert cell["command"]["argv"][2] == str(folder)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["+gpu=h200"], "no model is named"),
        (["+model=llama3-9b"], "did you mean llama3-8b"),
        (["+model=llama3-8b", "--config", "x.json"], "both name a model"),
        (["--config", "absent.json"], "no model config at absent.json"),
        (["+model=llama3-8b", "--context", "0"], "--context=0 must be 1 or more"),
        (["+model=llama3-8b", "+gpu=h200", "gpu.memory_utilization=1.5"], "at most 1"),
        (["+model=llama3-8b", "+gpu=h200", "gate.conditions=[faster]"], "'faster' is not a condition"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_emit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+model=deepseek-v3.2", "+gpu=mi325x", "--emit", "vllm"]) == 0
    out = capsys.readouterr().out
    assert "AITER_ENABLE_VSKIP=0 vllm serve deepseek-ai/DeepSeek-V3.2" in out
    assert main(["+model=llama3-8b", "+quant=fp8-kv", "+gpu=a100-80g", "--emit", "vllm"]) == 4
    refused = capsys.readouterr().out.strip()
    assert all(line.startswith("#") for line in refused.splitlines())  # nothing that a shell would run


def test_claims_and_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--claims"]) == 0
    assert "819 GB" in capsys.readouterr().out
    assert main(["--rules"]) == 0
    assert "mla-block-size" in capsys.readouterr().out


def test_explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain_verb.main(["MXFP4 is not available on your device"]) == 0
    assert "mxfp4-device" in capsys.readouterr().out
    assert explain_verb.main(["error:", "unrecognized", "arguments:", "--swap-space", "16"]) == 0
    assert "retired-flag" in capsys.readouterr().out
    assert explain_verb.main(["nothing of the kind"]) == 2
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("CUDA out of memory"))
    assert explain_verb.main([]) == 0
    assert "out-of-memory" in capsys.readouterr().out


def test_planning_imports_nothing_heavy() -> None:
    code = (
        "import sys, io, contextlib\n"
        "from evalq.cli.plan import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    main(['+model=llama3-8b', '+quant=w4a16', '+gpu=h200'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_whole_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+model=all", "+quant=all", "+gpu=all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 500
