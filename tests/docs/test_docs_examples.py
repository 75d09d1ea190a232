"""Every command in the documents is one that the program takes, and every Python example gives what it says."""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib
import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from evalq.cli import VERBS, main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "jobs").rglob("*.md")])
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```|^((?: {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
LIGHT_RUNS = ("plan", "explain")  # verbs that answer at once and need nothing
PLACEHOLDER = re.compile(r"^(?:RECORD|BASELINE|CANDIDATE|STUDY|[A-Z])$")
OWN = {"my-llama": "model", "w8a16-attention": "quant"}  # choices that the pages themselves define


def commands(page: Path) -> list[list[str]]:
    """Arguments of every evalq command in the blocks of a page, joined over continued lines, without comments."""
    found = []
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        text = (match[1] or match[2] or "").replace("\\\n", " ")
        for line in text.splitlines():
            words = re.match(r"\s*(?:[A-Z_]+=\S+ )*(?:evalq|python3? -m evalq)\s+(?P<rest>.*)", line)
            if words and "..." not in line and "[--" not in line:
                rest = re.split(r"\s+(?:\||&&|#|;|>)\s?|\s{3,}(?=[a-z])", words["rest"])[0]
                found.append(shlex.split(rest))
    return found


ALL = [(page.relative_to(ROOT).as_posix(), arguments) for page in PAGES for arguments in commands(page)]


def test_there_are_examples_to_test() -> None:
    assert len(ALL) > 40
    assert {page for page, _ in ALL} >= {"README.md", "docs/index.md", "docs/report.md", "docs/own-model.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_examples_give_what_they_say(page: Path) -> None:
    assert doctest.testfile(str(page), module_relative=False).failed == 0


@pytest.mark.parametrize(("page", "arguments"), ALL, ids=[f"{page}:{' '.join(a)[:60]}" for page, a in ALL])
def test_commands_are_taken(page: str, arguments: list[str]) -> None:
    """Verbs: their parser takes the arguments, and quick ones run. Runs: every cell composes and is checked."""
    if set(re.split(r"[\s=,]", " ".join(arguments))) & set(OWN):
        pytest.skip("a choice that this page defines: tested with its file below")
    verb, rest = (arguments[0], arguments[1:]) if arguments and arguments[0] in VERBS else ("run", arguments)
    module = importlib.import_module(VERBS[verb][0])
    if verb in LIGHT_RUNS and not any("/" in word or PLACEHOLDER.match(word) for word in rest):
        assert main([verb, *rest]) in (0, 4)
    elif verb == "sweep":  # takes what a run takes, and flags of its own
        composed(["-m", *(word for word in rest if not word.startswith("--"))])
    elif verb != "run":
        assert parsed(module.parser(), rest)
    elif not any(PLACEHOLDER.match(word.split("=")[-1]) for word in rest):
        composed(rest)


def parsed(parser: argparse.ArgumentParser, arguments: list[str]) -> bool:
    error = io.StringIO()
    parse = parser.parse_known_args if "quantize" in parser.prog else parser.parse_args
    code: object = 0
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(error):
        try:
            parse(arguments)
        except SystemExit as end:
            code = end.code
    assert not code, error.getvalue()
    return True


def composed(arguments: list[str]) -> None:
    from evalq.app import collect

    if arguments in ([], ["--help"]):
        return
    configs = collect(arguments)
    assert configs or "--cfg" in arguments


def yaml_files() -> dict[str, str]:
    """conf/... -> text, of the files that the pages define: a block whose first line names the file."""
    found = {}
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
            named = re.match(r"# (conf/\w+/[\w.-]+\.yaml)\n", match[1] or "")
            if named:
                found[named[1]] = match[1]
    return found


def test_files_of_ones_own_work_where_the_pages_put_them(tmp_path: Path) -> None:
    """The pages' YAML in a copy of the source tree: planned, composed, and named in the help."""
    files = yaml_files()
    assert set(files) == {"conf/model/my-llama.yaml", "conf/quant/w8a16-attention.yaml"}
    for folder in ("evalq", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in files.items():
        assert yaml.safe_load(text)["name"] == Path(name).stem
        (tmp_path / name).write_text(text, encoding="utf-8")
    for arguments in (
        ["plan", "+model=my-llama", "+quant=fp8-weights-kv", "+gpu=h100"],
        ["plan", "+model=llama3-8b", "+quant=w8a16-attention", "+gpu=h100"],
        ["+model=my-llama", "+quant=w8a16-attention", "gpu=h100", "--cfg", "job"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "evalq", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=environment(tmp_path),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "my-llama" in done.stdout or "w8a16-attention" in done.stdout


def environment(folder: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(folder)}
