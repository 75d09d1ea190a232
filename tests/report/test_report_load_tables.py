"""Loads of records for the terminal and as Markdown."""

from __future__ import annotations

import dataclasses

import record_builder
from load_builder import level, result
from rich.console import Console

from evalq.cli.loads import main
from evalq.loads.health import without_sensors
from evalq.loads.results import LoadResult
from evalq.records import Record
from evalq.report.load_tables import load_table, markdown


def record(name: str, load: LoadResult) -> Record:
    made = record_builder.record(name, record_builder.baseline_rows(items=10))
    return dataclasses.replace(made, load_results={"ladder": load})


def pair() -> list[Record]:
    no_sensors = without_sensors("no sensors here")
    return [
        record("baseline", result(level(100, 101, 99), health=no_sensors)),
        record("mixed-4-8", result(level(60, 131, 129, minute=1), health=no_sensors)),
    ]


def test_terminal_tables_fit_80_columns_and_say_why() -> None:
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(load_table(pair()))
    text = capture.get()
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    assert "INVALID mixed-4-8 (default), ladder, concurrency 10: the first repeat ran at 46% of the others" in flat
    assert "output_tokens_per_second +29.0 %" in flat
    assert "health: no sensors here" in flat


def test_markdown_has_every_column_and_the_comparison() -> None:
    text = markdown(pair())
    assert "| baseline (default) | ladder: concurrency 10 | 100.0 ± 4.0 |" in text
    assert "INVALID: the first repeat ran at 46% of the others" in text
    assert "| mixed-4-8 (default) against baseline (default), ladder | concurrency 10 |" in text


def test_verb_shows_stored_records(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    from evalq.records import write_record

    for made in pair():
        write_record(tmp_path / made.record_id, made, {})
    folders = [str(folder) for folder in sorted(tmp_path.iterdir())]
    assert main([*folders, "--format", "json"]) == 0
    assert '"mixed-4-8-id"' in capsys.readouterr().out
