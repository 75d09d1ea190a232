"""From red to cause: worst documents, items that changed sides with both answers, worst tokens in their context."""

from __future__ import annotations

from evalq.report.page.blocks import Answer, Block, Chart, Fold, Item, Passage, Table, Text
from evalq.report.page.charts import strips
from evalq.report.page.quality import inks
from evalq.report.page.view import Causes, Group, ItemChange, TokenChange

DOCUMENTS = 5
PROMPT_CHARACTERS = 700


def cause_section(group: Group) -> list[Block]:
    """One fold per scheme under a picture of every document."""
    blocks: list[Block] = [*_every_document(group)]
    for one in group.candidates:
        inside = cause_blocks(one.causes)
        if any(not isinstance(block, Text) for block in inside):
            blocks.append(Fold(f"{one.name}: worst documents, changed answers, tokens that diverge most", inside))
    return blocks


def cause_blocks(causes: Causes) -> list[Block]:
    """What changed between two records."""
    blocks: list[Block] = []
    if causes.documents:
        blocks.append(_document_table(causes))
    if causes.flips:
        blocks.append(_flip_table(causes))
    blocks += [item_block(change) for change in causes.items]
    blocks += [token_block(change) for change in causes.tokens]
    return [*blocks, *(Text(f"Not shown: {reason}", "note") for reason in dict.fromkeys(causes.missing))]


def _every_document(group: Group) -> list[Block]:
    colours = inks(group)
    rows = [
        {"name": one.name, "value": change.difference_nats, "ink": colours[one.name]}
        for one in group.candidates
        for change in one.causes.documents
    ]
    if not rows:
        return []
    table = Table(
        "Worst and best document of each scheme, difference in nats per token",
        ("scheme", "worst", "median", "best", "n documents", "worse than the baseline"),
        [(one.name, *_spread(one.causes)) for one in group.candidates if one.causes.documents],
        frozenset({1, 2, 3, 4, 5}),
    )
    return [
        Chart(
            "Every document: loss against the baseline, nats per token",
            "One mark per document and scheme; to the right is worse than the baseline.",
            strips(rows, "candidate minus baseline, nats per token"),
            table,
        )
    ]


def _spread(causes: Causes) -> tuple[str, ...]:
    values = [change.difference_nats for change in causes.documents]
    worse = sum(value > 0 for value in values)
    middle = values[len(values) // 2]
    return (
        f"{values[0]:+.4f}",
        f"{middle:+.4f}",
        f"{values[-1]:+.4f}",
        f"{len(values):,}",
        f"{worse / len(values):.0%}",
    )


def _document_table(causes: Causes) -> Table:
    rows = [
        (str(change.doc_id), f"{change.difference_nats:+.4f}", f"{change.tokens:,}", _short(change.beginning, 160))
        for change in causes.documents[:DOCUMENTS]
    ]
    caption = f"Worst {len(rows)} of n={len(causes.documents)} documents"
    return Table(caption, ("document", "nats per token", "tokens", "begins"), rows, frozenset({1, 2}))


def _flip_table(causes: Causes) -> Table:
    rows = [(name, str(lost), str(won), str(lost + won)) for name, (lost, won) in sorted(causes.flips.items())]
    return Table(
        "Items that changed sides",
        ("task", "right to wrong", "wrong to right", "n flipped"),
        rows,
        frozenset({1, 2, 3}),
    )


def item_block(change: ItemChange) -> Item:
    """A changed item with both answers."""
    binary = {change.baseline_value, change.candidate_value} <= {0.0, 1.0}
    what = ("right to wrong" if change.lost else "wrong to right") if binary else _share_change(change)
    answers = [
        Answer("baseline", change.baseline_answer, change.baseline_value == 1.0 if binary else None),
        Answer("candidate", change.candidate_answer, change.candidate_value == 1.0 if binary else None),
    ]
    if change.gold and change.gold not in (change.baseline_answer, change.candidate_answer):
        answers.append(Answer("expected" if binary else "a right answer", change.gold, None))
    title = f"{change.task}, item {change.item_id}: {what} ({change.metric})"
    return Item(title, _tail(change.prompt, PROMPT_CHARACTERS), answers, _leads(change))


def _share_change(change: ItemChange) -> str:
    return f"probability on true answers {change.baseline_value:.3f} to {change.candidate_value:.3f}"


def _leads(change: ItemChange) -> str:
    if change.baseline_lead_nats is None or change.candidate_lead_nats is None:
        return ""
    return (
        f"The baseline's answer led by {change.baseline_lead_nats:.2f} nats with the baseline; "
        f"the candidate's by {change.candidate_lead_nats:.2f} with the candidate."
    )


def token_block(change: TokenChange) -> Passage:
    """A token in its context."""
    notes = [
        f"probability of the correct token: {change.baseline_probability:.4f} to {change.candidate_probability:.4f}",
        f"ranked first: baseline {_quoted(change.baseline_first)}, candidate {_quoted(change.candidate_first)}",
        f"KL divergence at this token: {change.kld_nats:.3f} nats",
    ]
    better = "gained" if change.candidate_probability > change.baseline_probability else "lost"
    title = f"{change.task}, document {change.doc_id}, token {change.position}: {better}"
    return Passage(title, change.before, change.token, notes)


def _quoted(text: str) -> str:
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    return f"“{shown}”"


def _short(text: str, limit: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def _tail(text: str, limit: int) -> str:
    return text if len(text) <= limit else "…" + text[-(limit - 1) :]
