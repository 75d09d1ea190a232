"""One real engine answers many questions: `python engine_checks.py MODELS_FOLDER` prints one line of JSON.

Every answer is a list of sums of log-probabilities (nats), one per document of wikitext or per item and ending of hellaswag.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
WINDOW = 256
DOCUMENTS, ITEMS = 4, 4


def lm_evals_own(engine: Any) -> Any:
    """lm-eval's own vLLM model class on our engine. It asks for the version of a distribution vllm, which the CPU build is not."""
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.32.0" if name == "vllm" else real(name)
    from lm_eval.api.model import LM
    from lm_eval.models.vllm_causallms import VLLM

    own = VLLM.__new__(VLLM)
    LM.__init__(own)
    own.model, own.tokenizer = engine._llm, engine.tokenizer
    own._max_length = WINDOW + 1  # it keeps one token for generation
    own.batch_size, own.data_parallel_size = "auto", 1
    own.add_bos_token, own.custom_prefix_token_id = False, None
    own.lora_request, own.enable_thinking = None, False
    return own


def sums(results: dict[str, Any], task: str) -> list[float]:
    """lm-eval's samples as numbers: the sum of a document, or those of an item's endings."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    if task == "wikitext":
        return [sample["word_perplexity"][0] for sample in samples]
    return [float(answer[0]) for sample in samples for answer in sample["filtered_resps"]]


def main(models: str) -> None:
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from evalq.app import compose
    from evalq.measure.data import find_sources, task_overrides
    from evalq.measure.engine import Engine
    from evalq.quantize import source_checkpoint

    config = compose(["+model=smollm2-135m", "+quant=baseline", "gpu=cpu", "gpu.cpu_kv_cache_gib=1", "tasks=smoke"])
    source = source_checkpoint(config.model, Path(models))
    engine = Engine.start(config, source, WINDOW, is_cpu=True)
    from evalq.measure.tasks import EngineLM, load_tasks, run_tasks

    overrides = {name: task_overrides(s, config.data) for name, s in find_sources(config).items()}
    tasks = load_tasks({name: overrides[name] for name in ("wikitext", "hellaswag")})
    counts: dict[str, list[int]] = {}

    def ask(task: str, limit: int, model: Any = None, **settings: Any) -> list[float]:
        lm = model or EngineLM(engine, config.model.bos, WINDOW, WINDOW, **settings)
        results, _ = run_tasks(lm, {task: tasks[task]}, limit)
        if model is None and lm.documents:
            counts["tokens"] = [sum(len(w.ids) for w in lm.documents[task, i]) for i in range(limit)]
            counts["windows"] = [len(lm.documents[task, i]) for i in range(limit)]
        return sums(results, task)

    answers: dict[str, Any] = {"scorer": engine.scorer}
    for task, limit in (("wikitext", DOCUMENTS), ("hellaswag", ITEMS)):
        answers[task] = {
            "forward": ask(task, limit),
            "reverse": ask(task, limit, reverse=True),
            "smaller batches": [ask(task, 1)[0], ask(task, 2)[1]] if task == "wikitext" else [],
        }
        if task == "hellaswag":
            answers[task]["shared"] = ask(task, limit, share_prefixes=True)
        engine.scorer = "prompt_logprobs"
        answers[task]["prompt_logprobs"] = ask(task, limit)
        engine.scorer = "hook"
        answers[task]["lm-eval"] = ask(task, limit, lm_evals_own(engine))
    from evalq.measure.outputs import write_outputs

    write_outputs(engine, ["What is the capital of France?", "Count to three."], 12, Path(models), None)
    answers["outputs"] = json.loads((Path(models) / "outputs.json").read_text())
    applied = engine.describe()[0]
    answers |= counts | {"settings": engine.settings(), "kv": applied["kv_cache"], "scales": applied["kv_scales"]}
    answers["engine"] = dataclasses.asdict(config.engine)
    engine.close()
    events.write(json.dumps(answers) + "\n")
    events.close()


if __name__ == "__main__":
    main(sys.argv[1])
