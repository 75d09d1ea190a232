"""A rule that a cell breaks, and what a rule looks at."""

from __future__ import annotations

from dataclasses import dataclass

from evalq.config import RunConfig
from evalq.facts.gpus import GpuFacts
from evalq.facts.models import ModelFacts
from evalq.facts.schemes import Assigned
from evalq.plan.memory import GpuMemory
from evalq.plan.settings import Settings

SEVERITIES = ("error", "warning")


@dataclass(frozen=True)
class Rule:
    """A rule: what it demands, in words, and where that comes from."""

    id: str
    severity: str  # one of SEVERITIES: error = refused, warning = said aloud
    demand: str
    remedy: str
    source: str


@dataclass(frozen=True)
class Violation:
    """A broken rule. `message` is one sentence about this very cell."""

    rule: str
    severity: str
    message: str
    remedy: str
    source: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}; {self.remedy} ({self.source})"


@dataclass(frozen=True)
class Look:
    """All that a rule may look at."""

    config: RunConfig
    facts: ModelFacts
    gpu: GpuFacts
    settings: Settings
    assigned: tuple[Assigned, ...]
    memory: GpuMemory


def broken(rule: Rule, message: str, severity: str | None = None, remedy: str | None = None) -> Violation:
    """The violation of `rule` by this cell."""
    return Violation(rule.id, severity or rule.severity, message, remedy or rule.remedy, rule.source)
