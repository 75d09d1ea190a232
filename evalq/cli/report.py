"""`evalq report STUDY_OR_RECORDS... --out DIR`: a study as one self-contained page, and as Markdown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from evalq.cli.locate import find_record, records_root
from evalq.errors import EXIT_PASS, ConfigError, RecordError
from evalq.records import write_text

PAGE, TEXT = "index.html", "report.md"
EPILOG = """\
exit codes: 0 the report was written, whatever its verdicts say; 2 nothing to report or a bad request. It releases nothing:
`evalq gate` does. Only the light install is needed; charts need evalq[report].
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of `evalq report`."""
    made = argparse.ArgumentParser(
        prog="evalq report", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "what",
        nargs="+",
        metavar="STUDY_OR_RECORDS",
        help="folder with records, record folder, record id, or the name of a study",
    )
    made.add_argument("--out", metavar="DIR", required=True, help=f"folder that {PAGE} and {TEXT} are written to")
    made.add_argument("--title", help="heading of the page (default: model, device and number of schemes)")
    made.add_argument("--command", default="", help="the command that made the records, for the page")
    made.add_argument("--policy", metavar="FILE", default="default", help="policy for records that have no verdict yet")
    made.add_argument("--judge", action="store_true", help="judge all of them anew by --policy, kept verdicts or not")
    made.add_argument(
        "--records",
        metavar="DIR",
        help="where ids and studies are looked up (default: $EVALQ_HOME/records, else runs/records)",
    )
    return made


def main(argv: list[str]) -> int:
    """Write the page; 0 when it is there. Errors: RecordError, ConfigError."""
    arguments = parser().parse_args(argv)
    if not all(text.strip() for text in [*arguments.what, arguments.out]):  # "" would be the current folder
        raise ConfigError("a name is empty; give a folder of records, a record or a study, and --out FOLDER")
    from evalq.report.page.compose import study_page
    from evalq.report.page.draw import INSTALL, can_draw
    from evalq.report.page.html import page_html
    from evalq.report.page.markdown import page_markdown
    from evalq.report.progress import watcher
    from evalq.study.build import build_study

    folders = find_folders(arguments.what, records_root(arguments.records))
    with watcher(True) as shown:
        view = build_study(folders, arguments.title, arguments.command, arguments.policy, arguments.judge, shown)
    page = study_page(view)
    out = Path(arguments.out)
    write_text(out / PAGE, page_html(page))
    write_text(out / TEXT, page_markdown(page))
    if not can_draw():
        print(f"evalq report: tables only; charts need {INSTALL}", file=sys.stderr)
    for note in view.notes:
        print(f"note: {note}", file=sys.stderr)
    print(out / PAGE)
    return EXIT_PASS


def find_folders(names: Sequence[str], root: Path) -> list[Path]:
    """Record folders behind names given on a command line. Errors: RecordError for a name that nothing has."""
    from evalq.study.gather import record_folders, study_folders

    folders: list[Path] = []
    for name in names:
        place = Path(name)
        found = record_folders(place) if place.is_dir() else study_folders(root, name)
        if not found and place.is_dir():
            raise RecordError(f"no record under {place}; give a folder that holds record folders")
        folders += found or [find_record(name, root)[1]]
    return list(dict.fromkeys(folder.resolve() for folder in folders))
