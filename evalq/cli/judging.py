"""What `gate` and `promote` share: named records and a policy in, a verdict judged from the files themselves out."""

from __future__ import annotations

import argparse
import dataclasses
import math
import traceback
from dataclasses import dataclass
from pathlib import Path

from evalq.cli.locate import RECORDS_HELP, find_record, records_root
from evalq.config import GateConfig
from evalq.errors import ConfigError, EvalqError, RecordError
from evalq.judge.expect import unexpected
from evalq.judge.floor import read_floor
from evalq.judge.gate import judge, no_verdict
from evalq.judge.policy import checked_policy, policy_file, read_policy
from evalq.judge.seal import KEY_VARIABLE, record_digest, seal_key, why_unsealed
from evalq.records import Check, Record, Verdict, file_sha256

Located = tuple[Record, Path]
MAY_BE_LEFT_OUT = ("policy", "records", "tracking_uri", "review", "out", "verdict")


@dataclass(frozen=True)
class Judged:
    """A verdict and the records behind it; None where they could not be read."""

    verdict: Verdict
    baseline: Located | None = None
    candidate: Located | None = None


def add_arguments(made: argparse.ArgumentParser) -> None:
    """The options that name records, policy and what is expected of them."""
    where = "record folder, record.json, record id or MLflow run id"
    made.add_argument("--baseline", metavar="R", help=where)
    made.add_argument("--candidate", metavar="R", help=where)
    made.add_argument("--policy", metavar="FILE", help="YAML of gate keys, or a name in conf/gate (default: default)")
    made.add_argument("--policy-sha256", metavar="HEX", help="refuse a policy file with another sha256")
    made.add_argument(
        "--expect",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="model, gpu, quant, engine, config_hash, record_id or a fingerprint field that must have this value",
    )
    made.add_argument("--require-seal", action="store_true", help=f"refuse records that {KEY_VARIABLE} did not seal")
    made.add_argument("--allow", metavar="FIELD", action="append", default=[], help="fingerprint field that may differ")
    made.add_argument(
        "--records",
        metavar="DIR",
        help=RECORDS_HELP,
    )
    made.add_argument("--tracking-uri", metavar="URI", help="MLflow store of run ids")
    made.add_argument("--review", metavar="FILE", help="result of evalq review read: what people said, as advice")


def judged(arguments: argparse.Namespace) -> Judged:
    """Judge the named records; whatever goes wrong is an INVALID verdict."""
    policy = GateConfig()
    try:
        refuse_empty(arguments)
        if not (arguments.baseline and arguments.candidate):
            raise ConfigError("--baseline and --candidate are both needed; see evalq gate --help")
        name = "default" if arguments.policy is None else arguments.policy
        policy = read_policy(name)
        inputs = {"policy_sha256": _policy_digest(name, arguments.policy_sha256)}
        checked_policy(policy)
        return _judge_named(arguments, policy, inputs)
    except ConfigError as error:
        return Judged(no_verdict(list(error.problems), policy, exit_code=error.exit_code))
    except EvalqError as error:
        return Judged(no_verdict([str(error)], policy))
    except OSError as error:  # a file that may not be read, no room for a download: nothing about quality
        reason = f"{error.filename or 'a file'} cannot be used ({error.strerror or error}); give the right to read it, or room"
        return Judged(no_verdict([reason], policy))
    except Exception as error:  # a bug here must not end as 1, which means "quality fail"
        traceback.print_exc()
        reason = f"the judge itself failed ({type(error).__name__}: {error}); please report this"
        return Judged(no_verdict([reason], policy))


def refuse_empty(arguments: argparse.Namespace) -> None:
    """An unset variable in a CI file must not mean that an option was left out. Errors: ConfigError."""
    given = {name: getattr(arguments, name, None) for name in MAY_BE_LEFT_OUT}
    empty = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None and not value.strip()]
    if empty:
        raise ConfigError(f"{', '.join(empty)} is empty; give a value, or leave the option out")


def _policy_digest(name: str, wanted: str | None) -> str:
    file = policy_file(Path(name))
    digest = file_sha256(file)
    if wanted is not None and wanted.strip().lower() != digest:
        raise ConfigError(
            f"policy {file} has sha256 {digest} and {wanted.strip() or 'nothing'} was expected; "
            "use the agreed policy, or have its owners agree to the new one"
        )
    return digest


def _judge_named(arguments: argparse.Namespace, policy: GateConfig, inputs: dict[str, str]) -> Judged:
    root = records_root(arguments.records)
    found = []
    for side, name in (("baseline", arguments.baseline), ("candidate", arguments.candidate)):
        try:
            found.append(find_record(name, root, arguments.tracking_uri))
        except RecordError as error:
            raise RecordError(f"no {side}: {error}") from error
    first, second = found
    ids = (first[0].record_id, second[0].record_id)
    problems = [*_unsealed(first, second, arguments.require_seal), *unexpected(first[0], second[0], arguments.expect)]
    inputs |= {"baseline_sha256": record_digest(first[1]), "candidate_sha256": record_digest(second[1])}
    if problems:
        verdict = no_verdict(problems, policy, ids)
    else:
        floor = read_floor(root, first[0], policy.metric)
        verdict = judge(*first, *second, policy, arguments.allow, floor)
    inputs["sealed"] = "yes" if seal_key() is not None and not problems else "no"
    verdict = dataclasses.replace(verdict, inputs=inputs)
    if arguments.review:
        verdict = _with_review(verdict, Path(arguments.review), ids)
    return Judged(verdict, first, second)


def _unsealed(first: Located, second: Located, required: bool) -> list[str]:
    """Records whose seal does not hold; nothing is checked where there is neither a key nor a demand."""
    key = seal_key()
    if key is None:
        text = f"records must be sealed and {KEY_VARIABLE} is not set, so no seal can be checked; set it as a CI secret"
        return [text] if required else []
    reasons = ((side, why_unsealed(folder, key)) for side, (_, folder) in (("baseline", first), ("candidate", second)))
    return [f"the {side} record is not trusted: {reason}" for side, reason in reasons if reason]


def _with_review(verdict: Verdict, file: Path, ids: tuple[str, str]) -> Verdict:
    """Add what reviewers said, as advice. Errors: RecordError for a result that is damaged or of other records."""
    from evalq.judge.review import advice, read_result

    result = read_result(file)
    if (result.baseline_id, result.candidate_id) != ids:
        raise RecordError(
            f"the review {file} is of {result.baseline_id} and {result.candidate_id}, not of these records; "
            "give the review of these two, or leave --review out"
        )
    checks = advice(result)
    reasons = [*verdict.reasons, *(f"advice: {check.reason}" for check in checks)]
    return dataclasses.replace(verdict, checks=[*verdict.checks, *checks], reasons=reasons)


def disagreement(stored: Verdict, again: Verdict) -> str | None:
    """Why a stored verdict is not the one that the same records give when they are judged again; None when it is."""
    for name in ("status", "exit_code", "warning", "baseline_id", "candidate_id", "inputs", "policy"):
        a, b = getattr(stored, name), getattr(again, name)
        if a != b:
            return f"{name} is {a!r} in the file and {b!r} when judged again"
    if sorted(stored.allowed_differences) != sorted(again.allowed_differences):
        return "it allows other differences"
    first, second = [_essence(check) for check in stored.checks], [_essence(check) for check in again.checks]
    if [essence[0] for essence in first] != [essence[0] for essence in second]:
        return "its checks are others"
    if any(
        not _close(a, b)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one[1], other[1], strict=True)
    ):
        return "its figures are others"
    return None


def _essence(check: Check) -> tuple[tuple[object, ...], tuple[float | None, ...]]:
    """What of a check decides: names and states, then numbers."""
    e = check.estimate
    names = (check.metric, check.required, check.status, None if e is None else (e.name, e.n))
    return names, (check.target, check.limit, *((None, None, None) if e is None else (e.value, e.low, e.high)))


def _close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)  # another machine may sum in another order
