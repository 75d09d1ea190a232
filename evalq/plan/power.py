"""How small an effect the chosen data can show, before any engine starts.

A spread is the standard deviation of one document's or item's paired difference: the standard error is spread/sqrt(n).
Spreads come from earlier pairs, from a baseline alone, or from the assumptions below (`evalq.plan.spread`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evalq.config import RunConfig, parse_share
from evalq.plan.quantiles import t_quantile

POWER = 0.8  # chance of showing an effect of the stated size

# Used when nothing was measured. Perplexity: the upper end of the paired standard errors of 0.02 to 0.07 % seen over the
# 62 articles of wikitext-2. Accuracies: 5 % of items change sides, the order of what Dutta et al. 2024 ("Accuracy is not
# all you need") report for 8 and 4 bit; mc2, a share between 0 and 1, is taken to vary no more than that.
ASSUMED_FLIPS = 0.05
ASSUMED_SPREADS = {
    "wikitext": 0.0007 * math.sqrt(62),
    "hellaswag": math.sqrt(ASSUMED_FLIPS),
    "truthfulqa_mc1": math.sqrt(ASSUMED_FLIPS),
    "truthfulqa_mc2": math.sqrt(ASSUMED_FLIPS),
}
ASSUMED = "assumed"


@dataclass(frozen=True)
class Resolution:
    """What `n` documents or items can show; `effect` is a share (relative for perplexity, of all items for accuracy)."""

    task: str
    n: int
    effect: float
    target: float
    source: str  # where the spread is from

    @property
    def resolves(self) -> bool:
        return self.effect <= self.target

    @property
    def sentence(self) -> str:
        what = "documents" if self.task == "wikitext" else "items"
        shown = f"{self.n:,} {what} show {100 * self.effect:.2g} % and more (spread {self.source})"
        verb = "resolves" if self.resolves else "cannot resolve"
        return f"{self.task}: {verb} {100 * self.target:.3g} %; {shown}"


def detectable_effect(spread: float, n: int, confidence: float = 0.95, power: float = POWER) -> float:
    """Smallest true difference that a two-sided interval excludes with probability `power`; units of `spread`.

    Source: (t of the interval + t of the power) standard errors, as in Cohen 1988 and Miller 2024.
    """
    if n < 2 or not (math.isfinite(spread) and spread >= 0.0):
        return math.inf
    return (t_quantile(0.5 + confidence / 2.0, n - 1.0) + t_quantile(power, n - 1.0)) * spread / math.sqrt(n)


def needed(spread: float, effect: float, confidence: float = 0.95, power: float = POWER) -> int | None:
    """Documents or items with which `effect` can be shown; None for an effect of 0."""
    if effect <= 0.0 or not math.isfinite(spread):
        return None
    low, high = 1, 2
    while detectable_effect(spread, high, confidence, power) > effect:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if detectable_effect(spread, middle, confidence, power) > effect else (low, middle)
    return high


def resolutions(
    counts: Mapping[str, int],
    target: float,
    confidence: float = 0.95,
    power: float = POWER,
    spreads: Mapping[str, tuple[float, str]] | None = None,
) -> list[Resolution]:
    """What each task can show with `counts` documents or items; `spreads`: task -> (spread, where it is from)."""
    found = []
    for task, n in counts.items():
        spread, source = (spreads or {}).get(task, (ASSUMED_SPREADS.get(task, math.sqrt(ASSUMED_FLIPS)), ASSUMED))
        effect = detectable_effect(spread, n, confidence, power)
        found.append(
            Resolution(task, n, math.expm1(min(effect, 700.0)) if task == "wikitext" else effect, target, source)
        )
    return found


def documents_to_decide(value: float, se: float, documents: int, bound: float, confidence: float) -> int | None:
    """How many more documents would move the interval of `value` off `bound`, if value and spread stay as they are.

    value, se, bound in nats; None when value equals the bound or there is no spread to shrink.
    """
    distance = abs(value - bound)
    if distance == 0.0 or se == 0.0 or documents < 2:
        return None
    spread = se * math.sqrt(documents)
    wanted = documents
    for _ in range(50):
        half = t_quantile(0.5 + confidence / 2.0, max(wanted - 1.0, 1.0)) * spread
        following = math.ceil((half / distance) ** 2)
        if following <= wanted:
            break
        wanted = following
    return max(wanted - documents, 1)


PUBLIC_COUNTS = {"wikitext": 62, "hellaswag": 10_042, "truthfulqa_mc1": 817, "truthfulqa_mc2": 817}
LOCAL_COUNTS = {**PUBLIC_COUNTS, "hellaswag": 1_000}  # the local folder holds the first thousand of HellaSwag
EMBEDDED_FILES = {
    "wikitext": "articles.jsonl",
    "hellaswag": "completions.jsonl",
    "truthfulqa_mc1": "truthfulness.jsonl",
    "truthfulqa_mc2": "truthfulness.jsonl",
}


def planned_counts(config: RunConfig) -> dict[str, int]:
    """Documents and items that the config will score, by task."""
    counts = _embedded_counts() if config.data.name == "embedded" else PUBLIC_COUNTS
    counts = LOCAL_COUNTS if config.data.name == "local" else counts
    tasks = config.tasks
    wanted = {
        "wikitext": (tasks.perplexity, tasks.perplexity_limit),
        "hellaswag": (tasks.hellaswag, tasks.hellaswag_limit),
        "truthfulqa_mc1": (tasks.truthfulqa, tasks.truthfulqa_limit),
        "truthfulqa_mc2": (tasks.truthfulqa, tasks.truthfulqa_limit),
    }
    return {
        task: min(counts[task], limit or counts[task])
        for task, (chosen, limit) in wanted.items()
        if chosen and counts.get(task)
    }


def _embedded_counts() -> dict[str, int]:
    folder = Path(__file__).resolve().parents[1] / "data" / "embedded"
    files = {task: folder / name for task, name in EMBEDDED_FILES.items()}
    return {task: file.read_bytes().count(b"\n") for task, file in files.items() if file.is_file()}


def _short_documents() -> dict[str, tuple[float, str]]:
    """The assumed spread over documents of 210 words instead of wikitext-2's 3,890, as if tokens erred independently."""
    spread = ASSUMED_SPREADS["wikitext"] * math.sqrt(3890 / 210)
    return {"wikitext": (spread, "assumed, for short documents")}


def describe_visible_effect(config: RunConfig, spreads: Mapping[str, tuple[float, str]] | None = None) -> str:
    """One line per task: whether the chosen data can show an effect as large as the gate's target."""
    target = parse_share(config.gate.target, "gate.target")
    known = {**(_short_documents() if config.data.name == "embedded" else {}), **(spreads or {})}
    found = resolutions(planned_counts(config), target, config.gate.confidence, spreads=known)
    return "\n".join(resolution.sentence for resolution in found)
