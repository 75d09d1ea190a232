"""A light composer: conf/ and an override list to a RunConfig, without Hydra, so that planning starts in milliseconds.

It understands what the planner's command line needs: config.yaml's defaults list, one file per group with its own
`override /group: name` lines, `group=name`, `+group=a,b` and `group.key=value`. Later wins: schema defaults,
config.yaml's own values (its _self_ comes first), group files, experiment, overrides. Without quant: quant=baseline.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import types
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from evalq.config import GROUPS, RunConfig, nearest
from evalq.errors import ConfigError
from evalq.facts.confdir import conf_dir, names

ROOT_KEYS = tuple(f.name for f in dataclasses.fields(RunConfig) if f.name not in GROUPS)
_PATTERN = re.compile(r"^(\+{0,2})([A-Za-z_][\w/.@-]*)=(.*)$", re.DOTALL)
_INT = re.compile(r"^[-+]?(0|[1-9][0-9]*)$")
_FLOAT = re.compile(r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][-+]?[0-9]+)?$")


@dataclass
class Request:
    """A parsed override list: what is swept, what is chosen, what is set."""

    choices: dict[str, list[str]] = field(default_factory=dict)  # group -> names
    values: list[tuple[str, str]] = field(default_factory=list)  # dotted key, text

    @property
    def keys(self) -> set[str]:
        return {key for key, _ in self.values}

    def cells(self) -> list[dict[str, str]]:
        """Every combination of the chosen names, in the order given."""
        groups = list(self.choices)
        return [dict(zip(groups, combination)) for combination in itertools.product(*self.choices.values())]


def parse(overrides: list[str]) -> Request:
    """Split an override list. Errors: ConfigError listing every override that is none."""
    request, problems = Request(), []
    for text in overrides:
        match = _PATTERN.match(text)
        if not match:
            problems.append(f"{text!r} is no override; write group=name or group.key=value")
            continue
        key, value = match[2], match[3]
        if key in GROUPS or key == "experiment":
            request.choices[key] = _names_of(key, value)
        elif key in ROOT_KEYS or key.split(".", 1)[0] in GROUPS:
            request.values.append((key, value))
        else:
            known = (*GROUPS, "experiment", *ROOT_KEYS)
            problems.append(f"{key!r} is no group or key: {nearest(key.split('.', 1)[0], known)}")
    if problems:
        raise ConfigError(*problems)
    _take_lists(request)
    return request


def _take_lists(request: Request) -> None:
    """An experiment's own lists (hydra.sweeper.params) count for what the command line did not choose or set."""
    for experiment in request.choices.get("experiment", []):
        params = (_read("experiment", experiment)[0].get("hydra") or {}).get("sweeper", {}).get("params") or {}
        for given, value in params.items():
            key, text = str(given).lstrip("+"), ",".join(value) if isinstance(value, list) else str(value)
            if key in GROUPS and key not in request.choices:
                request.choices[key] = _names_of(key, text)
            elif key not in GROUPS and key not in request.keys:
                request.values.append((key, text))


def _names_of(group: str, value: str) -> list[str]:
    chosen = list(names(group)) if value == "all" else [part.strip() for part in value.split(",") if part.strip()]
    for name in chosen:
        if name not in names(group):
            raise ConfigError(f"{group}={name!r} is not in conf/{group}: {nearest(name, names(group))}")
    if not chosen:
        raise ConfigError(f"{group}= names nothing; allowed: {', '.join(names(group))}")
    return chosen


def compose(request: Request, cell: dict[str, str]) -> RunConfig:
    """The RunConfig of one cell. Errors: ConfigError for unknown keys and values of another type."""
    root, defaults = _root()
    chosen = {group: name for group, name in defaults.items() if group in GROUPS}
    chosen.setdefault("quant", "baseline")
    layers: list[tuple[str, dict[str, Any]]] = []
    experiment = cell.get("experiment")
    body: dict[str, Any] = {}
    if experiment:
        body, overridden = _read("experiment", experiment)
        body.pop("hydra", None)
        chosen.update(overridden)
    chosen.update({group: name for group, name in cell.items() if group in GROUPS})
    _follow_overrides(chosen, cell)
    for group, name in chosen.items():
        if names(group):  # a tree without a group has that group's schema defaults
            layers.append((group, _read(group, name)[0]))
    config = dict(root)
    for group, values in layers:
        config[group] = _merged(config.get(group, {}), values)
    config = _merged(config, body)
    for key, text in request.values:
        _set(config, key, text)
    return typing.cast(RunConfig, _build(RunConfig, config, ""))


def _follow_overrides(chosen: dict[str, str], cell: dict[str, str]) -> None:
    """A group file may choose other groups (`override /data: hub`); what the user chose stays."""
    for group in [group for group in chosen if names(group)]:
        for other, name in _read(group, chosen[group])[1].items():
            if other not in cell:
                chosen[other] = name


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def _root() -> tuple[dict[str, Any], dict[str, str]]:
    """config.yaml's values and chosen groups; without the file, schema defaults."""
    if (conf_dir() / "config.yaml").is_file():
        body, chosen = _read("", "config")
        return {key: value for key, value in body.items() if key in GROUPS or key in ROOT_KEYS}, chosen
    return {}, {"gpu": "auto"}


@cache
def _parsed(group: str, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    import yaml

    file = conf_dir() / group / f"{name}.yaml"
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), Loader=_loader())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); correct the file") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds no mapping; a configuration file is made of key: value lines")
    return data, _chosen_groups(data.pop("defaults", None) or [])


def _read(group: str, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    body, chosen = _parsed(group, name)
    return dict(body), dict(chosen)


def _chosen_groups(defaults: list[Any]) -> dict[str, str]:
    chosen = {}
    for entry in defaults:
        if isinstance(entry, dict):
            for key, name in entry.items():
                group = str(key).removeprefix("override").strip().removeprefix("optional").strip().lstrip("/")
                if name is not None:
                    chosen[group.split("@")[0]] = str(name)
    return chosen


@cache
def _loader() -> Any:
    """PyYAML's C loader with YAML 1.2's plain words: 4_8, 1e5, yes and 1:30 stay text."""
    import yaml

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader: Any = type("ConfLoader", (base,), {"yaml_implicit_resolvers": {}})
    for tag, pattern, first in (
        ("bool", re.compile(r"^(true|false|True|False)$"), "tfTF"),
        ("null", re.compile(r"^(~|null|Null|)$"), ["~", "n", "N", ""]),
        ("int", _INT, "-+0123456789"),
        ("float", re.compile(r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"), "-+0123456789."),
    ):
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", pattern, list(first))
    return loader


def _set(config: dict[str, Any], dotted: str, text: str) -> None:
    """Put an override's text where its key says; it gets its type when the config is built."""
    *parents, last = dotted.split(".")
    place = config
    for part in parents:
        inner = place.get(part)
        place[part] = dict(inner) if isinstance(inner, dict) else {}  # parsed files are cached: never write into them
        place = place[part]
    place[last] = Text(text)


class Text(str):
    """An override's value, still to be typed by the schema."""


def _build(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`. Errors: ConfigError naming the key."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if origin in (types.UnionType, typing.Union):
        inner = next(k for k in typing.get_args(kind) if k is not type(None))
        empty = value is None or (isinstance(value, Text) and value in ("null", "~", ""))
        return None if empty else _build(inner, value, where)
    if isinstance(value, Text):
        return _typed_text(kind, origin, value, where)
    if kind is Any:
        return value
    if origin is dict:
        _demand(isinstance(value, dict), where, "a mapping", value)
        inner = typing.get_args(kind)[1]
        return {str(key): _build(inner, item, f"{where}.{key}") for key, item in value.items()}
    if origin is list:
        _demand(isinstance(value, list), where, "a list", value)
        return [_build(typing.get_args(kind)[0], item, where) for item in value]
    return _build_scalar(kind, value, where)


def _build_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is str:
        _demand(isinstance(value, str | int | float), where, "text", value)
        return str(value)
    if kind is float:
        _demand(isinstance(value, int | float) and not isinstance(value, bool), where, "a number", value)
        return float(value)
    wanted = {int: "a whole number", bool: "true or false"}[kind]
    _demand(isinstance(value, kind) and not (kind is int and isinstance(value, bool)), where, wanted, value)
    return value


def _typed_text(kind: Any, origin: Any, text: str, where: str) -> Any:
    plain = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else str(text)
    if kind is str:
        return plain
    if kind is bool:
        _demand(plain.lower() in ("true", "false"), where, "true or false", plain)
        return plain.lower() == "true"
    if kind is int:
        _demand(_INT.match(plain) is not None, where, "a whole number", plain)
        return int(plain)
    if kind is float:
        _demand(_FLOAT.match(plain) is not None, where, "a number", plain)
        return float(plain)
    import yaml

    try:
        value = yaml.load(str(text), Loader=_loader())
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}={text!r} cannot be read ({error}); quote it") from error
    return _build(kind, value, where) if origin is not None else value


def _demand(ok: bool, where: str, wanted: str, value: Any) -> None:
    if not ok:
        raise ConfigError(f"{where}={value!r} is not {wanted}; correct the value")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build_dataclass(cls: Any, value: Any, where: str) -> Any:
    _demand(isinstance(value, dict), where, "a mapping", value)
    hints = _hints(cls)
    unknown = [key for key in value if key not in hints]
    if unknown:
        dotted = f"{where}.{unknown[0]}" if where else unknown[0]
        raise ConfigError(f"{dotted} is no key of the configuration: {nearest(unknown[0], tuple(hints))}")
    built = {key: _build(hints[key], item, f"{where}.{key}".lstrip(".")) for key, item in value.items()}
    return cls(**built)
