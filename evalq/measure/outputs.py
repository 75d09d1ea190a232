"""Outputs of a cell for people to read: greedy, with the model's own chat template where it has one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalq.errors import MeasurementError
from evalq.records import write_text

if TYPE_CHECKING:
    from evalq.measure.engine import Engine, Progress

OUTPUTS_FILE = "outputs.json"


@dataclass(frozen=True)
class Output:
    """What was written to one prompt."""

    prompt: str
    text: str
    tokens: int
    finished: str  # "stop" or "length"


def write_outputs(
    engine: Engine, prompts: Sequence[str], output_tokens: int, work: Path, progress: Progress | None
) -> None:
    """Generate, and keep outputs.json in `work`."""
    if engine.tokenizer is None:
        raise MeasurementError("a model with random weights writes nothing to review; use real weights", "checkpoint")
    ids = [prompt_ids(engine.tokenizer, prompt) for prompt in prompts]
    answers, _ = engine.generate(ids, output_tokens, progress=progress)
    outputs = [
        Output(
            prompt, str(answer.outputs[0].text), len(answer.outputs[0].token_ids), str(answer.outputs[0].finish_reason)
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    data = {"chat_template": _has_template(engine.tokenizer), "outputs": [asdict(output) for output in outputs]}
    write_text(work / OUTPUTS_FILE, json.dumps(data, ensure_ascii=False) + "\n")


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a request in the model's own chat form, or of the plain text where the model has none."""
    if not _has_template(tokenizer):
        return [int(token) for token in tokenizer.encode(prompt)]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))
