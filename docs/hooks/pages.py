"""mkdocs hook: adds the generated pages, fills in the generated tables, and lets links to reports/ lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
import reference  # noqa: E402  (mkdocs puts neither folder on the path)

MARKERS = {
    "rules": reference.rules,
    "engine errors": reference.engine_errors,
    "retired flags": reference.retired_flags,
}
OUTSIDE = re.compile(r"\[(?P<text>[^\]]*)\]\((?:\.\./)+(?P<path>[\w./-]+)(?P<anchor>#[\w-]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    """The reference, and the studies and tables of reports/ as pages; pages that no one put into the contents get there."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, name, content=text))
    for file in sorted((*(ROOT / "reports").rglob("*.md"), *(ROOT / "reports").rglob("index.html"))):
        name = as_page(file.relative_to(ROOT).as_posix())
        files.append(File.generated(config, name, content=file.read_text(encoding="utf-8")))
    pages = sorted(file.src_uri for file in files.documentation_pages())
    known = str(config["nav"])
    depth = next(entry["In depth"] for entry in config["nav"] if "In depth" in entry)
    depth.extend(page for page in pages if "/" not in page and f"'{page}'" not in known)
    config["nav"].append({"Design notes": [page for page in pages if page.startswith("design/")]})
    config["nav"].append({"Results": [page for page in pages if page.startswith("reports/")]})
    return files


def as_page(name: str) -> str:
    """A study's README under another name: mkdocs would make it index.html, which is the study's report."""
    return name.replace("README.md", "study.md") if name.startswith("reports/") else name


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill in what is generated; links that leave docs/ lead to the page made of that file, or become plain text."""
    for name, make in MARKERS.items():
        marker = f"<!-- generated: {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    depth = page.file.src_uri.count("/")
    if page.file.src_uri.startswith("reports/"):
        markdown = markdown.replace("README.md)", "study.md)")

    def lead(match: re.Match[str]) -> str:
        path = as_page(match["path"])
        target = files.get_file_from_path(path)
        if target is not None:
            return f"[{match['text']}]({'../' * depth}{path}{match['anchor'] or ''})"
        there = (ROOT / match["path"]).exists()  # else the link stays, and the strict build ends with it
        return f"{match['text']} (`{match['path']}` in the repository)" if there else match[0]

    return OUTSIDE.sub(lead, markdown)
