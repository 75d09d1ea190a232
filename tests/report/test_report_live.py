"""The live view: states, ETA, the last line of a log, what is shown of many cells; lines elsewhere, few in CI."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from evalq.report import live
from evalq.report.live import LiveWatcher, Rows, StateWatcher, SweepLines, clock, sweep_watcher, tail


def drawn(view: LiveWatcher) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(view.table())
    return capture.get()


def test_table_shows_states_progress_eta_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    log = tmp_path / "engine.log"
    log.write_bytes(b"INFO first\nINFO loading weights \xff\n\n")
    view = LiveWatcher()
    view.expect(["m baseline", "m fp8-kv", "m w4a16", "m other"])
    view.state("m baseline", "running")
    now[0] = 160.0
    view.state("m baseline", "done")
    view.state("m fp8-kv", "running")
    view.log("m fp8-kv", str(log))
    view.cell("m fp8-kv")
    view.stage("score wikitext", "scoring wikitext")
    now[0] = 170.0
    view.progress(1, 4, "sequences")
    view.state("m w4a16", "failed", "oom")
    text = drawn(view)
    assert "1 done, 1 running, 1 to go, 1 failed; 1:10 so far, about 1:50 left" in text
    assert "scoring wikitext 1/4 sequences" in text
    assert "0:30" in text, "10 s for one of four"
    assert "INFO loading weights" in text
    assert "oom" in text


def test_log_on_another_machine_is_shown_from_what_is_told() -> None:
    view = LiveWatcher()
    view.state("m fp8-kv", "running")
    view.cell("m fp8-kv")
    view.line("INFO from afar")
    assert "INFO from afar" in drawn(view)


def test_of_a_thousand_cells_those_that_matter_are_shown() -> None:
    rows = Rows()
    for i in range(1000):
        rows.row(f"cell {i}")
    rows.set_state("cell 500", "running", "")
    rows.set_state("cell 3", "failed", "oom")
    rows.set_state("cell 7", "done", "")
    shown = [row.name for row in rows.shown()]
    assert len(shown) <= live.ROWS
    assert {"cell 500", "cell 3", "cell 7", "cell 0"} <= set(shown)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (3723, "1:02:03"), (-3, "0:00")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_tail_of_nothing_is_nothing(tmp_path: Path) -> None:
    assert tail(None) == tail(tmp_path / "absent") == ""
    (tmp_path / "empty").write_text("\n\n")
    assert tail(tmp_path / "empty") == ""


def test_ci_gets_one_line_per_change(capsys: pytest.CaptureFixture[str]) -> None:
    view = StateWatcher()
    view.expect(["a", "b"])
    for state in ("planned", "running", "done"):
        view.state("a", state)
    view.cell("a")
    view.stage("score", "scoring")
    view.progress(1, 2, "sequences")
    view.state("b", "failed", "oom")
    assert capsys.readouterr().err.splitlines() == [
        "a: running [0 of 2 done]", "a: done after 0:00 [1 of 2 done]", "b: failed (oom) [1 of 2 done]",
    ]  # fmt: skip


def test_which_view_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert type(sweep_watcher(True)) is SweepLines
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert type(sweep_watcher(True)) is LiveWatcher
    monkeypatch.setenv("CI", "true")
    assert type(sweep_watcher(True)) is StateWatcher
    assert type(sweep_watcher(False)) is live.QuietWatcher


def test_live_view_opens_and_closes() -> None:
    with LiveWatcher() as view:
        view.state("a", "running")
        view.say("something")
