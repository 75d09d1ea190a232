"""`evalq explain`: the rule behind an engine's error text."""

from __future__ import annotations

import argparse
import sys

from evalq.errors import EXIT_CONFIG, EXIT_PASS


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = argparse.ArgumentParser(
        prog="evalq explain",
        description="Which rule an engine's error means, and what to do. Text comes as arguments or on standard input.",
        epilog="Exit code 2: the text is none that evalq knows.",
    )
    made.add_argument("text", nargs="*", help='the error text, e.g. "MXFP4 is not available on your device"')
    return made


def main(argv: list[str]) -> int:
    """Run the verb; returns the exit code."""
    # Error texts contain words such as --num-scheduler-steps, which are no arguments of this verb.
    arguments = parser().parse_args(argv if argv[:1] in (["-h"], ["--help"]) else ["--", *argv])
    text = " ".join(arguments.text) or sys.stdin.read()
    from evalq.plan.feasibility import explain

    answers = explain(text)
    if not answers:
        print("no rule is known for this text; `evalq plan --rules` lists them all", file=sys.stderr)
        return EXIT_CONFIG
    for answer in answers:
        print(f"{answer.rule}: {answer.message}\n  do: {answer.remedy}\n  source: {answer.source}")
    return EXIT_PASS
