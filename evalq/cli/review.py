"""`evalq review`: people compare outputs of baseline and candidate, blind; their answers are advice in the gate."""

from __future__ import annotations

import argparse
import json
import secrets
from datetime import UTC, datetime
from pathlib import Path

from evalq.app import default_root
from evalq.cli.locate import find_record, records_root
from evalq.cli.outputs import Located, generate, read_outputs, read_prompts
from evalq.errors import EXIT_PASS, ConfigError, RecordError
from evalq.judge.blind import blind, read_answers, read_key, read_pairs, unblinded, write_review
from evalq.judge.review import DEFAULT_MARGIN, RESULT_FILE, Answer, ReviewResult, analyse
from evalq.records import to_json, write_text
from evalq.tracking.store import store_at
from evalq.tracking.traces import ReviewTraces

FORM_FILE = "form.html"
EXPERIMENT = "evalq reviews"


def parser() -> argparse.ArgumentParser:
    """The arguments of `evalq review make` and `evalq review read`."""
    made = argparse.ArgumentParser(prog="evalq review", description=__doc__)
    verbs = made.add_subparsers(dest="verb", required=True, metavar="make|read")
    _make_parser(
        verbs.add_parser("make", help="outputs of both, blind and shuffled, as one HTML form and as MLflow traces")
    )
    _read_parser(verbs.add_parser("read", help="tests, interval and agreement of the answers"))
    return made


def _make_parser(made: argparse.ArgumentParser) -> None:
    where = "record folder, record.json, record id or MLflow run id"
    made.add_argument("--baseline", metavar="R", required=True, help=where)
    made.add_argument("--candidate", metavar="R", required=True, help=where)
    made.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder of the review; must hold none yet")
    made.add_argument(
        "--prompts", metavar="FILE", type=Path, help="text, one a line, or .jsonl with prompt (default: evalq's 40)"
    )
    made.add_argument("--limit", metavar="N", type=int, help="prompts at most")
    made.add_argument(
        "--output-tokens", metavar="N", type=int, default=160, help="of each output, at most (default: 160)"
    )
    made.add_argument(
        "--baseline-outputs", metavar="FILE", type=Path, help=".jsonl with prompt and output: no engine is started"
    )
    made.add_argument("--candidate-outputs", metavar="FILE", type=Path, help="the same prompts in the same order")
    made.add_argument("--seed", type=int, help="of the shuffling (default: a new one)")
    _common(made)


def _read_parser(made: argparse.ArgumentParser) -> None:
    made.add_argument("review", metavar="DIR", type=Path, help="folder of evalq review make")
    made.add_argument(
        "answers", metavar="FILE", type=Path, nargs="*", help="answers that reviewers downloaded from the form"
    )
    made.add_argument(
        "--margin",
        type=float,
        default=DEFAULT_MARGIN,
        help=f"points of coherence that may be lost (default: {DEFAULT_MARGIN})",
    )
    made.add_argument("--format", choices=("text", "json"), default="text", help="what is printed (default: text)")
    _common(made)


def _common(made: argparse.ArgumentParser) -> None:
    made.add_argument("--root", type=Path, help="folder of evalq's output (default: $EVALQ_HOME, else runs)")
    made.add_argument("--records", metavar="DIR", help="where record ids are looked up (default: ROOT/records)")
    made.add_argument(
        "--tracking-uri", metavar="URI", help="MLflow store of run ids and of traces (default: ROOT/mlflow.db)"
    )
    made.add_argument(
        "--mlflow", action="store_true", help="use MLflow: make traces, or read the feedback entered on them"
    )


def main(argv: list[str]) -> int:
    """Errors: EvalqError, for the dispatcher to print."""
    arguments = parser().parse_args(argv)
    arguments.root = (arguments.root or default_root()).absolute()
    return _make(arguments) if arguments.verb == "make" else _read(arguments)


def _traces(arguments: argparse.Namespace) -> ReviewTraces:
    root = arguments.root
    uri = arguments.tracking_uri or f"sqlite:///{root / 'mlflow.db'}"
    return ReviewTraces(store_at(uri, root, root / "records", 10.0), EXPERIMENT)


def _make(arguments: argparse.Namespace) -> int:
    records = records_root(arguments.records or str(arguments.root / "records"))
    sides = [find_record(name, records, arguments.tracking_uri) for name in (arguments.baseline, arguments.candidate)]
    if sides[0][0].record_id == sides[1][0].record_id:
        raise ConfigError("baseline and candidate are one record; a review needs two")
    for name in ("limit", "output_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be 1 or more")
    prompts, texts, settings = _from_files(arguments) or _from_engine(arguments, sides)
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    review_id = f"review-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    ids = (sides[0][0].record_id, sides[1][0].record_id)
    pairs, key = blind(review_id, ids, prompts, *texts, seed, settings)
    write_review(arguments.out, pairs, key)
    from evalq.report.review_form import review_form

    write_text(arguments.out / FORM_FILE, review_form(review_id, pairs.pairs))
    print(f"{len(pairs.pairs)} prompts to judge, {key.identical} with the same output from both and not shown")
    print(f"give reviewers {arguments.out / FORM_FILE} and keep {arguments.out / 'key.json'} to yourself; then:")
    print(f"  evalq review read {arguments.out} ANSWERS.json ...")
    if arguments.mlflow:
        made = _traces(arguments).log_pairs(review_id, pairs.pairs)
        print(
            f"{made} traces in MLflow's experiment {EXPERIMENT!r}; read them with: evalq review read {arguments.out} --mlflow"
        )
    return EXIT_PASS


Texts = tuple[list[str], list[str]]


def _from_files(arguments: argparse.Namespace) -> tuple[list[str], Texts, dict[str, str]] | None:
    files = (arguments.baseline_outputs, arguments.candidate_outputs)
    if files == (None, None):
        return None
    if None in files:
        raise ConfigError("--baseline-outputs and --candidate-outputs belong together; give both, or neither")
    (prompts, first), (others, second) = (read_outputs(file) for file in files)
    if prompts != others:
        raise ConfigError(f"{files[0]} and {files[1]} do not hold the same prompts in the same order")
    if len(prompts) < 2:
        raise ConfigError(
            f"{files[0]} holds {len(prompts)} prompts; a review needs 2 or more, and 40 to see anything small"
        )
    return prompts[: arguments.limit], (first[: arguments.limit], second[: arguments.limit]), {"outputs": "from files"}


def _from_engine(arguments: argparse.Namespace, sides: list[Located]) -> tuple[list[str], Texts, dict[str, str]]:
    from evalq.report.progress import watcher

    prompts = read_prompts(arguments.prompts, arguments.limit)
    if not 1 <= arguments.output_tokens <= 4096:
        raise ConfigError(f"--output-tokens {arguments.output_tokens} is outside 1 to 4096")
    outputs = []
    with watcher(True) as watch:
        for located in sides:
            watch.cell(f"{located[0].cell.model} {located[0].cell.quant}")
            outputs.append(generate(located, prompts, arguments.output_tokens, arguments.root, watch))
    texts = tuple([str(output["text"]) for output in side["outputs"]] for side in outputs)
    settings = {"decoding": "greedy", "output_tokens": str(arguments.output_tokens)}
    settings["chat_template"] = str(outputs[0]["chat_template"])
    return prompts, (texts[0], texts[1]), settings


def _read(arguments: argparse.Namespace) -> int:
    key = read_key(arguments.review)
    answers: list[Answer] = []
    for file in arguments.answers:
        answers += read_answers(file, key)
    if arguments.mlflow:
        read_pairs(arguments.review)
        for given in _traces(arguments).feedback(key.review_id):
            answers.append(
                unblinded(given.reviewer, {"item": given.item, **given.values}, key, f"feedback of {given.reviewer}")
            )
    if not answers:
        raise RecordError(
            f"no answers to {key.review_id}: name the files that reviewers downloaded, or read feedback with --mlflow"
        )
    if not 0.0 < arguments.margin < 4.0:
        raise ConfigError(f"--margin {arguments.margin} is outside 0 to 4 points of coherence")
    ids = (key.review_id, key.baseline_id, key.candidate_id)
    result = analyse(answers, ids, key.prompts, key.identical, arguments.margin)
    write_text(arguments.review / RESULT_FILE, to_json(result) + "\n")
    _show(result, arguments)
    return EXIT_PASS


def _show(result: ReviewResult, arguments: argparse.Namespace) -> None:
    if arguments.format == "json":
        print(json.dumps(json.loads(to_json(result)), allow_nan=False))
        return
    from evalq.judge.review import advice

    print(f"{result.review_id}: {result.answers} answers of {len(result.reviewers)} reviewers on {result.candidate_id}")
    for estimate in result.estimates:
        bounds = "" if estimate.low is None or estimate.high is None else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
        value = "none" if estimate.value is None else f"{estimate.value:.3f}"
        note = f"; {estimate.note}" if estimate.note else ""
        print(f"  {estimate.name}: {value}{bounds}, n={estimate.n}, {estimate.method}{note}")
    for name, p in (("exact sign test", result.sign_p), ("Wilcoxon signed-rank", result.wilcoxon_p)):
        print(f"  {name}, two-sided: p={'none' if p is None else f'{p:.4g}'}")
    for line in [*result.notes, *(f"{check.status} (advice): {check.reason}" for check in advice(result))]:
        print(f"  {line}")
    print(f"kept in {arguments.review / RESULT_FILE}; evalq gate --review {arguments.review} shows it as advice")
