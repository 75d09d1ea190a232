"""A verdict as GitHub-flavoured Markdown, for a pull request comment or a job summary."""

from __future__ import annotations

from evalq.records import Verdict
from evalq.report.words import interval, limits, verdict_word


def verdict_markdown(verdict: Verdict) -> str:
    """Heading, sentence, one table row per check, reasons, exceptions."""
    lines = [f"### evalq: {verdict_word(verdict)}", "", _plain(verdict.summary), ""]
    if verdict.checks:
        lines += ["| metric | weight | difference [interval] | allowed | status |", "|---|---|---:|---|---|"]
        for check in verdict.checks:
            weight = "required" if check.required else "advice"
            cells = (check.metric, weight, interval(check.estimate), limits(check), check.status)
            lines.append("| " + " | ".join(_plain(cell) for cell in cells) + " |")
        lines.append("")
    lines += [f"- {_plain(reason)}" for reason in verdict.reasons]
    ids = f"baseline `{_code(verdict.baseline_id)}`, candidate `{_code(verdict.candidate_id)}`"
    lines += ["", f"{ids}; exit code {verdict.exit_code}; evalq {verdict.evalq_version}, {verdict.created_at}"]
    if verdict.inputs:
        lines += ["", "; ".join(f"{name} `{_code(value)}`" for name, value in verdict.inputs.items())]
    lines.append("")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text that cannot break a table or start a tag."""
    for mark in ("\\", "|", "<", "`", "*", "[", "]"):
        text = text.replace(mark, "\\" + mark)
    return text.replace("@", "@\u200b").replace("\r", " ").replace("\n", " ")  # and no text may call people by @name


def _code(text: str | None) -> str:
    return (text or "none").replace("`", "").replace("\n", " ")
