"""`evalq plan`: what fits, on how many GPUs, what is refused and why. No engine, no Hydra, no GPU needed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalq.errors import EXIT_INFEASIBLE, EXIT_PASS, ConfigError, EvalqError, MissingExtraError

if TYPE_CHECKING:
    from evalq.config import ModelConfig, RunConfig
    from evalq.plan.answer import Answer
    from evalq.plan.compose import Request

DESCRIPTION = """Memory, capacity and feasibility of model x quant x gpu, by arithmetic (nothing is measured).

  evalq plan +model=llama3.1-405b +quant=fp8-weights-kv +gpu=mi325x
  evalq plan +model=all +quant=all +gpu=h200,mi325x
  evalq plan --config config.json +gpu=h100 --context 32768 --concurrency 100
  evalq plan +model=llama3-8b +quant=w4a16 +gpu=l40s --emit vllm
"""
EPILOG = "Exit code 4: the cell (or every cell) is refused. Sizes are printed in GiB (2**30 bytes)."


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = argparse.ArgumentParser(
        prog="evalq plan",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("overrides", nargs="*", help="group=name, group=a,b, group=all, or group.key=value")
    made.add_argument("--config", help="a model's config.json, its folder, or its id on the hub, instead of +model")
    made.add_argument("--context", type=int, metavar="TOKENS", help="tokens of one request, prompt and answer")
    made.add_argument("--concurrency", type=int, metavar="REQUESTS", help="requests at once")
    made.add_argument("--emit", choices=["vllm"], help="print the exact command and environment of the engine")
    made.add_argument("--json", action="store_true", help="JSON: a list of cells, sizes in bytes")
    made.add_argument("--claims", action="store_true", help="what the source articles say beside what evalq computes")
    made.add_argument("--rules", action="store_true", help="every rule with its remedy and source")
    return made


def main(argv: list[str]) -> int:
    """Run the verb; returns the exit code."""
    arguments = parser().parse_intermixed_args(argv)
    try:
        return _run(arguments)
    except EvalqError as error:
        print(f"evalq plan: {error}", file=sys.stderr)
        return error.exit_code


def _run(arguments: argparse.Namespace) -> int:
    if arguments.claims or arguments.rules:
        print(_claims_table() if arguments.claims else _rules_table())
        return EXIT_PASS
    for name in ("context", "concurrency"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}={value} must be 1 or more")
    answers = _answers(arguments)
    print(_render(answers, arguments))
    return EXIT_PASS if any(answer.feasible for answer in answers) else EXIT_INFEASIBLE


def _answers(arguments: argparse.Namespace) -> list[Answer]:
    from evalq.config_check import check
    from evalq.facts.confdir import names
    from evalq.plan.answer import Ask, plan
    from evalq.plan.compose import compose, parse

    request = parse(arguments.overrides)
    if arguments.config and "model" in request.choices:
        raise ConfigError("--config and model= both name a model; give one of them")
    if not arguments.config and "model" not in request.choices:
        raise ConfigError(f"no model is named; add +model=NAME ({', '.join(names('model'))}) or --config config.json")
    model = _model_from(arguments.config) if arguments.config else None
    ask = Ask(arguments.context, arguments.concurrency, frozenset(request.keys))
    answers = []
    for cell in request.cells():
        config = compose(request, cell)
        if model is not None:
            config = _with_model(config, model, request)
        check(config)
        if config.gate.conditions:  # what the gate would refuse after the run is refused before it is planned
            from evalq.judge.policy import checked_policy

            checked_policy(config.gate)
        answers.append(plan(config, ask))
    return answers


def _with_model(config: RunConfig, model: ModelConfig, request: Request) -> RunConfig:
    """The config with a foreign model; model.key=value overrides still count."""
    given = {key.split(".", 1)[1] for key in request.keys if key.startswith("model.")}
    kept = {key: getattr(config.model, key) for key in given if "." not in key}
    return dataclasses.replace(config, model=dataclasses.replace(model, **kept))


def _model_from(where: str) -> ModelConfig:
    from evalq.config import ModelConfig
    from evalq.facts.models import read_config

    path = Path(where)
    if path.exists():
        folder = path if path.is_dir() else path.resolve().parent
        return _foreign_model(
            ModelConfig(name=folder.resolve().name, source="path", path=str(folder)), read_config(path)
        )
    if where.count("/") == 1 and not where.startswith((".", "/")) and not where.endswith(".json"):
        return _foreign_model(ModelConfig(name=where, source="hub", hub_id=where), read_config(_from_hub(where)))
    raise ConfigError(f"no model config at {where}; give a config.json, its folder, or an id such as org/name")


def _foreign_model(model: ModelConfig, arch: dict[str, Any]) -> ModelConfig:
    # Planning scores nothing; the field only has to be filled.
    return dataclasses.replace(model, arch=arch, bos="always")


def _from_hub(hub_id: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise MissingExtraError("a config.json from the hub", "huggingface_hub", "measure") from error
    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    except Exception as error:  # the hub's client has a dozen of its own
        raise ConfigError(f"the config.json of {hub_id} cannot be fetched ({type(error).__name__}: {error})") from error


def _render(answers: list[Answer], arguments: argparse.Namespace) -> str:
    from evalq.plan.emit import engine_command
    from evalq.plan.show import as_data, matrix, one_cell

    if arguments.json:
        return json.dumps([as_data(answer) for answer in answers], indent=1)
    if arguments.emit:
        return "\n\n".join(_emitted(answer, engine_command(answer.config, answer.gpu_facts, answer.settings).render())
                           for answer in answers)  # fmt: skip
    if len(answers) == 1:
        return one_cell(answers[0], _visible_effect(answers[0]))
    return matrix(answers)


def _emitted(answer: Answer, command: str) -> str:
    if answer.feasible:
        return command
    refused = [f"# REFUSED {v.rule}: {v.message}; {v.remedy}" for v in answer.violations if v.severity == "error"]
    return "\n".join([*refused, *(f"# {line}" for line in command.splitlines())])


def _visible_effect(answer: Answer) -> str | None:
    """What the gate can see with the chosen data, where the planner's statistics know how to say it."""
    from evalq.plan import power

    describe = getattr(power, "describe_visible_effect", None)
    return None if describe is None else str(describe(answer.config))


def _claims_table() -> str:
    from evalq.plan.claims import claims
    from evalq.plan.show import table

    return table([tuple(claim) for claim in claims()], ("article", "says", "evalq computes"))


def _rules_table() -> str:
    from evalq.plan.rulebook import RULES
    from evalq.plan.show import table

    rows = [(rule.id, rule.severity, rule.demand, rule.remedy, rule.source) for rule in RULES.values()]
    return table(rows, ("rule", "severity", "demands", "otherwise", "source"))
