"""Two controls of the decode-path score: an FP8 KV cache whose scales are broken must FAIL, the baseline against itself must PASS.

    python jobs/bench/kv_controls.py --folder /tmp/controls --out reports/kv-controls gpu=cpu       about 8 minutes on 2 cores
    EVALQ_DATA=../shared/data python jobs/bench/kv_controls.py --folder F --out reports/kv-controls-h200 data=local engine=eager

Writes a copy of the model with every k_scale and v_scale set to --scale (1,000: keys and values become a handful of E4M3 steps),
measures baseline, baseline again (A/A) and `fp8-kv-broken` with `kv=decode` in one command, and writes the table of
jobs/bench/kv_study.py. Ends with 0 when the first is FAIL with a decode-path check that says FAIL, and the second PASS. Whatever
else is given goes to evalq.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kv_study import compared, read_all  # noqa: E402

from evalq.app import compose  # noqa: E402
from evalq.config import GateConfig  # noqa: E402
from evalq.judge import kv  # noqa: E402
from evalq.judge.pairs import Tables, document_pairs  # noqa: E402
from evalq.judge.perplexity import perplexity_check  # noqa: E402
from evalq.judge.policy import checked_policy  # noqa: E402
from evalq.quantize import source_checkpoint  # noqa: E402
from evalq.quantize.kvscales import write_kv_scales  # noqa: E402
from evalq.quantize.tensors import read_config  # noqa: E402

MODEL = "+model=smollm2-135m"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as for python -m evalq")
    parser.add_argument("--folder", type=Path, required=True, help="gets the checkpoints and records")
    parser.add_argument("--out", type=Path, required=True, help="gets README.md")
    parser.add_argument("--scale", type=float, default=1000.0, help="every k_scale and v_scale (default 1000)")
    given = parser.parse_args()
    folder = given.folder.absolute()
    command = [sys.executable, "-m", "evalq", *words(broken(folder, given.scale)), *given.overrides]
    done = subprocess.run(command, env={**os.environ, "EVALQ_HOME": str(folder), "PYTHONPATH": str(ROOT)})
    shown = " ".join(["python -m evalq", *words(Path("BROKEN")), *given.overrides])
    study = [sys.executable, str(ROOT / "jobs/bench/kv_study.py"), str(folder / "records"), "--out", str(given.out)]
    subprocess.run([*study, "--title", "Controls of the decode-path score", "--command", shown], check=True)
    found = decode_statuses(folder / "records")
    print(json.dumps({"exit_code": done.returncode, "decode": found}))
    return 0 if done.returncode == 1 and found == {"fp8-kv-broken": "FAIL", "baseline (A/A)": "PASS"} else 1


def broken(folder: Path, scale: float) -> Path:
    """The model as it is, with KV scales that no text gives."""
    source = source_checkpoint(compose([MODEL, "+quant=baseline"]).model, folder / "models")
    layers = int(read_config(source)["num_hidden_layers"])
    target = folder / f"broken-{scale:g}"
    if not target.is_dir():
        write_kv_scales(source, {"tokens": 0, "k": [scale] * layers, "v": [scale] * layers}, target, target.name)
    return target


def words(checkpoint: Path) -> list[str]:
    return [
        MODEL, f"model.path={checkpoint}", "model.max_perplexity=1000000", "+quant=fp8-kv", "quant.name=fp8-kv-broken",
        "quant.kv_scale_source=checkpoint", "+experiment=aa", "kv=decode", "tasks=perplexity", "load=off",
        "gate.required_tasks=[wikitext]", "tracking=off",
    ]  # fmt: skip


def decode_statuses(records: Path) -> dict[str, str]:
    """What the default policy says of each candidate's decode path."""
    found = {}
    for baseline, candidate in compared(read_all(records)):
        words_of = document_pairs(*(Tables.read(*side) for side in (baseline, candidate)), "wikitext")
        decode = kv.as_documents(kv.path_pairs(baseline, candidate, "decode"), words_of)
        record = candidate[0]
        name = "baseline (A/A)" if record.cell.is_baseline else record.cell.quant
        found[name] = perplexity_check(decode, checked_policy(GateConfig()), None).status
    return found


if __name__ == "__main__":
    sys.exit(main())
