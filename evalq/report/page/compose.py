"""All sections of a study, in the order in which people ask: may I ship it, why, what does it cost, can I trust it."""

from __future__ import annotations

from evalq import __version__
from evalq.report.page.blocks import Block, Page, Section, Text
from evalq.report.page.cache import cache_section
from evalq.report.page.cause import cause_section
from evalq.report.page.costs import memory_section, speed_section, tradeoff_section
from evalq.report.page.proof import comparability_section, environment_section
from evalq.report.page.quality import position_section, quality_section
from evalq.report.page.verdicts import claim_section, lead_of, verdict_section
from evalq.report.page.view import Group, StudyView


def study_page(view: StudyView) -> Page:
    """The page of a study; sections without data are left out."""
    sections: list[Section] = []
    for number, group in enumerate(view.groups, start=1):
        sections += _group_sections(view, group, number)
    if view.notes:
        sections.append(Section("left-out", "Left out, and judged now", [Text(note) for note in view.notes]))
    return Page(view.title, lead_of(view), _facts(view), sections, _foot(view))


def _group_sections(view: StudyView, group: Group, number: int) -> list[Section]:
    several = len(view.groups) > 1
    mark = f"-{number}" if several else ""
    suffix = f": {group.model} on {group.gpu}, {group.engine}" if several else ""
    parts: list[tuple[str, str, list[Block]]] = [
        ("verdicts", "Verdicts", verdict_section(group)),
        ("claims", "The articles' claims", claim_section(group)),
        ("quality", "Quality", quality_section(group)),
        ("memory", "Memory", memory_section(group)),
        ("speed", "Speed", speed_section(group)),
        ("trade-off", "Quality against memory", tradeoff_section(group)),
        ("position", "Divergence by position", position_section(group)),
        ("cache", "KV cache", cache_section(group)),
        ("causes", "From red to cause", cause_section(group)),
        ("comparability", "Comparability", comparability_section(group)),
        ("environment", "Environment", environment_section(group, view.command)),
    ]
    return [Section(anchor + mark, title + suffix, blocks) for anchor, title, blocks in parts if blocks]


def _facts(view: StudyView) -> list[tuple[str, str]]:
    records = [
        record for group in view.groups for record in (group.baseline, *(c.record for c in group.candidates)) if record
    ]
    devices = dict.fromkeys(r.environment.get("device", "") for r in records if r.environment.get("device"))
    engines = dict.fromkeys(r.environment.get("vllm", "") for r in records if r.environment.get("vllm"))
    data = dict.fromkeys(f"{t.dataset} (n={t.n:,})" for r in records for t in r.tasks.values())
    days = sorted({r.created_at[:10] for r in records})
    facts = [
        ("measured", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""),
        ("model", ", ".join(dict.fromkeys(group.model for group in view.groups))),
        ("device", ", ".join(devices)),
        ("vLLM", ", ".join(engines)),
        ("data", ", ".join(data)),
    ]
    return [(name, value) for name, value in facts if value]


def _foot(view: StudyView) -> str:
    return (
        f"Made by evalq {__version__} from record folders at {view.created_at}. This file fetches nothing and runs no script; "
        "every chart has its figures in a table."
    )
