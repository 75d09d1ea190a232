"""The top of a report: what may be shipped, each scheme's verdict in words, and the articles' claims."""

from __future__ import annotations

from collections import Counter

from evalq.records import Verdict
from evalq.report.page.blocks import Block, Table, Text, Word
from evalq.report.page.view import Candidate, Group, StudyView
from evalq.report.words import ABSENT, interval, verdict_word

KINDS = {"PASS": "pass", "FAIL": "fail", "INVALID": "fail", "INCONCLUSIVE": "warn", "SUSPECT": "open"}
NOTE = "note: "  # how the judge begins what is no reason for the verdict
CLAIM_WORDS = {
    "agrees": Word("agrees", "pass"),
    "differs": Word("differs", "warn"),
    "open": Word("not settled here", "none"),
}


def word_of(candidate: Candidate) -> Word:
    """A candidate's verdict as a badge; a cell that failed or measured no quality says so."""
    if candidate.record.failure is not None:
        return Word(f"failed ({candidate.record.failure.kind})", "fail")
    if candidate.verdict is None:
        return Word("not judged", "none")
    return badge(candidate.verdict)


def badge(verdict: Verdict) -> Word:
    kind = "warn" if verdict.warning and verdict.status == "PASS" else KINDS[verdict.status]
    return Word(verdict_word(verdict), kind)


def lead_of(view: StudyView) -> list[Block]:
    """The answer in words, first of all."""
    blocks: list[Block] = []
    for group in view.groups:
        blocks.append(Text(f"{group.recommendation} {_count(group)}".strip(), "lead"))
        blocks += [Text(note, "warning") for note in group.model_notes]
    return blocks


def _count(group: Group) -> str:
    counts = Counter(word_of(one).text for one in group.candidates)
    if not counts:
        return ""
    total = len(group.candidates)
    said = ", ".join(f"{number} {word}" for word, number in counts.most_common())
    return f"Of {total} scheme{'s' if total > 1 else ''}: {said}."


def verdict_section(group: Group) -> list[Block]:
    """A table of all schemes, the policy, and the sentence behind each verdict."""
    rows = [
        (one.name, word_of(one), interval(one.increase), _documents(one), _sentence(one)) for one in group.candidates
    ]
    columns = ("scheme", "verdict", "perplexity increase [interval]", "n", "in words")
    caption = "Verdict of each scheme against the 16-bit baseline; n counts documents"
    blocks: list[Block] = [Table(caption, columns, rows, frozenset({2, 3}))] if rows else []
    policy = next((one.verdict.policy for one in group.candidates if one.verdict and one.verdict.checks), None)
    if policy:
        blocks.append(
            Text(
                f"Policy {policy.get('name')}: {policy.get('metric')} may rise by {policy.get('target')} (target) and never "
                f"by more than {policy.get('limit')} (limit); intervals at {100 * float(policy.get('confidence') or 0):g} %. "
                "PASS: the whole interval is within. FAIL: the whole interval is above the limit. "
                "INCONCLUSIVE: the limit lies inside it.",
                "note",
            )
        )
    blocks += _corrected(group)
    return [*blocks, *_noted(group), *_exceptions(group)]


def _documents(one: Candidate) -> str:
    return f"{one.increase.n:,}" if one.increase else ABSENT


def _sentence(one: Candidate) -> str:
    if one.verdict is not None:
        return one.verdict.reasons[0] if one.verdict.reasons else one.verdict.summary
    if one.record.failure is not None:
        return one.record.failure.message
    return "memory and speed only; nothing here says how good it is"


def _corrected(group: Group) -> list[Block]:
    """What many schemes at once do to the error rate."""
    tested = [one for one in group.candidates if one.p_holm is not None]
    if len(tested) < 2:
        return []
    fails = [one for one in tested if one.verdict is not None and one.verdict.status == "FAIL"]
    weak = [one.name for one in fails if (one.p_holm or 0.0) > 0.025]
    tail = f"these FAILs do not stand after it: {', '.join(weak)}" if weak else "every FAIL stands after it"
    return [
        Text(
            f"{len(tested)} schemes were judged at once; after Holm's step-down at 2.5 % one-sided "
            f"{tail if fails else 'there is no FAIL to correct'}.",
            "note",
        )
    ]


def _noted(group: Group) -> list[Block]:
    """What the judge wants known beside a verdict; a sentence that several schemes share is said once."""
    found: dict[str, list[str]] = {}
    for one in group.candidates:
        for reason in one.verdict.reasons if one.verdict else []:
            if reason.startswith(NOTE) and not reason.startswith(f"{NOTE}A/A floor"):  # the floor has its own place
                found.setdefault(reason.removeprefix(NOTE), []).append(one.name)
    return [Text(f"{', '.join(names)}: {text}.", "note") for text, names in found.items()]


def _exceptions(group: Group) -> list[Block]:
    allowed = {item for one in group.candidates if one.verdict for item in one.verdict.allowed_differences}
    return [Text(f"Allowed difference: {item}", "warning") for item in sorted(allowed)]


def claim_section(group: Group) -> list[Block]:
    """The articles' claims beside the measurements."""
    rows = [(str(c.number), c.says, CLAIM_WORDS[c.answer], c.measured) for c in group.claims]
    caption = "Claims of the two source articles and what these records say"
    return [Table(caption, ("#", "claim", "here", "measured"), rows)] if rows else []
