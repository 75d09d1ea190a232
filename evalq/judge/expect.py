"""What a gate expects to be judging: without it, two good records of some other model would pass for this one."""

from __future__ import annotations

from collections.abc import Sequence

from evalq.config import nearest
from evalq.errors import ConfigError
from evalq.records import Record, Scalar

BOTH = ("model", "gpu", "engine")  # names of the cell, of both records
CANDIDATE = ("quant", "config_hash", "record_id")  # of the candidate alone


def unexpected(baseline: Record, candidate: Record, expected: Sequence[str]) -> list[str]:
    """Differences from `FIELD=VALUE` texts; a field is one of BOTH, of CANDIDATE, or of the fingerprint.

    Errors: ConfigError for a text of another form or an unknown field.
    """
    problems, wrong = [], []
    known = [*BOTH, *CANDIDATE, *sorted({*baseline.fingerprint, *candidate.fingerprint})]
    for text in expected:
        name, sign, wanted = text.partition("=")
        if not sign or not wanted:
            wrong.append(f"--expect {text!r} is not of the form FIELD=VALUE, e.g. model=llama3-8b")
        elif name not in known:
            wrong.append(f"--expect {name}: no such field; {nearest(name, known)}")
        else:
            sides = {"candidate": candidate} if name in CANDIDATE else {"baseline": baseline, "candidate": candidate}
            problems += [
                f"{name} {wanted} is to be judged and the {side} has {_value(record, name)}"
                for side, record in sides.items()
                if str(_value(record, name)) != wanted
            ]
    if wrong:
        raise ConfigError(*wrong)
    return problems


def _value(record: Record, name: str) -> Scalar:
    if name in ("model", "gpu", "engine", "quant"):
        return str(getattr(record.cell, name))
    return str(getattr(record, name)) if name in CANDIDATE else record.fingerprint.get(name)
