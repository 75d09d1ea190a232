"""KV bytes per token as the CPU engine itself lays out its pool. Weights are dummies: nothing is scored.

The engine's weights are not compared here: the CPU build hands its linear layers' weights to kernels that keep them
elsewhere, so that the model's parameters are only embeddings and norms.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evalq.plan.compose import compose, parse
from evalq.plan.memory import predict_ledger

pytestmark = pytest.mark.engine

PROGRAM = """
import json, sys
from vllm import LLM
folder, dtype = sys.argv[1:3]
llm = LLM(folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", kv_cache_dtype=dtype,
          max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256, enforce_eager=True, block_size=32)
config = llm.llm_engine.vllm_config
tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
def pool(worker):
    # Layers may be views of one allocation, so storages are counted once each.
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in worker.model_runner.kv_caches}
    return sum(storages.values())
print("ANSWER " + json.dumps({"tokens": tokens, "pool": llm.collective_rpc(pool)[0]}))
"""


@pytest.mark.parametrize(("quant", "dtype"), [("baseline", "bfloat16"), ("fp8-kv", "fp8_e4m3")])
def test_pool_of_the_cpu_engine(quant: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    request = parse(["model=smollm2-135m", f"quant={quant}", "gpu=cpu", "gpu.cpu_kv_cache_gib=1"])
    config = compose(request, request.cells()[0])
    (tmp_path / "config.json").write_text(json.dumps(config.model.arch))
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
           "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), dtype], capture_output=True, text=True, env=env, timeout=400
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, done.stderr[-3000:]
    measured = json.loads(answers[0].removeprefix("ANSWER "))
    predicted = predict_ledger(config)
    assert measured["tokens"] == predicted["kv_pool_tokens"]
    assert measured["pool"] / measured["tokens"] == predicted["kv_bytes_per_token"]
