"""The last verdicts of a search: which candidates, in which order, on documents that nothing has seen, noted and judged."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evalq.config import GateConfig
from evalq.errors import EXIT_INCONCLUSIVE, EXIT_MEASUREMENT, EXIT_QUALITY_FAIL
from evalq.judge.policy import flat_policy
from evalq.judge.repeated import LEAST_LEVEL, confidence_at, level
from evalq.preparation import Prepared
from evalq.report.progress import QuietWatcher
from evalq.search.candidates import Candidate
from evalq.search.kept import PASSED, KeptDocuments, kept_documents, used_up
from evalq.search.proof import Bench, Proof


def kept_place(cell: Prepared, weights: str) -> Path:
    """Where the last verdicts of a checkpoint (by its weights, whatever it is called) on a device are noted."""
    named = hashlib.sha256(f"{weights} {cell.device}".encode()).hexdigest()[:32]
    return cell.places.root / "search" / "kept" / f"{named}.json"


def tell_earlier(kept: KeptDocuments, bench: Bench, watcher: QuietWatcher) -> None:
    """Say at the start what a further series of last verdicts on these documents will be held to.

    Errors: ConfigError when the documents are used up.
    """
    earlier = kept.on_same(bench.kept_items())
    if not earlier:
        return
    part = level([one.passed for one in earlier])
    if part < LEAST_LEVEL:
        raise used_up(len(earlier))
    watcher.say(
        f"the documents kept for the last verdict have given {len(earlier)} series of last verdicts; another search than "
        f"theirs is judged at {100 * confidence_at(bench.config.gate.confidence, part):.10g} %"
    )


def final_order(passing: list[Candidate], rungs: list[Candidate], proofs: dict[str, Proof]) -> list[Candidate]:
    """In which order candidates are judged on the kept documents: from gentle to small.

    The second cheapest that passed and the cheapest, then those below it that passed with a warning. Fixed by the search's
    documents alone, so that going on only after a pass needs no correction (fixed-sequence procedure, Maurer, Hothorn and
    Lehmacher 1995).
    """
    least = min((one.cost for one in passing), default=math.inf)
    warned = [one for one in rungs if one.cost < least and one.name in proofs and proofs[one.name].status == PASSED]
    return [*reversed(passing[:2]), *sorted(warned, key=lambda one: -one.cost)]


@dataclass
class Last:
    """What the last verdicts said. `best`: the last of the order that passed."""

    exit_code: int
    status: str
    best: Candidate | None = None
    proofs: list[Proof] = field(default_factory=list)
    number: int = 0  # which series of last verdicts on these documents, from 1
    confidence: float | None = None  # of the interval of `best`; without one, of the first


def judge_last(bench: Bench, kept_file: Path, order: list[Candidate], tried: Sequence[Proof]) -> Last:
    """Judge on documents that nothing has seen, candidate after candidate while each passes; the last that did is the answer.

    tried: what the search's own documents said of each candidate, for the ending of a search that has nothing to judge.
    """
    last = Last(*_without_a_pass(tried))
    if not order:
        return last
    bench.watcher.stage("final", "last verdicts on the kept documents")
    with kept_documents(kept_file, bench.watcher.progress) as kept:
        keys = [bench.candidate_key(one.quant) for one in order]
        series = kept.open(keys, bench.kept_items(), gate_hash(bench.config.gate))
        last.number = kept.number(series)
        for one in order:
            bench.watcher.say(f"final verdict of {one.name} on {bench.split.final} documents kept for it")
            proof, verdict = bench.verdict(one.quant, kept, series)
            last.proofs.append(proof)
            found = (verdict.exit_code, verdict.status) if verdict else (EXIT_MEASUREMENT, proof.status)
            if verdict is not None and (last.best is None or found == (0, PASSED)):
                last.confidence = float(str(verdict.policy["confidence"]))
            if found != (0, PASSED):
                if last.best is None:
                    last.exit_code, last.status = found
                return last
            last.best, (last.exit_code, last.status) = one, found
    return last


def _without_a_pass(tried: Sequence[Proof]) -> tuple[int, str]:
    """How a search ends that has nothing for a last verdict. Candidates that could not be measured say nothing of quality."""
    found = {proof.status for proof in tried}
    if found & {"INCONCLUSIVE", "SUSPECT"}:
        return EXIT_INCONCLUSIVE, "INCONCLUSIVE"
    if found and found <= {"FAILED", "INVALID"}:
        return EXIT_MEASUREMENT, "INVALID"
    return EXIT_QUALITY_FAIL, "FAIL"


def gate_hash(gate: GateConfig) -> str:
    """Which rules a verdict was by."""
    return hashlib.sha256(json.dumps(flat_policy(gate), sort_keys=True).encode()).hexdigest()[:16]
