"""Is the exact divergence exact? evalq's figures from the engine against float64 over transformers' full logits.

    python jobs/bench/divergence_exact.py --out reports/divergence-exact.md

A baseline (SmolLM2-135M) and a candidate (its linear layers rounded to 4 bit in groups of 64 and written back as a dense
checkpoint, so that both programs compute the very same model) score the same tokens, in float32 in both programs. evalq keeps
the baseline's hidden states in one engine and compares in another, as in a real run; transformers computes the logits of both
models, and numpy the divergence from them in float64. Three processes, one after the other; about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

WINDOW = 512


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2044, help="scored tokens (default 2044: 4 windows of 1 + 511)")
    parser.add_argument("--dtype", default="float32", help="of the engine and of transformers (default float32)")
    parser.add_argument("--out", type=Path, help="Markdown file; the table is printed all the same")
    parser.add_argument("--role", choices=("keep", "compare"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        return engine_role(arguments)
    with tempfile.TemporaryDirectory(prefix="evalq-exact-") as temporary:
        arguments.folder = Path(temporary)
        text = compare(arguments)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 0


def compare(arguments: argparse.Namespace) -> str:
    folder = arguments.folder
    make_models(folder, arguments.tokens)
    for role in ("keep", "compare"):
        command = [sys.executable, __file__, "--role", role, "--folder", str(folder), "--dtype", arguments.dtype]
        subprocess.run(command, check=True, stdout=sys.stderr)
    found = dict(np.load(folder / "found.npz"))
    exact = reference(folder, arguments.dtype)
    lines = [
        "# Exact divergence against float64 over full logits",
        "",
        f"{time.strftime('%Y-%m-%d')}. {versions()}. SmolLM2-135M against itself with linear layers rounded to 4 bit, "
        f"{len(exact['kld']):,} tokens in windows of {WINDOW}, {arguments.dtype} in both programs.",
        "",
        f"    python jobs/bench/divergence_exact.py {' '.join(sys.argv[1:])}",
        "",
        "| figure, nats | evalq, mean | float64, mean | difference of means | mean abs. difference | largest |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, label in (
        ("kld", "KL(baseline, candidate)"),
        ("reverse_kld", "KL(candidate, baseline)"),
        ("base_entropy", "entropy of the baseline"),
        ("logprob", "log-probability of the token (candidate)"),
    ):
        mine, theirs = found[name].astype(np.float64), exact[name]
        apart = mine - theirs
        lines.append(
            f"| {label} | {mine.mean():.6f} | {theirs.mean():.6f} | {apart.mean():+.2e} | {np.abs(apart).mean():.2e} | "
            f"{np.abs(apart).max():.2e} |"
        )
    same = float((found["top1_id"] == exact["top1_id"]).mean())
    return "\n".join([*lines, "", f"Same first choice: {100 * same:.3f} % of tokens.", ""])


def make_models(folder: Path, tokens: int) -> None:
    """Both checkpoints and the token ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from evalq.app import compose
    from evalq.quantize import source_checkpoint

    config = compose(["+model=smollm2-135m", "+quant=baseline", "gpu=cpu"])
    source = source_checkpoint(config.model, folder / "models")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source)
    for name in ("base", "candidate"):
        if name == "candidate":
            for layer in model.model.layers.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.weight.data = rounded(layer.weight.data)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    text = " ".join(json.loads(line)["page"] for line in documents())
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: tokens + tokens // (WINDOW - 1)]
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
    (folder / "windows.json").write_text(json.dumps(windows), encoding="utf-8")


def documents() -> list[str]:
    import os

    root = Path(os.environ.get("EVALQ_DATA", "../shared/data"))
    return (root / "wikitext2" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:4]


def rounded(weight: Any) -> Any:
    """To 4 bit, symmetric, groups of 64 along a row, and back."""
    groups = weight.float().reshape(weight.shape[0], -1, 64)
    scale = groups.abs().amax(dim=-1, keepdim=True) / 7
    return ((groups / scale).round().clamp(-8, 7) * scale).reshape(weight.shape).to(weight.dtype)


def engine_role(arguments: argparse.Namespace) -> int:
    """One engine: keep the baseline's hidden states, or compare the candidate with them."""
    from evalq.app import compose
    from evalq.facts.gpus import detect
    from evalq.measure.divergence import ExactDivergence
    from evalq.measure.engine import Engine
    from evalq.measure.scores import ScoreRequest

    comparing = arguments.role == "compare"
    is_cpu = detect() == "cpu"
    own = ["gpu=cpu", "gpu.cpu_kv_cache_gib=1"] if is_cpu else ["gpu.memory_utilization=0.3"]
    config = compose(["+model=smollm2-135m", "+quant=baseline", "engine=eager", f"model.dtype={arguments.dtype}", *own])
    config.quant.kv_cache_dtype = "auto"
    checkpoint = arguments.folder / ("candidate" if comparing else "base")
    engine = Engine.start(config, checkpoint, WINDOW, is_cpu)
    requests = [ScoreRequest(ids, 1) for ids in json.loads((arguments.folder / "windows.json").read_text())]
    part = ExactDivergence(arguments.folder / "store", comparing, 1 << 30, arguments.folder / "base", print)
    results = engine.score(requests, hidden=part.begin(engine, requests))
    part.finish(engine)
    if part.note:
        raise SystemExit(part.note)
    if comparing:
        divergences = [result.divergence for result in results]
        names = ("kld", "reverse_kld", "base_entropy")
        found = {name: np.concatenate([getattr(one, name) for one in divergences]) for name in names}
        found["logprob"] = np.concatenate([result.logprobs for result in results])
        found["top1_id"] = np.concatenate([result.top1_ids for result in results])
        np.savez(arguments.folder / "found.npz", **found)
    engine.close()
    return 0


def reference(folder: Path, dtype: str) -> dict[str, Any]:
    """The same figures in float64 from transformers' logits."""
    import torch
    from transformers import AutoModelForCausalLM

    windows = torch.tensor(json.loads((folder / "windows.json").read_text()))
    logs = []
    for name in ("base", "candidate"):
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=getattr(torch, dtype))
        with torch.no_grad():
            logits = torch.cat([model(one[None]).logits[:, :-1] for one in windows])
        logs.append(logits.double().log_softmax(-1).reshape(-1, logits.shape[-1]))
    p, q = logs
    targets = windows[:, 1:].reshape(-1)
    found = {
        "kld": (p.exp() * (p - q)).sum(-1),
        "reverse_kld": (q.exp() * (q - p)).sum(-1),
        "base_entropy": -(p.exp() * p).sum(-1),
        "logprob": q.gather(1, targets[:, None]).squeeze(1),
        "top1_id": q.argmax(-1),
    }
    return {name: value.numpy() for name, value in found.items()}


def versions() -> str:
    import torch
    import transformers

    from evalq.measure.environment import engine_version

    return (
        f"vllm {engine_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )


if __name__ == "__main__":
    sys.exit(main())
