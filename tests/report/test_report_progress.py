"""What people see while a cell is measured: few plain lines in a log, bars on a terminal, nothing when not wanted."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from evalq.report import progress
from evalq.report.progress import BarWatcher, PlainWatcher, QuietWatcher, in_short, watcher

ROOT = Path(__file__).resolve().parents[2]


def follow(watch: QuietWatcher) -> None:
    with watch:
        watch.cell("tiny fp8-kv")
        watch.stage("start", "starting the engine")
        watch.stage("score", "scoring wikitext")
        for done in range(101):
            watch.progress(done, 100, "sequences")
        watch.scored("wikitext", {"wikitext": {"word_perplexity": 32.217, "note": None}})
        watch.say("[a] literal [b]brackets[/b]")


def test_log_gets_one_line_per_stage_and_no_flood(capsys: pytest.CaptureFixture[str]) -> None:
    follow(PlainWatcher())
    said = capsys.readouterr()
    assert said.out == "", "standard output is for the result"
    assert said.err.splitlines() == [
        "[tiny fp8-kv] starting the engine ...",
        "[tiny fp8-kv] scoring wikitext ...",
        "[tiny fp8-kv] wikitext: word_perplexity 32.22",
        "[tiny fp8-kv] [a] literal [b]brackets[/b]",
    ]


def test_long_stage_says_how_long_it_will_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0, 20.0, 40.0, 50.0, 80.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    watch = PlainWatcher()  # 0
    watch.stage("score", "scoring")  # 10
    for done in (10, 25, 30, 50):  # at 20, 40, 50 and 80
        watch.progress(done, 100, "sequences")
    assert capsys.readouterr().err.splitlines()[1:] == [
        "scoring: 25 of 100 sequences, about 90 s left",
        "scoring: 50 of 100 sequences, about 70 s left",
    ]


def test_bars_write_to_standard_error_and_leave_a_line_per_stage(capsys: pytest.CaptureFixture[str]) -> None:
    follow(BarWatcher())
    said = capsys.readouterr()
    assert said.out == ""
    assert "tiny fp8-kv  starting the engine: 0.0 s" in said.err
    assert "[b]brackets[/b]" in said.err


def test_bars_on_a_terminal_have_an_eta() -> None:
    script = "from evalq.report.progress import watcher\nimport time\n"
    script += "with watcher(True) as w:\n w.cell('c')\n w.stage('s', 'scoring')\n"
    script += " for i in range(40): w.progress(i, 100, 'sequences'); time.sleep(0.02)\n"
    parent, child = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "140"}
    process = subprocess.Popen([sys.executable, "-c", script], stderr=child, stdin=child, env=environment)
    os.close(child)
    shown = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    assert process.wait() == 0
    assert b"ETA" in shown
    assert b"/100" in shown


def test_nothing_when_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    watch = watcher(False)
    assert type(watch) is QuietWatcher
    follow(watch)
    assert capsys.readouterr().err == ""


def test_scores_in_short() -> None:
    assert in_short({"hellaswag": {"acc": 0.5, "acc_norm": 0.46}}) == "acc 0.5, acc_norm 0.46"
    assert in_short({"a": {"acc": 0.25}, "b": {"acc": None}}).startswith("a acc 0.25; b")
