"""The reference, from what the program itself is made of: schemas with their comments, argument parsers, docstrings, rules."""

from __future__ import annotations

import ast
import dataclasses
import html
import importlib
import inspect
import io
import pkgutil
import re
import tokenize
from types import ModuleType
from typing import Any

import evalq
from evalq import config, records
from evalq.cli import VERBS
from evalq.facts.confdir import conf_dir, names
from evalq.plan.feasibility import known_errors
from evalq.plan.rulebook import RETIRED_FLAGS, RULES

LIGHT_PACKAGES = ("records", "errors", "judge", "plan", "facts", "report", "study")
NOTE = "*Made from the source of evalq {version} by `make docs`; edit the source, not this page.*"


def pages() -> dict[str, str]:
    """Path under docs/ -> Markdown, for every page of the reference."""
    return {
        "reference/verbs.md": verbs(),
        "reference/configuration.md": configuration(),
        "reference/choices.md": choices(),
        "reference/records.md": record_format(),
        "reference/python.md": python(),
    }


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", NOTE.format(version=evalq.__version__), *parts]) + "\n"


def cell(text: str) -> str:
    """Text in a table: what looks like markup or a column is neither."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "&#124;").replace("*", "&#42;")


def code(text: str) -> str:
    """Code in a table; HTML, because a bar inside backticks is a column to some readers."""
    return f"<code>{cell(text)}</code>" if text else ""


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def verbs() -> str:
    """Every verb with the help that its own parser prints."""
    parts = [
        "`evalq VERB ...`; `python -m evalq ...` without a verb measures and judges. Exit codes: 0 pass, 1 quality fail, "
        "2 usage or config, 3 inconclusive, 4 infeasible, 5 measurement or infrastructure failure."
    ]
    parts.append(
        table(("verb", "what it does"), [(f"[{verb}](#{verb})", cell(what)) for verb, (_, what) in VERBS.items()])
    )
    for verb, (module_name, what) in VERBS.items():
        module = importlib.import_module(module_name)
        text = module.parser().format_help() if hasattr(module, "parser") else _run_help(module)
        parts.append(f"## {verb}\n\n{cell(what)}\n\n```text\n{text.strip()}\n```")
    return _page("Verbs", *parts)


def _run_help(module: ModuleType) -> str:
    return str(module.help_text()) if hasattr(module, "help_text") else inspect.getdoc(module) or ""


def configuration() -> str:
    """Every key of every group: type, default, meaning."""
    parts = [
        "Keys are given as `group.key=value` on the command line or in a file under `conf/<group>/`; an unknown key is an error."
    ]
    nested: dict[str, type] = {}
    for group, schema in config.GROUPS.items():
        choice = f"Files: {', '.join(names(group))}." if names(group) else ""
        parts.append(
            f"## {group}\n\n{cell(inspect.getdoc(schema) or '')} {choice}\n\n{schema_table(schema, group + '.')}"
        )
        nested |= {kind.__name__: kind for kind in _nested(schema)}
    for name, schema in nested.items():
        parts.append(f"## {name}\n\n{cell(inspect.getdoc(schema) or '')}\n\n{schema_table(schema)}")
    own = [field.name for field in dataclasses.fields(config.RunConfig) if field.name not in config.GROUPS]
    parts.append(f"## Top level\n\n{schema_table(config.RunConfig, only=tuple(own))}")
    return _page("Configuration", *parts)


def _nested(schema: type) -> list[type]:
    """Dataclasses that stand inside a schema, at any depth."""
    words = set(re.findall(r"\w+", " ".join(str(field.type) for field in dataclasses.fields(schema))))
    known = vars(importlib.import_module(schema.__module__))
    inner = [kind for name, kind in known.items() if name in words and dataclasses.is_dataclass(kind)]
    found: list[type] = []
    for kind in inner:
        if isinstance(kind, type) and kind is not schema:
            found += [kind, *_nested(kind)]
    return found


def schema_table(schema: type, prefix: str = "", only: tuple[str, ...] = ()) -> str:
    """A dataclass as a table; meanings are the comments beside its fields."""
    comments = field_comments(schema)
    rows = []
    for field in dataclasses.fields(schema):
        if not only or field.name in only:
            kind = str(field.type).replace("Scalar", "str | int | float | bool | None")
            rows.append(
                (code(prefix + field.name), code(kind), code(_default(field)), cell(comments.get(field.name, "")))
            )
    return table(("key", "type", "default", "meaning"), rows)


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return "needed" if field.default == "???" else repr(field.default)
    if field.default_factory is dataclasses.MISSING:
        return ""
    made = field.default_factory()
    return "" if dataclasses.is_dataclass(made) else repr(made)


def field_comments(schema: type) -> dict[str, str]:
    """Field -> the comment at the end of its line."""
    source = inspect.getsource(schema)
    lines = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            words = [lines[n] for n in range(node.lineno, (node.end_lineno or node.lineno) + 1) if n in lines]
            found[node.target.id] = " ".join(words)
    return found


def choices() -> str:
    """Every file of conf/ with what it says of itself."""
    parts = ["What can stand after `+group=` or `group=`. Each is a file under `conf/`, with units and sources in it."]
    for folder in sorted(path for path in conf_dir().iterdir() if path.is_dir()):
        rows = [
            (code(file.stem), cell(_first_comment(file.read_text(encoding="utf-8"))))
            for file in sorted(folder.glob("*.yaml"))
        ]
        if rows:
            parts.append(f"## {folder.name}\n\n{table(('name', 'what it is'), rows)}")
    return _page("Choices", *parts)


def _first_comment(text: str) -> str:
    """The comment at the top of a file, its first paragraph."""
    lines = []
    for line in text.splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#") or line.strip() == "#":
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines)


def record_format() -> str:
    """The record on disk: record.json and its tables."""
    parts = [f"Schema version {records.SCHEMA_VERSION}.", f"```text\n{inspect.getdoc(records)}\n```"]
    for name, kind in vars(records).items():
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind.__module__ == records.__name__:
            parts.append(f"## {name}\n\n{cell(inspect.getdoc(kind) or '')}\n\n{schema_table(kind)}")
    for name, schema in records.SCHEMAS.items():
        rows = [(code(field.name), code(str(field.type))) for field in schema()]
        parts.append(f"## {name}.parquet\n\n{cell(inspect.getdoc(schema) or '')}\n\n{table(('column', 'type'), rows)}")
    return _page("Records", *parts)


def python() -> str:
    """Public functions and classes of the light part, which need no engine."""
    parts = ["The light part: usable in Python with neither an engine nor MLflow installed."]
    for package in LIGHT_PACKAGES:
        for module in _modules(f"evalq.{package}"):
            rows = [(code(_signature(name, what)), cell(_first_paragraph(what))) for name, what in _public(module)]
            if rows:
                about = cell(inspect.getdoc(module) or "")
                parts.append(f"## {module.__name__}\n\n{about}\n\n{table(('name', 'what it does'), rows)}")
    return _page("Python", *parts)


def _modules(name: str) -> list[ModuleType]:
    module = importlib.import_module(name)
    inside = pkgutil.walk_packages(module.__path__, name + ".") if hasattr(module, "__path__") else []
    return [module, *(importlib.import_module(found.name) for found in inside)]


def _public(module: ModuleType) -> list[tuple[str, Any]]:
    own = [(name, what) for name, what in vars(module).items() if getattr(what, "__module__", None) == module.__name__]
    return [(name, what) for name, what in own if not name.startswith("_") and callable(what)]


def _signature(name: str, what: Any) -> str:
    if inspect.isclass(what):
        return f"class {name}"
    try:
        return f"{name}{inspect.signature(what)}"
    except (TypeError, ValueError):
        return name


def _first_paragraph(what: Any) -> str:
    return (inspect.getdoc(what) or "").strip()


def rules() -> str:
    """Every rule of the planner: what it demands, what to do, where it comes from."""
    rows = [
        (code(rule.id), rule.severity, cell(rule.demand), cell(rule.remedy), cell(rule.source))
        for rule in RULES.values()
    ]
    return table(("rule", "severity", "what is demanded", "what to do", "source"), rows)


def engine_errors() -> str:
    """Patterns of the engine's error texts, with the remedy of the rule behind each."""
    rows = [(code(pattern), code(rule), cell(RULES[rule].remedy)) for pattern, rule in known_errors()]
    return table(("error text (regular expression)", "rule", "what to do"), rows)


def retired_flags() -> str:
    """Engine arguments that are gone, and what replaced them."""
    rows = [(code("--" + flag.replace("_", "-")), cell(instead)) for flag, instead in RETIRED_FLAGS.items()]
    return table(("flag", "instead"), rows)
