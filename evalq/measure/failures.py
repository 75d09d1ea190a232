"""From what an engine says when it fails to one plain sentence and a kind."""

from __future__ import annotations

import re
import traceback

from evalq.errors import EvalqError, InfeasibleError, MeasurementError
from evalq.plan.feasibility import explain

# (pattern, kind, what to do); the first match in the whole chain of causes decides.
KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"no available memory for the cache blocks|larger than the available kv cache memory|"
        r"not enough kv cache|maximum number of tokens that can be stored in kv cache|kv cache.*needed.*available",
        "no_kv_room",
        "raise gpu.memory_utilization (GPU) or gpu.cpu_kv_cache_gib (CPU), or lower engine.max_model_len",
    ),
    (
        r"out of memory|outofmemory|cannot allocate memory|bad_alloc|can't allocate memory|memoryerror|"
        r"free memory on device .* less than desired|available memory .* less than|"
        r"not enough memory|exceeds? available memory",
        "oom",
        "use fewer batched tokens (engine.max_num_batched_tokens), a smaller scheme, or more GPUs",
    ),
    (r"address already in use|port .* (busy|in use)", "port", "run it again; another program took the port"),
    (
        r"device.*busy|all cuda-capable devices are busy|exclusive",
        "port",
        "wait for the other program on this device, or choose another with CUDA_VISIBLE_DEVICES",
    ),
    (
        r"safetensor|header.*(too large|too small|invalid)|incompleteMetadata|deserializing|"
        r"no such file.*(safetensors|config\.json)|cannot find any model weights|invalid json.*config",
        "checkpoint",
        "the checkpoint is damaged; delete it and make or fetch it again",
    ),
    (r"no space left on device|disk quota", "disk", "free some space and run it again"),
    (
        r"not supported|unsupported|does not support|notimplementederror|compute capability|not available on your device|"
        r"unknown quantization|invalid kv.?cache dtype|no .* backend|assert self\.kv_cache_dtype in",
        "unsupported",
        "choose a scheme that this device and engine support; evalq plan shows which",
    ),
)


def causes(error: BaseException) -> list[BaseException]:
    """The error and everything that led to it, outermost first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def classify(error: BaseException, stage: str) -> EvalqError:
    """The evalq error for an engine's exception; unsupported schemes are infeasible, all else failed to measure."""
    if isinstance(error, EvalqError):
        return error
    text = " | ".join(f"{type(e).__name__}: {said(e)}" for e in causes(error))
    kind, remedy = classify_text(text)
    rules = explain(text)
    if rules:
        # The planner's own rule, so that an error the engine raises late reads like one that the planner raises early.
        remedy = f"rule {rules[0].rule}: {rules[0].remedy}"
    message = f"the engine failed at {stage}: {_first_line(error)}; {remedy}"
    return InfeasibleError(message) if kind == "unsupported" else MeasurementError(message, kind)


def said(error: BaseException) -> str:
    """What an error says; of an assertion without words, the line of source that failed."""
    text = str(error)
    if text or not isinstance(error, AssertionError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""


def classify_text(text: str) -> tuple[str, str]:
    """(kind, what to do) for an engine's error text; kind "engine" when it is not a known one."""
    for pattern, kind, remedy in KNOWN:
        if re.search(pattern, text, re.IGNORECASE | re.DOTALL):
            return kind, remedy
    return "engine", "read engine.log in the record folder"


def _first_line(error: BaseException, limit: int = 300) -> str:
    """The first line that says something, of the innermost cause that has one."""
    for candidate in reversed(causes(error)):
        for line in said(candidate).splitlines():
            if line.strip():
                return f"{type(candidate).__name__}: {line.strip()[:limit]}"
    return type(error).__name__
