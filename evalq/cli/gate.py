"""`evalq gate`: judge a candidate record against a baseline record."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from pathlib import Path

from evalq.cli.locate import find_record, records_root
from evalq.config import GateConfig
from evalq.errors import EXIT_MEASUREMENT, ConfigError, EvalqError, RecordError
from evalq.judge.floor import read_floor
from evalq.judge.gate import contradiction, judge, no_verdict
from evalq.judge.policy import checked_policy, read_policy
from evalq.records import VERDICT_FILE, Verdict, read_verdict, to_json, write_text

FORMATS = ("text", "json", "junit", "markdown")
EPILOG = """\
exit codes: 0 pass, 1 quality fail, 2 usage or config, 3 inconclusive or suspect, 5 nothing measured that can be judged.
Only 0 releases. Behind a pipe the exit code is lost: use --out DIR, then `evalq gate --verdict DIR` in the next step.
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of `evalq gate`."""
    made = argparse.ArgumentParser(
        prog="evalq gate", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = "record folder, record.json, record id or MLflow run id"
    made.add_argument("--baseline", metavar="R", help=where)
    made.add_argument("--candidate", metavar="R", help=where)
    made.add_argument("--policy", metavar="FILE", help="YAML of gate keys, or a name in conf/gate (default: default)")
    made.add_argument("--allow", metavar="FIELD", action="append", default=[], help="fingerprint field that may differ")
    made.add_argument("--records", metavar="DIR", help="where record ids are looked up (default: $EVALQ_HOME/records)")
    made.add_argument("--tracking-uri", metavar="URI", help="MLflow store of run ids")
    made.add_argument("--format", choices=FORMATS, default="text", help="what is printed (default: text)")
    made.add_argument("--out", metavar="DIR", help=f"folder that {VERDICT_FILE} is written to")
    made.add_argument("--verdict", metavar="DIR", help=f"judge nothing: read {VERDICT_FILE} and end with its exit code")
    return made


def main(argv: list[str]) -> int:
    """Judge, print, write; returns the verdict's exit code."""
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as end:
        if end.code:  # a mistyped flag is a failed step too: the next one must not read an earlier verdict
            _forget_verdict(argv)
        raise
    if arguments.verdict:
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
            (Path(folder) / VERDICT_FILE).unlink(missing_ok=True)


def _judge_and_write(arguments: argparse.Namespace) -> int:
    file = Path(arguments.out) / VERDICT_FILE if arguments.out else None
    if file is not None:
        file.unlink(missing_ok=True)  # the next step must never read the verdict of an earlier run
    verdict = _verdict(arguments)
    if file is not None:
        write_text(file, to_json(verdict) + "\n")
    show(verdict, arguments.format)
    return verdict.exit_code


def _verdict(arguments: argparse.Namespace) -> Verdict:
    policy = GateConfig()
    try:
        if not (arguments.baseline and arguments.candidate):
            raise ConfigError("--baseline and --candidate are both needed; see evalq gate --help")
        policy = read_policy(arguments.policy or "default")
        checked_policy(policy)
        return _judge_named(arguments, policy)
    except ConfigError as error:
        return no_verdict(list(error.problems), policy, exit_code=error.exit_code)
    except EvalqError as error:
        return no_verdict([str(error)], policy)
    except Exception as error:  # a bug here must not end as 1, which means "quality fail"
        traceback.print_exc()
        return no_verdict([f"the judge itself failed ({type(error).__name__}: {error}); please report this"], policy)


def _judge_named(arguments: argparse.Namespace, policy: GateConfig) -> Verdict:
    root = records_root(arguments.records)
    found = []
    for side, name in (("baseline", arguments.baseline), ("candidate", arguments.candidate)):
        try:
            found.append(find_record(name, root, arguments.tracking_uri))
        except RecordError as error:
            raise RecordError(f"no {side}: {error}") from error
    (baseline, baseline_folder), (candidate, candidate_folder) = found
    floor = read_floor(root, baseline, policy.metric)
    return judge(baseline, baseline_folder, candidate, candidate_folder, policy, arguments.allow, floor)


def _from_file(arguments: argparse.Namespace) -> int:
    try:
        verdict = read_verdict(arguments.verdict)
    except RecordError as error:
        print(f"evalq gate: {error}", file=sys.stderr)
        return EXIT_MEASUREMENT
    problem = contradiction(verdict)
    if problem:
        print(f"evalq gate: the verdict in {arguments.verdict} is damaged or was edited: {problem}", file=sys.stderr)
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
