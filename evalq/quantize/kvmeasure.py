"""Largest keys and values per layer, as they would be cached, over calibration text. Runs as a process of its own:

    python -m evalq.quantize.kvmeasure CHECKPOINT OUT.json

so that the model's memory, on a GPU too, is given back when it ends. Keys are taken from transformers' own cache, after the
rotary embedding, which is what an engine stores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

WINDOW = 1024  # tokens of one sequence
CALIBRATION_FILE = "calibration.jsonl"
TEXTS = 64  # of them; a scale is a maximum, and more text hardly moves it


def calibration_text() -> list[str]:
    """The texts that evalq brings along for this; none of them is in an evaluation set."""
    file = resources.files("evalq.data") / "embedded" / CALIBRATION_FILE
    return [str(json.loads(line)["text"]) for line in file.read_text(encoding="utf-8").splitlines()[:TEXTS]]


def measure(checkpoint: Path, texts: list[str]) -> dict[str, Any]:
    """{"tokens", "k": largest |key| by layer, "v": largest |value| by layer}. Errors: ValueError for an unknown cache."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").to(device).eval()
    keys: list[float] = []
    values: list[float] = []
    tokens = 0
    with torch.inference_mode():
        for ids in sequences(tokenizer, texts):
            cache = model(torch.tensor([ids], device=device), use_cache=True).past_key_values
            layers = list(cache_layers(cache))
            keys = keys or [0.0] * len(layers)
            values = values or [0.0] * len(layers)
            for number, (key, value) in enumerate(layers):
                keys[number] = max(keys[number], float(key.abs().max()))
                values[number] = max(values[number], float(value.abs().max()))
            tokens += len(ids)
    return {"tokens": tokens, "k": keys, "v": values}


def sequences(tokenizer: Any, texts: list[str]) -> Iterator[list[int]]:
    """Every text by itself, and all of them one after the other in windows: short and long contexts."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    stream = [token for ids in encoded for token in ids]
    parts = [stream[i : i + WINDOW - 1] for i in range(0, len(stream), WINDOW - 1)]
    for ids in [*encoded, *parts]:
        if ids:
            yield [int(start), *ids][:WINDOW]


def cache_layers(cache: Any) -> Iterator[tuple[Any, Any]]:
    """(keys, values) of each layer of a transformers cache, whatever its version calls them."""
    if hasattr(cache, "layers"):
        for layer in cache.layers:
            yield layer.keys, layer.values
    elif hasattr(cache, "key_cache"):
        yield from zip(cache.key_cache, cache.value_cache, strict=True)
    else:
        raise ValueError(f"the model keeps its keys and values in a {type(cache).__name__}, which evalq cannot read")


def main(arguments: list[str]) -> int:
    found = measure(Path(arguments[0]), calibration_text())
    Path(arguments[1]).write_text(json.dumps(found, allow_nan=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
