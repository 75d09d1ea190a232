"""Links of every Markdown file lead somewhere; the pages build strictly, fetch nothing, and hold what they are made from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evalq.cli import VERBS
from evalq.config import GROUPS
from evalq.plan.rulebook import RULES

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<!\\)\[(?:[^\]\\]|\\.)*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def tracked(pattern: str = "*.md") -> list[Path]:
    """Markdown files of the project: those that git knows, else all but the environment's."""
    done = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]
    return [
        file for file in ROOT.rglob(pattern) if not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
    ]


def anchors(file: Path) -> set[str]:
    headings = HEADING.findall(file.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def leads_somewhere(file: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True  # elsewhere in the world; nothing here can tell
    name, _, anchor = target.partition("#")
    place = (file.parent / name).resolve() if name else file
    if ROOT / "docs" / "reference" in place.parents:
        return True  # made by the build, which is strict
    return place.exists() and (not anchor or place.suffix != ".md" or anchor in anchors(place))


@pytest.mark.parametrize("file", tracked(), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(file: Path) -> None:
    text = CODE.sub("", file.read_text(encoding="utf-8"))
    broken = [target for target in LINK.findall(text) if not leads_somewhere(file, target)]
    assert broken == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; `make docs` installs it")
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def text_of(site: Path, page: str) -> str:
    return (site / page).read_text(encoding="utf-8")


def test_the_reference_holds_every_verb_key_and_rule(site: Path) -> None:
    verbs = text_of(site, "reference/verbs.html")
    assert all(f'id="{verb}"' in verbs for verb in VERBS)
    configuration = text_of(site, "reference/configuration.html")
    assert all(f"<code>{group}." in configuration for group in GROUPS)
    assert "never exceeded" in configuration, "meanings come from the comments beside the fields"
    troubles = text_of(site, "troubleshooting.html")
    assert all(f"<code>{rule}</code>" in troubles for rule in RULES)
    assert "does not support this GEMM problem" in troubles
    assert "evalq.judge.gate" in text_of(site, "reference/python.html")
    assert "kv_bytes_per_token" in text_of(site, "reference/records.html")


def test_pages_fetch_nothing(site: Path) -> None:
    """Scripts, styles, fonts and pictures lie in the site itself; only links that a person follows lead away."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe|source)[^>]+src="([^"]+)"', text)
        fetched += re.findall(r'<link[^>]+rel="(?:stylesheet|icon|preload|preconnect)"[^>]*href="([^"]+)"', text)
        assert [one for one in fetched if one.startswith(("http:", "https:", "//"))] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?https?:", style.read_text(encoding="utf-8")), style


def test_results_are_pages_too(site: Path) -> None:
    assert "Results" in text_of(site, "index.html")
    assert (site / "reports" / "LOG.html").is_file()
