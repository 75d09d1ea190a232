"""KV cache dtypes that the installed engine offers, read from its source text; the engine itself is never imported.

vLLM names them in `CacheDType` of vllm/config/cache.py; each attention backend lists what it takes in
`supported_kv_cache_dtypes`. A device offers what any of its backends takes; the engine may still refuse for a model.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from evalq.config import KV_DTYPES
from evalq.errors import InfeasibleError

BACKENDS = "v1/attention/backends"
CPU_BACKENDS = ("cpu_attn.py",)


def engine_folder() -> Path | None:
    """The installed vllm package; None when there is none."""
    found = importlib.util.find_spec("vllm")
    places = list(found.submodule_search_locations or []) if found else []
    return Path(places[0]) if places else None


@lru_cache(maxsize=4)
def offered_by_engine(folder: Path) -> tuple[str, ...]:
    """The engine's own choices for its argument kv_cache_dtype; empty when its source cannot be read."""
    for node in _assignments(folder / "config" / "cache.py"):
        if _target(node) == "CacheDType" and node.value is not None:
            return tuple(_strings(node.value))
    return ()


@lru_cache(maxsize=8)
def offered_on_device(folder: Path, is_cpu: bool) -> tuple[str, ...]:
    """What at least one attention backend of the device takes; empty when no backend says."""
    found: dict[str, None] = {}
    for file in sorted((folder / BACKENDS).rglob("*.py")):
        if is_cpu == (file.name in CPU_BACKENDS):
            for node in _assignments(file):
                if _target(node) == "supported_kv_cache_dtypes" and node.value is not None:
                    found.update(dict.fromkeys(_strings(node.value)))
    return tuple(found)


def require_offered(dtype: str, model_dtype: str, is_cpu: bool) -> None:
    """Refuse a KV dtype that the installed engine does not offer here. Errors: InfeasibleError.

    Without an installed engine, or with one whose source says nothing, there is nothing to refuse by. A dtype equal to the
    model's own is what backends call "auto".
    """
    folder = engine_folder()
    if folder is None:
        return
    choices = offered_by_engine(folder)
    if choices and dtype not in choices:
        raise InfeasibleError(
            f"kv_cache_dtype={dtype} is not offered by the installed engine; it offers {', '.join(usable(choices))}"
        )
    here = offered_on_device(folder, is_cpu)
    if here and dtype not in here and dtype != model_dtype:
        where = "the CPU engine" if is_cpu else "a GPU"
        raise InfeasibleError(
            f"kv_cache_dtype={dtype} is taken by none of the installed engine's attention backends for {where}; "
            f"they take {', '.join(usable(here))}"
        )


def usable(choices: tuple[str, ...]) -> list[str]:
    """Of the engine's choices those that a scheme of evalq can name."""
    return [name for name in choices if name in KV_DTYPES]


def _assignments(file: Path) -> Iterator[ast.Assign | ast.AnnAssign]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            yield node


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def _strings(node: ast.AST) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
