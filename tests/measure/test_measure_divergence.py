"""Hidden states and the kept scores that they go with: neither is used without the other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalq.measure.divergence import ExactDivergence
from evalq.measure.engine import Engine, ScoreRequest
from evalq.measure.hidden import ROWS_FILE, open_rows, sequence_key
from evalq.measure.saved import SavedScores

REQUESTS = [ScoreRequest([5, 6, 7], 1), ScoreRequest([5, 6, 8, 9], 1)]
ROWS = {"logprob": np.zeros(2, np.float32), "top1_id": np.zeros(2, np.int32), "top1_logprob": np.zeros(2, np.float32)}


class Keeper:
    """An engine as ExactDivergence sees it."""

    scorer, scorer_note, hidden_size = "hook", "", 4

    def settings(self) -> dict[str, Any]:
        return {"dtype": "bfloat16"}

    def keep_hidden(self, use: Any) -> list[str]:
        return ["head"]

    def close_hidden(self) -> None: ...


def baseline(folder: Path) -> ExactDivergence:
    return ExactDivergence(folder / "hidden", False, 2**30, None, lambda text: None)


def interrupted(folder: Path) -> ExactDivergence:
    """A run that kept one sequence's scores and hidden states, and died."""
    saved, part = SavedScores(folder / "partial", "key"), baseline(folder)
    engine: Engine = Keeper()  # type: ignore[assignment]
    use = part.begin(engine, REQUESTS, saved)
    assert use is not None
    open_rows(use.folder, use.layout, writable=True)[:] = 7
    saved.keep({sequence_key(REQUESTS[0].ids, 1): ROWS})
    return part


@pytest.mark.parametrize(
    ("loss", "kept"), [("nothing", 1), ("the store", 0), ("its rows", 0), ("another's mark", 0), ("finished", 0)]
)
def test_kept_scores_are_given_up_when_their_hidden_states_are_not_there(tmp_path: Path, loss: str, kept: int) -> None:
    part = interrupted(tmp_path)
    unfinished = tmp_path / "hidden.part"
    if loss == "the store":
        shutil.rmtree(unfinished)
    elif loss == "its rows":
        (unfinished / ROWS_FILE).write_bytes(b"short")
    elif loss == "another's mark":
        (unfinished / "scores").write_text("other")
    elif loss == "finished":  # died between the end of the store and the end of the task
        part.finish(Keeper())  # type: ignore[arg-type]
    again = SavedScores(tmp_path / "partial", "key")
    use = baseline(tmp_path).begin(Keeper(), REQUESTS, again)  # type: ignore[arg-type]
    assert use is not None
    assert len(again) == kept
    if kept:
        assert (open_rows(use.folder, use.layout, writable=False) == 7).all()
