"""Composition of configs (the only module that uses Hydra). Hydra composes; running is the business of evalq.sweep.

Hydra's own command line is kept as it is (`+model=... +quant=...`, `-m`, `--cfg job`). Its task function only collects the composed
configs, so that every cell of a multirun is checked before the first engine starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra import main as hydra_main
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evalq.config import GROUPS, RunConfig, nearest
from evalq.config_check import check
from evalq.errors import ConfigError
from evalq.facts.confdir import conf_dir, names
from evalq.facts.gpus import detect

REQUIRED_GROUPS = ("model", "quant")
NUMBER_LIKE = re.compile(
    r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?(e[-+]?[0-9_]+)?|[-+]?\.[0-9][0-9_]*(e[-+]?[0-9_]+)?|[-+]?(inf|nan)|true|false|yes|no|on|off",
    re.IGNORECASE,
)
PLAIN_TEXT = re.compile(r"[\w./:@%+?|*-]+", re.ASCII)  # what Hydra's grammar takes unquoted and leaves as it is
OVERRIDE = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[A-Za-z_][\w./@-]*)=(?P<value>.*)", re.DOTALL)


def register_schemas() -> None:
    """Tell Hydra the schema of every group (base_<group>) and of the whole."""
    store = ConfigStore.instance()
    store.store(name="base_config", node=RunConfig)
    for group, schema in GROUPS.items():
        store.store(group=group, name=f"base_{group}", node=schema)
    OmegaConf.register_new_resolver("evalq_home", lambda *_: str(default_root()), replace=True)


def default_root() -> Path:
    """$EVALQ_HOME, else `runs` in the nearest folder at or above the current one with pyproject.toml or .git, else `runs` here."""
    given = os.environ.get("EVALQ_HOME")
    if given:
        return Path(given).expanduser().resolve()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "pyproject.toml").is_file() or (folder / ".git").exists():
            return folder / "runs"
    return here / "runs"


def compose(overrides: list[str]) -> RunConfig:
    """One composed and checked config. Errors: ConfigError listing every problem."""
    register_schemas()
    with _hydra_errors(), initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra_compose("config", prepare(overrides)))


def collect(arguments: list[str]) -> list[RunConfig]:
    """Hydra's command line: the configs it composed, one per cell; empty when it only printed (--help, --cfg).

    Errors: ConfigError in plain words for anything that does not compose; all cells are checked.
    """
    register_schemas()
    collected: list[RunConfig] = []
    problems: list[str] = []

    def task(config: DictConfig) -> None:
        # Raising here would make Hydra print a trace and stop a multirun at its first bad cell.
        try:
            collected.append(to_config(config))
        except ConfigError as error:
            problems.extend(error.problems)

    program = hydra_main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(task)
    flags, overrides = split_flags(arguments)
    if experiment_lists(overrides) and "-m" not in flags and not set(flags) & {"--cfg", "-c", "--info", "-i"}:
        flags.append("-m")
    if "-m" in flags and set(flags) & {"--cfg", "-c", "--info", "-i"}:
        raise ConfigError("--cfg and --info print one config and -m asks for several; leave one of them out")
    with (
        _hydra_errors(),
        _arguments([*flags, *prepare(overrides, wanted=not flags or "-m" in flags)]),
        _quiet_sweeper(flags),
    ):
        program()
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return collected


def split_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags (with their values) and the overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    takes_value = {
        "--cfg",
        "-c",
        "--package",
        "-p",
        "--info",
        "-i",
        "--config-name",
        "-cn",
        "--config-dir",
        "-cd",
        "--config-path",
        "-cp",
    }
    waiting = False
    for argument in arguments:
        if waiting or argument.startswith("-"):
            flags.append("-m" if argument == "--multirun" else argument)
            waiting = not waiting and argument in takes_value
        else:
            overrides.append(argument)
    return flags, overrides


def prepare(overrides: list[str], wanted: bool = True) -> list[str]:
    """Overrides as Hydra should see them: names checked, number-like text quoted, paths made absolute, gpu=auto resolved.

    Errors: one ConfigError that lists every unknown name or key.
    """
    problems: list[str] = []
    ready: list[str] = []
    chosen: set[str] = set()
    for override in [*overrides, *experiment_lists(overrides)]:
        match = OVERRIDE.fullmatch(override)
        if not match:
            if not override.startswith("~"):
                problems.append(f"{override!r} is not of the form key=value; see python -m evalq --help")
            ready.append(override)
            continue
        sign, key, value = match["sign"], match["key"], match["value"]
        if key == "hydra/launcher":
            problems.append(
                f"{key}={value}: evalq runs its cells itself and sends none of them through a Hydra launcher; "
                "use executor=ray, or jobs/slurm"
            )
            continue
        if key == "experiment":
            problems.extend(_unknown_choices(key, value))
            ready.append(f"+experiment={value}")
            continue
        if key in GROUPS:
            chosen.add(key)
            problems.extend(_unknown_choices(key, value))
            sign = "+" if key in REQUIRED_GROUPS else sign.replace("+", "")
            value = _detected(value) if key == "gpu" else value
            ready.append(f"{sign}{key}={_quote_numbers(value)}")
            continue
        problems.extend(_unknown_key(key))
        free = _is_free(key) and not sign
        ready.append(f"{'++' if free else sign}{key}={_typed_value(key, value)}")
    if wanted:
        problems.extend(_missing_groups(chosen))
    if problems:
        raise ConfigError(*problems)
    if "gpu" not in chosen:
        ready.append(f"gpu={detect()}")
    return ready


def experiment_lists(overrides: list[str]) -> list[str]:
    """The lists of the chosen experiment file (its hydra.sweeper.params) as overrides, but for keys that were given.

    Errors: ConfigError for a file that is no YAML mapping, and for several experiments of which one has lists.
    """
    parts = [match for match in map(OVERRIDE.fullmatch, overrides) if match]
    given = {match["key"] for match in parts}
    chosen = [name.strip() for match in parts if match["key"] == "experiment" for name in match["value"].split(",")]
    found = {name: lists for name in chosen if (lists := _lists_of(name))}
    if found and len(chosen) > 1:
        raise ConfigError(
            f"experiment={','.join(chosen)}: {', '.join(found)} has lists of its own; run one experiment at a time"
        )
    lists = next(iter(found.values()), {})
    return [f"{key}={value}" for key, value in lists.items() if key.lstrip("+") not in given]


def _lists_of(experiment: str) -> dict[str, str]:
    file = conf_dir() / "experiment" / f"{experiment}.yaml"
    if not file.is_file():
        return {}
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # every scalar stays the text it is
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); correct the file") from error
    params = ((data or {}).get("hydra") or {}).get("sweeper", {}).get("params") or {}
    return {str(key): ",".join(value) if isinstance(value, list) else str(value) for key, value in params.items()}


def _detected(value: str) -> str:
    return detect() if value == "auto" else value


def _missing_groups(chosen: set[str]) -> list[str]:
    return [
        f"no {group} given; add +{group}=NAME with one of: {', '.join(names(group))}"
        for group in REQUIRED_GROUPS
        if group not in chosen
    ]


def _unknown_choices(group: str, value: str) -> list[str]:
    """Problems for names that the group does not have; lists are looked into, choice() and glob() are left to Hydra."""
    if "(" in value:
        return []
    known = names(group)
    return [
        f"{group}={choice!r} is unknown; {nearest(choice, known)}"
        for choice in (part.strip().strip("'\"") for part in value.split(","))
        if choice not in known
    ]


def _unknown_key(key: str) -> list[str]:
    """Problems for a dotted key that no schema has; keys below a free mapping are free."""
    if key.startswith("hydra"):
        return []
    kind: Any = RunConfig
    parts = key.split(".")
    for depth, part in enumerate(parts):
        origin = typing.get_origin(kind)
        if kind is Any or (origin is dict and typing.get_args(kind)[1] is Any):
            return []
        if origin is dict:
            kind = _plain(typing.get_args(kind)[1])
            continue
        if not dataclasses.is_dataclass(kind):
            return [f"{key} goes deeper than the config: {'.'.join(parts[:depth])} is a single value"]
        hints = typing.get_type_hints(kind)
        if part not in hints:
            where = ".".join(parts[:depth])
            at = f" in {where}" if where else ""
            return [f"{key}: there is no {part!r}{at}; {nearest(part, list(hints))}"]
        kind = _plain(hints[part])
    return []


def _is_free(key: str) -> bool:
    """Whether a key is or lies below a free mapping (engine.extra.X), where Hydra wants to be told to add it."""
    if typing.get_origin(_kind_of(key)) is dict:
        return True
    kind: Any = RunConfig
    for part in key.split(".")[:-1]:
        kind = _plain(kind)
        if dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind).get(part, Any)
        elif typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
    return kind is Any or typing.get_origin(_plain(kind)) is dict


def _plain(kind: Any) -> Any:
    """The type without its None."""
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    return options[0] if options and type(None) in typing.get_args(kind) else kind


def _kind_of(key: str) -> Any:
    kind: Any = RunConfig
    for part in key.split("."):
        kind = _plain(kind)
        if typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        elif dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind).get(part, Any)
        else:
            return Any
    return _plain(kind)


PATH_KEYS = ("model.path", "data.root", "paths.root")
SWEEP_FUNCTION = re.compile(r"(choice|range|interval|glob|tag|sort|shuffle)\(")


def _typed_value(key: str, value: str) -> str:
    """Quote what is text by schema and looks like something else; make paths absolute from where evalq was called."""
    kind = _kind_of(key)
    if kind in (list[str], dict[str, str]):
        return _quoted_items(value)
    if kind is not str or value in ("null", "") or value.startswith(("'", '"', "${")):
        return value
    if key in PATH_KEYS:
        return _quoted(str(Path(value).expanduser().absolute()))
    if SWEEP_FUNCTION.match(value):
        return value
    return ",".join(part if _is_plain(part) else _quoted(part) for part in value.split(","))


def _quoted_items(value: str) -> str:
    """Quote the texts of a plain list or mapping: "[a <= 1, 1e5]" or "{owner/set: 1e5}"; nested or quoted ones are left alone."""
    inside = value[1:-1]
    if value[:1] + value[-1:] not in ("[]", "{}") or not inside.strip() or re.search(r"['\"\[\]{}()]|\$", inside):
        return value
    items = [item.partition(":") if value[0] == "{" else ("", "", item) for item in inside.split(",")]
    return value[0] + ",".join(f"{name}{colon}{_quoted(text.strip())}" for name, colon, text in items) + value[-1]


def _is_plain(part: str) -> bool:
    if part.lower() == "null":
        return part == "null"  # Hydra takes NULL for null too, and it is text
    return bool(PLAIN_TEXT.fullmatch(part)) and not NUMBER_LIKE.fullmatch(part)


def _quoted(text: str) -> str:
    """Text as Hydra's grammar quotes it: backslashes count only before a quote."""
    escaped = re.sub(r"(\\*)(')", r"\1\1\\\2", text)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def _quote_numbers(value: str) -> str:
    """ "4_8" -> "'4_8'", in each part of a sweep; Hydra would read it as 48."""
    parts = value.split(",")
    if any("(" in part or "[" in part for part in parts):
        return value
    return ",".join(f"'{part}'" if NUMBER_LIKE.fullmatch(part) else part for part in parts)


def to_config(composed: DictConfig) -> RunConfig:
    """The dataclass of a composed config, checked."""
    missing = [key for key in sorted(OmegaConf.missing_keys(composed)) if not key.startswith("hydra")]
    if missing:
        raise ConfigError(*(f"{key} is not set; give {key}=..." for key in missing))
    container = OmegaConf.to_object(composed)
    if not isinstance(container, RunConfig):
        container = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), composed))
    config = typing.cast(RunConfig, container)
    check(config)
    return config


@contextlib.contextmanager
def _hydra_errors() -> Iterator[None]:
    """Turn Hydra's and OmegaConf's errors into ConfigError; make Hydra raise instead of printing and exiting."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    GlobalHydra.instance().clear()
    try:
        yield
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_in_words(error)) from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{error.problem_mark or 'a file of conf/'} is not valid YAML: {error.problem}") from error
    finally:
        GlobalHydra.instance().clear()


def _in_words(error: BaseException) -> str:
    """One sentence for a composition error, with the nearest key where a key is unknown."""
    text = str(error)
    cause: BaseException | None = error
    while cause is not None:
        match = re.search(r"Key '([^']+)' (?:is )?not in '([A-Za-z]+)'", str(cause))
        schema = {cls.__name__: cls for cls in (*GROUPS.values(), RunConfig)}.get(match[2]) if match else None
        if match and schema is not None:
            allowed = [f.name for f in dataclasses.fields(schema)]
            return f"the config has no key {match[1]!r} in {match[2]}; {nearest(match[1], allowed)}"
        cause = cause.__cause__ or cause.__context__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    number = re.search(
        r"Value '(.*)' of type '\w+' could not be converted to (Integer|Float)", f"{text} {error.__cause__}"
    )
    if number:
        given = re.match(r"Error merging override (\S+)", text)
        wanted = "a whole number, e.g. 16" if number[2] == "Integer" else "a number, e.g. 0.9"
        return f"{given[1] if given else number[1]} is no number of the kind that belongs there; give {wanted}"
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read; put quotes inside quotes around text: key='\"a, b\"', key='[\"a b\"]'"
    if text.startswith("Ambiguous value"):
        return f"{lines[0]}; several values need -m (a sweep), and one text with a comma needs quotes: key='\"a,b\"'"
    if isinstance(error.__cause__, OmegaConfBaseException):
        lines.append(str(error.__cause__).splitlines()[0])
    return "; ".join(lines[:3]) or type(error).__name__


@contextlib.contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["python -m evalq", *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _quiet_sweeper(flags: list[str]) -> Iterator[None]:
    """Hydra prints each job of a multirun; evalq shows its own table."""
    if "-m" not in flags:
        yield
        return
    swallowed = io.StringIO()
    with contextlib.redirect_stdout(swallowed):
        yield
