"""Calibrated checkpoints around a stand-in for llm-compressor's program: whole or not at all, checked, recorded."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import int4, int8, mixed, scheme

from evalq.config import CalibrationConfig, ModelConfig, QuantArgs, QuantConfig, QuantGroup
from evalq.errors import ConfigError, EvalqError, MeasurementError
from evalq.quantize import calibrated, make_checkpoint, verify_checkpoint
from evalq.quantize.calibrated import Order, calibration_of, make_calibrated
from evalq.quantize.calibration import CalibrationText
from evalq.quantize.compressor import awq_mappings, windows
from evalq.quantize.scheme import check_scheme

# Acts as compressor.py: copies a prepared checkpoint, or fails as told.
PROGRAM = """
import json, pathlib, shutil, sys
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
plan = json.loads(pathlib.Path(__file__).with_name("plan.json").read_text())
print(json.dumps({"event": "progress", "done": 1, "total": 3, "stage": "calibrating layer group 2"}), flush=True)
if plan["act"] == "die":
    sys.exit(3)
if plan["act"] == "fail":
    print(json.dumps({"event": "failure", "message": plan["message"]}), flush=True)
    sys.exit(1)
for file in pathlib.Path(plan["made"]).glob("*.safetensors"):
    shutil.copy(file, job["output"])
(pathlib.Path(job["output"]) / "recipe.yaml").write_text("of the library")
print(json.dumps({"event": "done", "windows": job["samples"], "tokens": 9, "device": "cpu", "seconds": 1.5,
                  "versions": {"llmcompressor": "0.14"}}), flush=True)
"""


@pytest.fixture
def act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """act(act="ok", made=folder, ...): what the stand-in does next."""
    program = tmp_path / "program" / "compressor.py"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    monkeypatch.setattr(calibrated, "PROGRAM", program)
    monkeypatch.setattr(calibrated, "isolated_python", lambda root, progress: Path(sys.executable))

    def plan(act: str = "ok", **values: Any) -> None:
        (program.parent / "plan.json").write_text(json.dumps({"act": act, **values}))

    return plan


def order(source: Path, quant: QuantConfig, method: str = "gptq", **changes: Any) -> Order:
    given = CalibrationConfig(domain="tests", samples=2, length_tokens=8, **changes)
    text = CalibrationText(("one two", "three"), "tests.jsonl")
    return Order(source, dataclasses.replace(quant, method=method), ModelConfig(name="tiny", bos="never"), given, text)


def test_made_checked_recorded_and_found_again(tiny: Path, tmp_path: Path, act: Any) -> None:
    act(made=str(make_checkpoint(tiny, mixed(), tmp_path / "rtn")))
    told: list[str] = []
    wanted = order(tiny, mixed())
    made = make_calibrated(wanted, tmp_path / "out", tmp_path / "env", lambda done, total, stage: told.append(stage))
    verify_checkpoint(made)
    assert "calibrating layer group 2" in told
    assert not (made / "recipe.yaml").exists()
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["format"] == "mixed-precision"
    assert config["hidden_size"] == 64
    record = calibration_of(made)
    assert record is not None
    assert (record.method, record.domain, record.samples, record.seed) == ("gptq", "tests", 2, 0)
    act("die")
    assert make_calibrated(wanted, tmp_path / "out", tmp_path / "env") == made
    assert calibration_of(make_checkpoint(tiny, mixed(), tmp_path / "rtn")) is None


def test_method_text_and_settings_are_in_the_name(tiny: Path, tmp_path: Path, act: Any) -> None:
    act(made=str(make_checkpoint(tiny, mixed(), tmp_path / "rtn")))
    wanted = [
        order(tiny, mixed()),
        order(tiny, mixed(), "awq"),
        order(tiny, mixed(), seed=1),
        order(tiny, mixed(), options={"dampening_frac": 0.1}),
        dataclasses.replace(order(tiny, mixed()), text=CalibrationText(("other",), "tests.jsonl")),
        order(tiny, mixed(), batch_size=64),  # memory and speed only
    ]
    made = [make_calibrated(each, tmp_path / "out", tmp_path / "env") for each in wanted]
    assert len(set(made)) == 5
    assert made[0] == made[5]


@pytest.mark.parametrize(
    ("plan", "error", "said"),
    [
        ({"act": "die"}, MeasurementError, "its process ended with exit code 3"),
        (
            {"act": "fail", "message": "RuntimeError: no"},
            MeasurementError,
            "quant.method=gptq .RuntimeError: no.; its output is in",
        ),
        (
            {"act": "fail", "message": "ValueError: the text fills 1; set calibration.samples=1"},
            ConfigError,
            "the text fills 1",
        ),
    ],
)
def test_failures_are_one_sentence_and_leave_nothing(
    tiny: Path, tmp_path: Path, act: Any, plan: dict[str, str], error: type[EvalqError], said: str
) -> None:
    act(**plan)
    with pytest.raises(error, match=said):
        make_calibrated(order(tiny, mixed()), tmp_path / "out", tmp_path / "env")
    assert [file for file in (tmp_path / "out").iterdir() if file.is_dir()] == []


def test_a_checkpoint_of_another_scheme_is_refused(tiny: Path, tmp_path: Path, act: Any) -> None:
    act(made=str(make_checkpoint(tiny, int8(), tmp_path / "rtn")))
    with pytest.raises(MeasurementError, match=r"stored I8 .* as .*down_proj\.weight and the scheme mixed is BF16"):
        make_calibrated(order(tiny, mixed()), tmp_path / "out", tmp_path / "env")


def test_a_folder_of_other_things_is_not_replaced(tiny: Path, tmp_path: Path, act: Any) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    with pytest.raises(MeasurementError, match="exists and is not this checkpoint"):
        make_calibrated(order(tiny, mixed()), tmp_path / "out", tmp_path / "env", out=tmp_path / "mine")


def test_what_calibrated_methods_take() -> None:
    uneven = dataclasses.replace(int4(), symmetric=False)
    check_scheme(dataclasses.replace(scheme(linear=QuantGroup(["Linear"], uneven)), method="gptq"))
    fp8 = QuantArgs(8, "float", "channel")
    check_scheme(scheme(linear=QuantGroup(["Linear"], fp8, QuantArgs(8, "float", "tensor", dynamic=False))))
    with pytest.raises(ConfigError, match="symmetric=true"):
        check_scheme(scheme(linear=QuantGroup(["Linear"], uneven)))
    with pytest.raises(ConfigError, match="strategy=tensor and dynamic=false"):
        check_scheme(scheme(linear=QuantGroup(["Linear"], fp8, QuantArgs(8, "int", "tensor", dynamic=False))))


class Letters:
    """A tokenizer of one token per letter."""

    bos_token_id = 1

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


def test_windows_join_texts_and_start_with_bos() -> None:
    job = {"length_tokens": 4, "samples": 2, "bos": "always", "texts": ["abc", "defg"]}
    assert windows(Letters(), job) == [[1, 97, 98, 99], [1, 10, 10, 100]]
    assert windows(Letters(), {**job, "bos": "never"})[0] == [97, 98, 99, 10]
    with pytest.raises(
        ValueError, match=r"fills 3 windows of 4 tokens and calibration\.samples=9; set calibration\.samples=3"
    ):
        windows(Letters(), {**job, "samples": 9})


def test_the_program_imports_nothing_of_evalq() -> None:
    text = Path(calibrated.__file__).with_name("compressor.py").read_text()
    assert "import evalq" not in text
    assert "from evalq" not in text
    assert callable(awq_mappings)


def test_scales_that_kernels_read_as_float32_are_stored_so_whatever_was_calculated_with(tmp_path: Path) -> None:
    """On a GPU the library calculates, and stores, in 16 bit; on a CPU in 32."""
    import torch
    from safetensors.torch import load_file, save_file

    from evalq.quantize.compressor import store_as

    for calculated in (torch.bfloat16, torch.float32):
        folder = tmp_path / str(calculated)
        folder.mkdir()
        scale = torch.tensor([[0.5], [0.25]], dtype=calculated)
        tensors = {
            "a.weight": torch.ones(2, 4, dtype=torch.int8),
            "a.weight_scale": scale,
            "b.weight_packed": torch.ones(2, 1, dtype=torch.int32),
            "b.weight_scale": scale.clone(),
            "norm.weight": torch.ones(4, dtype=calculated),
        }
        save_file(tensors, str(folder / "model.safetensors"))
        (folder / "config.json").write_text("{}", encoding="utf-8")
        store_as(folder, "bfloat16", tied=False)
        found = load_file(str(folder / "model.safetensors"))
        assert {name: tensor.dtype for name, tensor in found.items()} == {
            "a.weight": torch.int8,
            "a.weight_scale": torch.float32,
            "b.weight_packed": torch.int32,
            "b.weight_scale": torch.bfloat16,
            "norm.weight": torch.bfloat16,
        }
        assert found["a.weight_scale"].tolist() == [[0.5], [0.25]]


def test_a_layer_whose_tensors_lie_in_two_files_is_known_as_packed_in_both(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from evalq.quantize.compressor import store_as

    save_file({"x.weight_packed": torch.ones(2, 1, dtype=torch.int32)}, str(tmp_path / "model-1.safetensors"))
    second = {"x.weight_scale": torch.ones(2, 1, dtype=torch.bfloat16), "layer_scale": torch.ones(2, dtype=torch.bfloat16),
              "lm_head.weight": torch.ones(2, 2, dtype=torch.bfloat16)}  # fmt: skip
    save_file(second, str(tmp_path / "model-2.safetensors"))
    where = {"x.weight_packed": "model-1.safetensors", **dict.fromkeys(second, "model-2.safetensors")}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    store_as(tmp_path, "bfloat16", tied=True)
    found = load_file(str(tmp_path / "model-2.safetensors"))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "x.weight_scale": torch.bfloat16,
        "layer_scale": torch.bfloat16,
    }
    assert "lm_head.weight" not in json.loads(index.read_text())["weight_map"]
