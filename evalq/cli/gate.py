"""`evalq gate`: judge a candidate record against a baseline record."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from evalq.cli.judging import add_arguments, disagreement, judged
from evalq.config import GateConfig
from evalq.errors import EXIT_MEASUREMENT, ConfigError, RecordError
from evalq.judge.gate import contradiction, no_verdict
from evalq.judge.seal import SEAL_SUFFIX, seal, seal_key, why_unsealed
from evalq.records import VERDICT_FILE, Verdict, read_verdict, to_json, write_text

FORMATS = ("text", "json", "junit", "markdown")
JUNIT_FILE = "junit.xml"
MARKDOWN_FILE = "verdict.md"
EPILOG = """\
exit codes: 0 pass, 1 quality fail, 2 usage or config, 3 inconclusive or suspect, 5 nothing measured that can be judged.
Only 0 releases. Behind a pipe the exit code is lost: use --out DIR, then in the next step the same command with
--verdict DIR instead of --out DIR: it judges again and ends 0 only when that gives the verdict that lies in DIR.
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of `evalq gate`."""
    made = argparse.ArgumentParser(
        prog="evalq gate", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(made)
    made.add_argument("--format", choices=FORMATS, default="text", help="what is printed (default: text)")
    made.add_argument("--out", metavar="DIR", help=f"folder for {VERDICT_FILE}, {JUNIT_FILE} and {MARKDOWN_FILE}")
    made.add_argument(
        "--verdict",
        metavar="DIR",
        help=f"check {VERDICT_FILE} of an earlier --out: with --baseline and --candidate by judging again, else only "
        "for contradictions and its seal",
    )
    return made


def main(argv: list[str]) -> int:
    """Judge, print, write; returns the verdict's exit code."""
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as end:
        if end.code:  # a mistyped flag is a failed step too: the next one must not read an earlier verdict
            _forget_verdict(argv)
        raise
    if arguments.verdict and arguments.verdict.strip():
        return _from_file(arguments)
    try:
        return _judge_and_write(arguments)
    except OSError as error:  # a full or read-only disk says nothing about quality
        print(f"evalq gate: {error.filename or 'output'} cannot be written ({error.strerror})", file=sys.stderr)
        return EXIT_MEASUREMENT


def _forget_verdict(argv: list[str]) -> None:
    """Remove the verdict under --out of arguments that cannot be parsed as a whole."""
    only_out = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    only_out.add_argument("--out")
    with contextlib.suppress(argparse.ArgumentError, SystemExit, OSError):
        folder = only_out.parse_known_args(argv)[0].out
        if folder:
            _forget(Path(folder))


def _forget(folder: Path) -> None:
    """Remove what an earlier gate left, so that a step that reads it after a crash finds nothing, or an error."""
    (folder / VERDICT_FILE).unlink(missing_ok=True)
    (folder / VERDICT_FILE).with_suffix(SEAL_SUFFIX).unlink(missing_ok=True)
    if (folder / JUNIT_FILE).exists() or (folder / MARKDOWN_FILE).exists():
        _write_reports(folder, no_verdict(["the gate did not finish"], GateConfig()))


def _write_reports(folder: Path, verdict: Verdict) -> None:
    from evalq.report.junit import verdict_junit
    from evalq.report.markdown import verdict_markdown

    write_text(folder / JUNIT_FILE, verdict_junit(verdict))
    write_text(folder / MARKDOWN_FILE, verdict_markdown(verdict))


def _judge_and_write(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.out) if arguments.out and arguments.out.strip() else None
    if folder is not None:
        (folder / VERDICT_FILE).unlink(missing_ok=True)
        # A CI system that finds no JUnit file, or an empty one, may show green: an error lies there until there is more.
        _write_reports(folder, no_verdict(["the gate did not finish"], GateConfig()))
    verdict = judged(arguments).verdict
    if folder is not None:
        _write_reports(folder, verdict)
        write_text(folder / VERDICT_FILE, to_json(verdict) + "\n")
        _seal(folder)
    show(verdict, arguments.format)
    return verdict.exit_code


def _seal(folder: Path) -> None:
    with contextlib.suppress(ConfigError):  # a key that is too short: the verdict says so itself
        key = seal_key()
        if key is not None:
            seal(folder, key, VERDICT_FILE)


def _why_forged(folder: Path) -> str | None:
    """Why a verdict that is read alone, without its records, is not believed."""
    key = seal_key()
    if key is None:
        text = (
            "no seal and no record was checked; give --baseline and --candidate to judge again, or set EVALQ_SEAL_KEY"
        )
        print(f"evalq gate: warning: {text}", file=sys.stderr)
        return None
    return why_unsealed(folder if folder.is_dir() else folder.parent, key, VERDICT_FILE)


def _from_file(arguments: argparse.Namespace) -> int:
    try:
        verdict = read_verdict(arguments.verdict)
    except RecordError as error:
        print(f"evalq gate: {error}", file=sys.stderr)
        return EXIT_MEASUREMENT
    problem = contradiction(verdict)
    alone = not (arguments.baseline or arguments.candidate)
    if problem is None and alone:
        problem = _why_forged(Path(arguments.verdict))
    if problem is None and not alone:
        stored, verdict = verdict, judged(arguments).verdict
        problem = disagreement(stored, verdict)
        if problem is not None:
            show(verdict, "text")
    if problem:
        print(
            f"evalq gate: the verdict in {arguments.verdict} is damaged, was edited or is of another run: {problem}",
            file=sys.stderr,
        )
        return EXIT_MEASUREMENT
    show(verdict, arguments.format)
    return verdict.exit_code


def show(verdict: Verdict, form: str) -> None:
    """Print a verdict; as JSON it is the last line."""
    if form == "markdown":
        from evalq.report.markdown import verdict_markdown

        print(verdict_markdown(verdict))
    elif form == "junit":
        from evalq.report.junit import verdict_junit

        print(verdict_junit(verdict))
    else:
        from evalq.report.tables import verdict_json, verdict_text

        print(
            verdict_json(verdict)
            if form == "json"
            else verdict_text(verdict, colour=bool(sys.stdout and sys.stdout.isatty()))
        )
