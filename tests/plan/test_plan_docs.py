"""The planner's page: every example in it is run."""

from __future__ import annotations

import doctest
from pathlib import Path


def test_docs_planner() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "planner.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 20
    assert result.failed == 0
