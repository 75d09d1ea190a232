"""Where conf/ is: inside the installed package, else beside the package in a source tree."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from evalq.errors import ConfigError


@cache
def conf_dir() -> Path:
    """The conf folder. Errors: ConfigError when neither place has one."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if folder.is_dir():
            return folder
    raise ConfigError(f"no conf folder in {package} or beside it; install evalq again or run from its source tree")


@cache
def names(group: str) -> tuple[str, ...]:
    """Names of one configuration group, e.g. names("gpu"); empty when the group has no folder."""
    return tuple(sorted(file.stem for file in (conf_dir() / group).glob("*.yaml")))
