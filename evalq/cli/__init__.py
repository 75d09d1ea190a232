"""The command line: verbs, and the run itself when no verb is given."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

from evalq.errors import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_MEASUREMENT, EvalqError

# verb -> (module, what it does). Modules are imported when their verb is used.
VERBS: dict[str, tuple[str, str]] = {
    "run": ("evalq.cli.run", "measure and judge (the same as giving no verb)"),
    "sweep": ("evalq.cli.sweep", "models x schemes x GPUs x engines: the plan, then the cells, resumable"),
    "status": ("evalq.cli.status", "where a sweep is: done, running, failed, and what is missing"),
    "plan": ("evalq.cli.plan", "memory, feasibility and what the gate will see, with no engine"),
    "selfcheck": ("evalq.cli.selfcheck", "whether scores on this engine read the quantised KV cache"),
    "quantize": ("evalq.cli.quantize", "make a checkpoint and nothing else"),
    "search": ("evalq.cli.search", "the smallest checkpoint that the gate passes"),
    "drift": ("evalq.cli.drift", "whether a stored checkpoint still fits new text"),
    "gate": ("evalq.cli.gate", "judge a candidate record against a baseline record"),
    "compare": ("evalq.cli.compare", "two records side by side"),
    "report": ("evalq.cli.report", "a study as one page for people: HTML and Markdown, from records"),
    "inspect": ("evalq.cli.inspect", "what changed: flipped items, worst documents and tokens in their context"),
    "loads": ("evalq.cli.loads", "throughput, latency and device health of stored records, side by side"),
    "explain": ("evalq.cli.explain", "what an engine's error text means and what to do"),
    "ui": ("evalq.cli.ui", "MLflow's pages on the right store, on 127.0.0.1"),
    "promote": ("evalq.cli.promote", "register a checkpoint that passes in MLflow, as release-candidate"),
    "review": (
        "evalq.cli.review",
        "let people compare outputs of baseline and candidate, blind, and read their answers",
    ),
    "sync": ("evalq.cli.sync", "upload to MLflow what is not there yet"),
}
ENGINE_VERBS = ("run", "sweep", "selfcheck", "search", "drift", "review")
_STOPPED = (
    "the engine was stopped and no half record was kept. Run the same command again: "
    "what was already scored is not scored again"
)
_PLAIN = "nothing that was stored before is changed; run the same command again"


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return its exit code; errors of evalq end as one plain sentence on standard error."""
    arguments = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGTERM, _on_sigterm)
    verb = arguments[0] if arguments and arguments[0] in VERBS else "run"
    rest = arguments[1:] if arguments and arguments[0] == verb else arguments
    if verb == "run" and rest and _looks_like_verb(rest[0]):
        return _unknown_verb(rest[0])
    try:
        module = importlib.import_module(VERBS[verb][0])
        return int(module.main(rest))
    except EvalqError as error:
        print(f"evalq: {error}", file=sys.stderr)
        if verb in ("run", "sweep"):
            print(json.dumps({"exit_code": error.exit_code, "released": False, "error": str(error), "cells": []}))
        return error.exit_code
    except KeyboardInterrupt:
        print(f"evalq: interrupted; {_STOPPED if verb in ENGINE_VERBS else _PLAIN}", file=sys.stderr)
        if verb in ("run", "sweep"):
            print(json.dumps({"exit_code": EXIT_INTERRUPTED, "released": False, "error": "interrupted", "cells": []}))
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_MEASUREMENT
    except OSError as error:
        text = f"{error.filename or 'a file'} cannot be used ({error.strerror or error}); is the disk full or the folder not one?"
        print(f"evalq: {text}", file=sys.stderr)
        if verb in ("run", "sweep"):
            print(json.dumps({"exit_code": EXIT_MEASUREMENT, "released": False, "error": text, "cells": []}))
        return EXIT_MEASUREMENT
    except Exception:
        # Python's own exit code for a crash is 1, which here means that quality failed.
        traceback.print_exc()
        print(
            "evalq: this is a defect of evalq, not a statement about the model; please report the trace above",
            file=sys.stderr,
        )
        if verb in ("run", "sweep"):
            print(json.dumps({"exit_code": EXIT_MEASUREMENT, "released": False, "error": "defect", "cells": []}))
        return EXIT_MEASUREMENT


def _looks_like_verb(argument: str) -> bool:
    return "=" not in argument and not argument.startswith(("-", "~"))


def _unknown_verb(given: str) -> int:
    from evalq.config import nearest

    print(f"evalq: there is no verb {given!r}; {nearest(given, tuple(VERBS))}; see evalq --help", file=sys.stderr)
    return EXIT_CONFIG


def _on_sigterm(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends evalq the way Ctrl-C does: the engine is stopped first."""
    raise KeyboardInterrupt
