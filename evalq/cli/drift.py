"""evalq drift: does a stored checkpoint still fit, on text that it has not been judged on?"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from evalq.records import Estimate

SHOWN = 5  # layers with static scales


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="evalq drift",
        description="Score baseline and checkpoint on new text and compare what the scheme costs there with what it costs on the "
        "documents of the run (their stored records are used again); compare static activation scales with the new text's range.",
        epilog="Exit code: 0 it fits, 1 it costs more by more than gate.target, 3 the text cannot tell. Example: evalq drift "
        "+model=smollm2-135m +quant=fp8-static --text today.jsonl --column text",
    )
    result.add_argument("overrides", nargs="+", help="+model=NAME +quant=NAME and further settings, as key=value")
    result.add_argument("--text", type=Path, required=True, help="JSON lines, one document a line")
    result.add_argument("--column", default="text", help="the key of a document's text (default: text)")
    return result


def main(argv: list[str]) -> int:
    """Errors: EvalqError, for the dispatcher to print."""
    args = parser().parse_args(argv)
    from evalq.app import compose
    from evalq.drift import check_drift
    from evalq.report.progress import watcher

    config = compose(args.overrides)
    with watcher(config.progress) as shown:
        answer = check_drift(config, args.text.expanduser().absolute(), args.column, shown)
    print(f"{answer.drift.status}: {answer.drift.reason}")
    for estimate in (answer.drift.reference, answer.drift.new):
        print(f"  {_in_words(estimate)}")
    print(f"Scales: {answer.scales_note}.")
    for one in answer.scales[:SHOWN]:
        print(
            f"  {one.module}: largest input {one.largest:.4g} of a range of {one.stored_range:.4g}, "
            f"{one.share_beyond:.2e} of the values beyond"
        )
    print(json.dumps({"exit_code": answer.exit_code, **dataclasses.asdict(answer)}, allow_nan=False))
    return answer.exit_code


def _in_words(estimate: Estimate) -> str:
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return f"{estimate.name}: too large to be a number"
    return f"{estimate.name}: {estimate.value:+.3%} [{estimate.low:+.3%}, {estimate.high:+.3%}], {estimate.n} documents"
