from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A complete two-layer checkpoint in bfloat16."""
    from tiny_checkpoint import tiny_tensors, write_checkpoint

    return write_checkpoint(tmp_path / "tiny", tiny_tensors())
