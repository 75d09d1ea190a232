"""Errors a user sees. Each says what was given, what is allowed and what to do, in one plain sentence."""

from __future__ import annotations

EXIT_PASS = 0
EXIT_QUALITY_FAIL = 1
EXIT_CONFIG = 2
EXIT_INCONCLUSIVE = 3
EXIT_INFEASIBLE = 4
EXIT_MEASUREMENT = 5
EXIT_INTERRUPTED = 130


class EvalqError(Exception):
    """Base of everything evalq raises on purpose; `exit_code` is what the command line ends with."""

    exit_code: int = EXIT_MEASUREMENT


class ConfigError(EvalqError):
    """The request itself is wrong: unknown name or key, value out of range, contradictory settings."""

    exit_code = EXIT_CONFIG

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


class InfeasibleError(EvalqError):
    """The request is well formed but cannot run on this hardware or engine; names the rule."""

    exit_code = EXIT_INFEASIBLE


class MissingExtraError(ConfigError):
    """An optional package is needed and absent."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package {package}, which is not installed; "
            f"install it with: pip install 'evalq[{extra}]'"
        )


class MeasurementError(EvalqError):
    """Something failed while measuring. `kind` is one of FAILURE_KINDS; never a statement about quality."""

    exit_code = EXIT_MEASUREMENT

    def __init__(self, message: str, kind: str = "engine") -> None:
        if kind not in FAILURE_KINDS:
            raise ValueError(f"unknown failure kind {kind!r}; use one of {', '.join(FAILURE_KINDS)}")
        self.kind = kind
        super().__init__(message)


class RecordError(EvalqError):
    """A record or verdict file is missing, damaged, of another version, or not what it claims to be."""

    exit_code = EXIT_CONFIG


FAILURE_KINDS = (
    "engine",  # the engine raised or died
    "oom",  # out of device or host memory
    "timeout",  # start-up or a step took longer than its limit
    "no_kv_room",  # the KV cache does not hold one window
    "port",  # port or device busy
    "checkpoint",  # unreadable, truncated or foreign checkpoint
    "data",  # evaluation data missing or damaged
    "hub",  # hub offline, refused or rate limited
    "environment",  # the separate environment of calibrated methods cannot be made, or its program failed
    "disk",  # disk full or not writable
    "unsupported",  # the engine refuses the scheme on this device
    "interrupted",  # Ctrl-C or SIGTERM
    "incomplete",  # the worker ended without a complete record
    "dirty_device",  # memory of an earlier process is still held
)
