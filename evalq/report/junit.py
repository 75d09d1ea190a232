"""A verdict as JUnit XML: one test case per check, so that a CI system shows what failed."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape, quoteattr

from evalq.records import Check, Verdict

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def verdict_junit(verdict: Verdict) -> str:
    """FAIL is a failure; INVALID, INCONCLUSIVE and SUSPECT are errors; advice never fails.

    The first case is the verdict itself, so that no combination of checks can look green when the verdict is not PASS.
    """
    cases = [_case("verdict", verdict.status, verdict.summary, True, verdict.reasons)]
    cases += [
        _case(check.metric, check.status, check.reason, check.required, [_figures(check)]) for check in verdict.checks
    ]
    kinds = [_kind(verdict.status, True), *(_kind(check.status, check.required) for check in verdict.checks)]
    counts = f'tests="{len(cases)}" failures="{kinds.count("failure")}" errors="{kinds.count("error")}"'
    suite = f'<testsuite name="evalq" timestamp={_attribute(verdict.created_at[:19])} {counts}>'
    return "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', suite, *cases, "</testsuite>", ""])


def _kind(status: str, required: bool) -> str:
    if status == "PASS" or not required:
        return "passed"
    return "failure" if status == "FAIL" else "error"


def _case(name: str, status: str, message: str, required: bool, details: list[str]) -> str:
    opening = f'  <testcase classname="evalq" name={_attribute(name)}>'
    kind, text = _kind(status, required), _text("\n".join(details))
    body = f"    <system-out>{text}</system-out>"
    if kind != "passed":
        body = f"    <{kind} type={_attribute(status)} message={_attribute(message)}>{text}</{kind}>"
    return "\n".join([opening, body, "  </testcase>"])


def _figures(check: Check) -> str:
    weight = "required" if check.required else "advice"
    if check.estimate is None:
        return f"{weight}: {check.reason}"
    e = check.estimate
    return f"{weight}: {check.reason}\nvalue={e.value} low={e.low} high={e.high} n={e.n} method={e.method}"


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("?", text))


def _attribute(text: str) -> str:
    return quoteattr(_NOT_XML.sub("?", text))
