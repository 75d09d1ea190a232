"""The release policy: a YAML file of GateConfig keys, checked whole, with its shares turned into numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalq.config import GateConfig, nearest, parse_share
from evalq.config_check import check_gate
from evalq.errors import ConfigError
from evalq.records import Ledger, Load, Scalar

NEVER_ALLOWED = ("load_format",)  # random weights measure no quality, whatever is allowed
METRIC_UNITS = {"word_perplexity": "words", "byte_perplexity": "bytes", "token_perplexity": "tokens"}
LEDGER_QUANTITIES = (
    "weight_bytes",
    "checkpoint_bytes",
    "kv_bytes_per_token",
    "kv_pool_tokens",
    "kv_pool_bytes",
    "peak_bytes",
)
LOAD_QUANTITIES = (
    "output_tokens_per_second",
    "total_tokens_per_second",
    "request_latency_p50_seconds",
    "request_latency_p99_seconds",
)
_CONDITION = re.compile(r"\s*([A-Za-z_0-9]+)\s*(?:@\s*([A-Za-z0-9_.-]+))?\s*(<=|>=)\s*(.+?)\s*")


@dataclass(frozen=True)
class Condition:
    """Candidate's quantity against a share of the baseline's; `load` is a load's name or its concurrency."""

    text: str
    quantity: str
    load: str | None
    at_most: bool
    share: float


@dataclass(frozen=True)
class Policy:
    """GateConfig with every share as a number; `source` is what the verdict keeps."""

    source: GateConfig
    target: float
    limit: float
    suspect_improvement: float
    margins: dict[str, float]
    conditions: tuple[Condition, ...]

    def as_scalars(self) -> dict[str, Scalar]:
        """The policy as flat text and numbers, for the verdict."""
        return flat_policy(self.source)


def flat_policy(gate: GateConfig) -> dict[str, Scalar]:
    """Every key of a policy as one text or number."""
    flat: dict[str, Scalar] = {}
    for name, value in dataclasses.asdict(gate).items():
        if isinstance(value, dict):
            flat[name] = ", ".join(f"{key}: {item}" for key, item in value.items())
        elif isinstance(value, list):
            flat[name] = ", ".join(str(item) for item in value)
        else:
            flat[name] = value
    return flat


def checked_policy(gate: GateConfig) -> Policy:
    """Parse a policy. Errors: one ConfigError that lists every problem."""
    problems = list(check_gate(gate))
    if gate.metric not in METRIC_UNITS:
        problems.append(f"gate.metric={gate.metric!r}: {nearest(gate.metric, tuple(METRIC_UNITS))}")
    for task in gate.required_margins:
        if task not in gate.task_margins and task != "wikitext":
            problems.append(
                f'gate.required_margins names {task}, which has no margin; add task_margins: {{{task}: "1.0%"}}'
            )
    if "wikitext" in {*gate.required_margins, *gate.task_margins}:
        problems.append(
            "wikitext is a perplexity and has no margin; its allowed increase is gate.target and gate.limit"
        )
    problems += [
        f"gate.allow names {name}, which is never excused: random weights measure no quality; leave it out"
        for name in gate.allow
        if name in NEVER_ALLOWED
    ]
    conditions = []
    for text in gate.conditions:
        try:
            conditions.append(parse_condition(text))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(*problems)
    return Policy(
        source=gate,
        target=parse_share(gate.target, "gate.target"),
        limit=parse_share(gate.limit, "gate.limit"),
        suspect_improvement=parse_share(gate.suspect_improvement, "gate.suspect_improvement"),
        margins={task: parse_share(share, task) for task, share in gate.task_margins.items()},
        conditions=tuple(conditions),
    )


def parse_condition(text: str) -> Condition:
    """Parse "weight_bytes <= 70%" or "output_tokens_per_second@100 >= 100%", shares of the baseline's figure.

    Errors: ConfigError for another form, an unknown quantity, or a load figure without the load it is of.
    """
    match = _CONDITION.fullmatch(text)
    if not match:
        raise ConfigError(
            f'gate.conditions: {text!r} is not a condition; write e.g. "weight_bytes <= 70%" or '
            '"output_tokens_per_second@100 >= 100%", shares of the baseline'
        )
    quantity, load, sign, share = match.groups()
    if quantity not in LEDGER_QUANTITIES + LOAD_QUANTITIES:
        raise ConfigError(f"gate.conditions: {text!r}: {nearest(quantity, LEDGER_QUANTITIES + LOAD_QUANTITIES)}")
    if (quantity in LOAD_QUANTITIES) != (load is not None):
        advice = f"name its load, e.g. {quantity}@100" if load is None else "name no load"
        raise ConfigError(f"gate.conditions: {text!r} must {advice}")
    return Condition(text, quantity, load, sign == "<=", parse_share(share, f"gate.conditions: {text!r}"))


def read_policy(path: Path | str) -> GateConfig:
    """Read a policy file. Errors: ConfigError for a missing file, bad YAML, unknown or mistyped keys."""
    import yaml

    file = Path(path)
    try:
        file = policy_file(file)
        text = file.read_text(encoding="utf-8")
        data = yaml.safe_load(text)
        repeated = _repeated_key(yaml.compose(text, Loader=yaml.SafeLoader), set())
    except OSError as error:
        raise ConfigError(f"policy {file} cannot be read ({error.strerror}); give a YAML file of gate keys") from error
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError) as error:
        # A date, a number or a tag that YAML knows and Python does not: "limit: 2024-13-45", "strict: !!bool maybe".
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"policy {file} is not YAML ({why}); give a YAML file of gate keys") from error
    if repeated:
        raise ConfigError(f"policy {file} has the key {repeated} twice; keep the one that is meant")
    if not isinstance(data, dict):
        raise ConfigError(f"policy {file} is empty or no mapping; write keys such as target: 1.0%")
    return policy_from_mapping(data, str(file))


def _repeated_key(node: Any, seen: set[int]) -> str | None:
    """A key that one mapping of a YAML tree holds twice; YAML itself takes the last in silence."""
    import yaml

    if id(node) in seen:  # an alias
        return None
    seen.add(id(node))
    children = list(node.value) if isinstance(node, yaml.CollectionNode) else []
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in children if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            return str(twice)
        children = [value for _, value in children]
    return next((found for child in children if (found := _repeated_key(child, seen))), None)


def policy_file(given: Path) -> Path:
    """The file itself, or conf/gate/NAME.yaml of evalq for a bare name."""
    if given.suffix or given.exists() or len(given.parts) != 1:
        return given
    package = Path(__file__).resolve().parents[1]
    folders = [package / "conf" / "gate", package.parent / "conf" / "gate"]  # in a wheel; in a checkout
    found = [folder / f"{given}.yaml" for folder in folders if (folder / f"{given}.yaml").is_file()]
    if not found:
        names = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
        raise ConfigError(f"no policy {given}: {nearest(str(given), names)}, or the path of a YAML file")
    return found[0]


def policy_from_mapping(data: dict[Any, Any], where: str) -> GateConfig:
    """Build GateConfig from a mapping. Errors: ConfigError listing every unknown or mistyped key."""
    fields = {f.name: f for f in dataclasses.fields(GateConfig)}
    default = GateConfig()
    problems, values = [], {}
    for key, value in data.items():
        if key not in fields:
            problems.append(f"{where}: unknown key {key!r}; {nearest(str(key), tuple(fields))}")
            continue
        built, wanted = _typed(key, value, getattr(default, key))
        wanted = wanted or _unwritable(built)
        if wanted:
            problems.append(f"{where}: {key} is {value!r}; expected {wanted}")
        values[key] = built
    if problems:
        raise ConfigError(*problems)
    return GateConfig(**values)


def _unwritable(value: Any) -> str:
    """What was expected of a text that no verdict could repeat."""
    texts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    try:
        "".join(str(text) for text in texts).encode()
    except UnicodeEncodeError:
        return "text without half characters (lone surrogates)"
    return ""


def _typed(key: str, value: Any, like: Any) -> tuple[Any, str]:
    """The value in the type of the default `like`, and what was expected when it does not fit."""
    if isinstance(like, bool):
        return value, "" if isinstance(value, bool) else "true or false"
    if isinstance(like, str):  # a share in YAML may look like a number
        fits = isinstance(value, str | int | float) and not isinstance(value, bool)
        return str(value), "" if fits else "text"
    if isinstance(like, int | float):
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        fits = fits and (isinstance(value, int) or (isinstance(like, float) and math.isfinite(value)))
        return value, "" if fits else "a number" if isinstance(like, float) else "a whole number"
    if isinstance(like, dict):
        return _typed_mapping(value)
    return _typed_list(value, key)


def _typed_list(value: Any, key: str) -> tuple[Any, str]:
    wanted = int if key == "looks" else str
    fits = isinstance(value, list) and all(type(item) is wanted for item in value)
    return value, "" if fits else f"a list of {'whole numbers' if wanted is int else 'names'}"


def _typed_mapping(value: Any) -> tuple[Any, str]:
    if not isinstance(value, dict):
        return value, "a mapping"
    return {str(key): str(item) for key, item in value.items()}, ""


def load_figure(loads: dict[str, Load], key: str) -> Load | None:
    """The load called `key`, or the only one whose concurrency is `key`."""
    if key in loads:
        return loads[key]
    at = [load for load in loads.values() if str(load.concurrency) == key]
    return at[0] if len(at) == 1 else None


def ledger_figure(ledger: Ledger | None, quantity: str) -> float | None:
    """One figure of the memory ledger, bytes or tokens; None when it was not measured."""
    value = None if ledger is None else getattr(ledger, quantity)
    return None if value is None else float(value)
