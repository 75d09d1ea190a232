"""The smallest (or fastest) checkpoint that passes: sensitivity, a knapsack, and proof on the engine.

candidates.py  schemes from damages and bytes      proof.py    the engine, look by look, and the kept documents
run.py         the search itself                   outcome.py  what it found: front, recipe, heat map, engine-hours
"""

from __future__ import annotations

from evalq.search.outcome import Outcome, Tried, write_outcome
from evalq.search.run import search

__all__ = ["Outcome", "Tried", "search", "write_outcome"]
