"""The table of a study from its records: verdicts, intervals, A/A floor, memory, speed, tasks, seconds by stage.

    python jobs/bench/study_table.py runs/records --out reports/my-study/README.md --title "..." --command "..."

Takes a record store with one baseline and its candidates (smoke runs are left out by --min-documents). Reads records only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from evalq.errors import EvalqError
from evalq.judge.floor import read_floor
from evalq.plan.power import detectable_effect
from evalq.plan.spread import spreads_from_verdicts
from evalq.records import RECORD_FILE, VERDICT_FILE, Record, Verdict, read_record, read_verdict
from evalq.report.words import interval, size, verdict_word


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder of record folders")
    parser.add_argument("--out", type=Path, metavar="FILE", help="Markdown file (default: standard output)")
    parser.add_argument("--title", default="Study")
    parser.add_argument("--command", default="", help="the command that made the records, for the report")
    parser.add_argument("--min-documents", type=int, default=20)
    arguments = parser.parse_args()
    found = read_all(arguments.records, arguments.min_documents)
    if not found:
        print(f"no complete records in {arguments.records}", file=sys.stderr)
        return 1
    text = "\n".join(report(found, arguments))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


Found = list[tuple[Record, Path, Verdict | None]]


def read_all(folder: Path, min_documents: int) -> Found:
    """Complete records with enough documents, baselines first, then as they were measured."""
    found: Found = []
    for path in sorted(folder.iterdir()):
        if not (path / RECORD_FILE).is_file():
            continue
        try:
            record = read_record(path)
            verdict = read_verdict(path) if (path / VERDICT_FILE).is_file() else None
        except EvalqError as error:
            print(f"skipped: {error}", file=sys.stderr)
            continue
        documents = record.tasks["wikitext"].n if "wikitext" in record.tasks else 0
        if record.status == "complete" and documents >= min_documents:
            found.append((record, path, verdict))
    return sorted(found, key=lambda item: (not item[0].cell.is_baseline, item[0].created_at))


def report(found: Found, arguments: argparse.Namespace) -> list[str]:
    baseline, _, _ = found[0]
    floor = read_floor(arguments.records, baseline)
    versions = ", ".join(f"{name} {version}" for name, version in baseline.environment.items() if name != "platform")
    lines = [f"# {arguments.title}", "", f"{baseline.created_at[:10]}. {versions}.", ""]
    if arguments.command:
        lines += ["Command:", "", f"    {arguments.command}", ""]
    datasets = "; ".join(f"{score.dataset}: {score.n}" for score in baseline.tasks.values())
    lines += [f"Data: {datasets}. Window {baseline.tasks['wikitext'].window_tokens} tokens.", ""]
    if floor is not None:
        lines += [f"A/A floor (the baseline against itself, other order and batches): {interval(floor, 4)}.", ""]
    lines += quality(found) + tasks(found) + visible(found) + seconds(found)
    return lines


def quality(found: Found) -> list[str]:
    lines = [
        "## Verdicts, memory and speed",
        "",
        "| scheme | word perplexity | increase [95 %] | weights | KV per token | output tokens/s | verdict |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for record, _, verdict in found:
        increase = next((c.estimate for c in verdict.checks if "perplexity" in c.metric), None) if verdict else None
        load = next(iter(record.loads.values()), None)
        rate = f"{load.output_tokens_per_second:,.0f}" if load and load.valid and load.output_tokens_per_second else "-"
        ledger = record.ledger
        lines.append(
            f"| {name_of(record)} | {record.tasks['wikitext'].metrics['word_perplexity']:.4f} | {interval(increase)} "
            f"| {size(ledger.weight_bytes if ledger else None)} | {size(ledger.kv_bytes_per_token if ledger else None)} "
            f"| {rate} | {verdict_word(verdict) if verdict else 'yardstick'} |"
        )
    return [*lines, ""]


def name_of(record: Record) -> str:
    order = record.fingerprint.get("request_order")
    return f"{record.cell.quant} (A/A)" if order == "reverse" else record.cell.quant


def tasks(found: Found) -> list[str]:
    names = [
        (task, metric)
        for task, score in found[0][0].tasks.items()
        if score.kind == "choice"
        for metric in score.metrics
    ]
    lines = [
        "## Tasks",
        "",
        "| scheme | " + " | ".join(f"{t} {m}" for t, m in names) + " |",
        "|---|" + "---:|" * len(names),
    ]
    for record, _, _ in found:
        values = (record.tasks[task].metrics[metric] for task, metric in names)
        lines.append(f"| {name_of(record)} | " + " | ".join("-" if v is None else f"{v:.4f}" for v in values) + " |")
    lines += ["", "Paired differences to the baseline:", ""]
    for record, _, verdict in found:
        for check in verdict.checks if verdict else []:
            if check.estimate is not None and "perplexity" not in check.metric:
                lines.append(f"- {record.cell.quant}: {check.reason}")
    return [*lines, ""]


def visible(found: Found) -> list[str]:
    """Smallest effect the data could show: from the tightest and from the widest pair of this study."""
    pairs = [spreads_from_verdicts([verdict]) for _, _, verdict in found if verdict]
    lines = ["## Smallest detectable effects", "", "| task | n | tightest pair | widest pair |", "|---|---:|---:|---:|"]
    for task in dict.fromkeys(task for pair in pairs for task in pair):
        n = found[0][0].tasks[task].n if task in found[0][0].tasks else 0
        if n < 2:
            continue
        effects = [100 * detectable_effect(pair[task][0], n) for pair in pairs if task in pair and pair[task][0] > 0]
        unit = "%" if task == "wikitext" else "points"
        lines.append(f"| {task} | {n} | {min(effects):.2f} {unit} | {max(effects):.2f} {unit} |")
    return [*lines, "", "Differences to the baseline, at 5 % error and 80 % power.", ""]


def seconds(found: Found) -> list[str]:
    stages = list(dict.fromkeys(stage for record, _, _ in found for stage in record.stage_seconds))
    lines = ["## Wall seconds by stage", "", "| scheme | " + " | ".join(stages) + " |", "|---|" + "---:|" * len(stages)]
    for record, _, _ in found:
        lines.append(
            f"| {name_of(record)} | " + " | ".join(f"{record.stage_seconds.get(s, 0):.1f}" for s in stages) + " |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main())
