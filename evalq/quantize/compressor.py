"""The program that runs llm-compressor, in an environment of its own (evalq.quantize.isolated); imports nothing of evalq.

`python compressor.py job.json` reads a job (evalq.quantize.calibrated.job_document) and leaves a compressed-tensors
checkpoint in job["output"]. It speaks to its parent through lines of JSON on its original standard output; whatever the
libraries print goes to standard error. Its input is local: no hub is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

PACKAGES = ("llmcompressor", "auto-round", "compressed-tensors", "transformers", "torch")
SIXTEEN_BIT = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}


class Reporter:
    """Lines of JSON to the parent; at most five a second."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._last = 0.0

    def send(self, event: str, **values: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._stream.write(json.dumps({"event": event, **values}) + "\n")
            self._stream.flush()

    def progress(self, done: int, total: int, stage: str) -> None:
        now = time.monotonic()
        if now - self._last > 0.2 or done == total:
            self._last = now
            self.send("progress", done=done, total=total, stage=stage)


def main(arguments: list[str]) -> int:
    """Exit 0 only when the checkpoint is whole; a failure is told to the parent as an event."""
    _die_with_parent()
    reporter = Reporter(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # what the libraries print is no event
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        facts = calibrate(job, reporter)
    except Exception as error:
        import traceback

        traceback.print_exc()
        first_line = next(iter(str(error).splitlines()), "") or "no message"
        reporter.send("failure", message=f"{type(error).__name__}: {first_line}")
        return 1
    reporter.send("done", **facts)
    return 0


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, however it dies."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def calibrate(job: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Load, calibrate, save. Returns what the parent records: windows, tokens, device, seconds, versions."""
    began = time.monotonic()
    reporter.progress(0, 1, "loading the model")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    random.seed(job["seed"])
    torch.manual_seed(job["seed"])
    tokenizer = AutoTokenizer.from_pretrained(job["source"], local_files_only=True)
    ids = windows(tokenizer, job)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # 16-bit arithmetic loses digits in the sums over a CPU's samples, and is slower there.
    dtype = torch.float32 if device == "cpu" else getattr(torch, SIXTEEN_BIT[job["dtype"]])
    model = AutoModelForCausalLM.from_pretrained(job["source"], dtype=dtype, local_files_only=True)
    model.config.use_cache = False
    watch_layers(reporter)
    if device == "cpu":
        leave_memory_unpinned()
    run_oneshot(model, tokenizer, ids, job)
    reporter.progress(0, 1, "writing to disk")
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    model.save_pretrained(job["output"], save_compressed=True)
    store_as(Path(job["output"]), job["dtype"], tied)
    return {
        "windows": len(ids),
        "tokens": sum(len(row) for row in ids),
        "device": device,
        "seconds": round(time.monotonic() - began, 1),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def windows(tokenizer: Any, job: dict[str, Any]) -> list[list[int]]:
    """Texts joined in the given order and cut into windows of equal length; BOS first where the model wants it.

    Errors: ValueError when the text is shorter than the windows asked for.
    """
    length, wanted = int(job["length_tokens"]), int(job["samples"])
    start = [tokenizer.bos_token_id] if job["bos"] == "always" and tokenizer.bos_token_id is not None else []
    between = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    stream: list[int] = []
    for text in job["texts"]:
        stream.extend(tokenizer(text, add_special_tokens=False)["input_ids"] + between)
    each = length - len(start)
    found = [start + stream[at : at + each] for at in range(0, len(stream) - each + 1, each)][:wanted]
    if len(found) < wanted:
        raise ValueError(
            f"the calibration text fills {len(found)} windows of {length} tokens and calibration.samples={wanted}; "
            f"set calibration.samples={len(found)} or give more text"
        )
    return found


def watch_layers(reporter: Reporter) -> None:
    """Let llm-compressor's own bars report: they are named "(3/31): Calibrating". Without them only stages are shown."""
    with contextlib.suppress(ImportError, AttributeError):
        from llmcompressor.pipelines.sequential import pipeline

        shown = pipeline.tqdm

        def reporting(iterable: Any, *args: Any, **values: Any) -> Any:
            text = str(values.get("desc", ""))
            with contextlib.suppress(ValueError):
                done, total = (int(part) for part in text.partition(":")[0].strip("()").split("/"))
                reporter.progress(done - 1, total, f"calibrating layer group {done}")
            return shown(iterable, *args, **values)

        pipeline.tqdm = reporting


def leave_memory_unpinned() -> None:
    """AWQ pins its caches for the copy to an accelerator, which raises where there is none (llm-compressor 0.14)."""
    with contextlib.suppress(ImportError, AttributeError):
        from llmcompressor.pipelines.cache import IntermediatesCache

        if hasattr(IntermediatesCache, "pin_memory"):
            IntermediatesCache.pin_memory = lambda *_: None


def run_oneshot(model: Any, tokenizer: Any, ids: list[list[int]], job: dict[str, Any]) -> None:
    """llm-compressor's oneshot over the windows, layer by layer."""
    import torch
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader

    def batch(rows: list[list[int]]) -> dict[str, torch.Tensor]:
        tensor = torch.tensor(rows)
        return {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}

    loader: Any = DataLoader(ids, batch_size=int(job["batch_size"]), shuffle=False, collate_fn=batch)
    oneshot(model=model, tokenizer=tokenizer, recipe=modifiers(job, model), dataset=loader, pipeline="sequential")


def modifiers(job: dict[str, Any], model: Any) -> list[Any]:
    """The method as llm-compressor's modifiers; options of the job go to the modifier that names the method."""
    from llmcompressor.modifiers.autoround import AutoRoundModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    scheme: dict[str, Any] = {"ignore": job["ignore"]}
    if job["groups"]:
        scheme["config_groups"] = job["groups"]
    if job["kv_cache"]:
        scheme["kv_cache_scheme"] = job["kv_cache"]
    options = dict(job["options"])
    method = job["method"]
    if method == "gptq":
        return [GPTQModifier(**scheme, **options)]
    if method == "autoround":
        return [AutoRoundModifier(**scheme, **{"enable_torch_compile": False, **options})]
    if method == "awq":
        return [AWQModifier(**{"mappings": awq_mappings(model, job), **options}), QuantizationModifier(**scheme)]
    if method == "smoothquant":
        return [SmoothQuantModifier(**options), QuantizationModifier(**scheme)]
    return [QuantizationModifier(**scheme, **options)]


def awq_mappings(model: Any, job: dict[str, Any]) -> list[Any]:
    """The library's own mappings for this model, without those whose balanced layers all stay 16 bit.

    It looks for a quantised layer among balanced and smoothed ones together, and then divides by the count of the former.
    """
    from compressed_tensors.utils import match_modules_set, match_named_modules
    from llmcompressor.modifiers.transform.awq import AWQMapping, get_layer_mappings_from_model
    from torch.utils._pytree import tree_leaves

    names = {id(module): name for name, module in model.named_modules()}
    targets = [target for group in job["groups"].values() for target in group["targets"]]
    rounded = {name for name, _ in match_named_modules(model, targets, job["ignore"])}
    found = []
    for mapping in get_layer_mappings_from_model(model):
        for smooth, *balance in match_modules_set(model, (mapping.smooth_layer, *mapping.balance_layers)):
            balanced = [names[id(module)] for module in tree_leaves(balance)]
            if rounded.intersection(balanced):
                found.append(AWQMapping(names[id(smooth[0])], balanced, mapping.activation_hook_target))
    return found


def store_as(folder: Path, dtype: str, tied: bool) -> None:
    """Bring what was calculated in float32 to the model's dtype, as the source has it; a tied head is stored once.

    Scales of int8 and FP8 weights and of activations are float32, which is what kernels take: on a GPU, where the library
    calculates in 16 bit, they are stored wider without another value.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    target = getattr(torch, SIXTEEN_BIT[dtype])
    files = sorted(folder.glob("*.safetensors"))
    packed = set()
    for file in files:  # all of them first: a layer's tensors may lie in two
        with safe_open(str(file), framework="pt") as opened:
            packed |= {name.removesuffix("_packed") for name in opened.keys() if name.endswith("weight_packed")}  # noqa: SIM118
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        changed = {
            name: tensor.to(torch.float32 if _is_float32(name, packed) else target)
            if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
            else tensor
            for name, tensor in tensors.items()
            if not (tied and name == "lm_head.weight")
        }
        save_file(changed, str(file), metadata={"format": "pt"})
    for index in folder.glob("*.index.json"):
        listed = json.loads(index.read_text(encoding="utf-8"))
        if tied and listed.get("weight_map", {}).pop("lm_head.weight", None):
            index.write_text(json.dumps(listed, indent=2), encoding="utf-8")
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = dtype
    config["use_cache"] = True
    if tied:
        config["tie_word_embeddings"] = True
    config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_float32(name: str, packed: set[str]) -> bool:
    """Whether a tensor is a scale that engines read as float32; those of packed weights have the model's own dtype."""
    if not name.endswith((".weight_scale", ".input_scale", ".k_scale", ".v_scale")):
        return False
    return name.removesuffix("_scale") not in packed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
