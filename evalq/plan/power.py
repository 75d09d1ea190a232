"""How small an effect the chosen data can show, before any engine starts. Pure arithmetic on counts and spreads."""

from __future__ import annotations

import math

from evalq.plan.quantiles import t_quantile


def documents_to_decide(value: float, se: float, documents: int, bound: float, confidence: float) -> int | None:
    """How many more documents would move the interval of `value` off `bound`, if value and spread stay as they are.

    value, se, bound in nats; None when value equals the bound or there is no spread to shrink.
    """
    distance = abs(value - bound)
    if distance == 0.0 or se == 0.0 or documents < 2:
        return None
    spread = se * math.sqrt(documents)
    needed = documents
    for _ in range(50):
        half = t_quantile(0.5 + confidence / 2.0, max(needed - 1, 1)) * spread
        wanted = math.ceil((half / distance) ** 2)
        if wanted <= needed:
            break
        needed = wanted
    return max(needed - documents, 1)
