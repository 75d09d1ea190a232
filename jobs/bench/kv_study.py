"""The KV study: which paths read the quantised cache, prefill against decode path, long context, needles, continuations.

    python jobs/bench/kv_study.py runs/records --out reports/kv-h200 --title "..." --command "..."

Reads records only: one baseline and its KV schemes, measured with e.g.

    python -m evalq -m +model=smollm2-135m +quant=fp8-kv,fp8-kv-calibrated data=local tasks=perplexity kv=study \\
        engine=eager engine.max_model_len=8192 kv.long_tokens=8100 'kv.needle_lengths=[1024,2048,4096,8000]'
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from evalq.config import GateConfig
from evalq.errors import EvalqError, RecordError
from evalq.judge import kv
from evalq.judge.paired import as_increase, ratio
from evalq.judge.pairs import DocumentPairs, Tables, document_pairs
from evalq.judge.perplexity import perplexity_check
from evalq.judge.policy import checked_policy
from evalq.kvrecord import is_quantised_kv
from evalq.records import RECORD_FILE, VERDICT_FILE, Estimate, Record, read_record, read_verdict
from evalq.report.kv import heat_map, markdown_table, needle_table, sensitivity_lines
from evalq.report.words import interval, size, verdict_word

CONFIDENCE = 0.95
Side = tuple[Record, Path]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder of record folders")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="gets README.md and needle.svg")
    parser.add_argument("--title", default="KV study")
    parser.add_argument("--command", default="", help="the command that made the records, for the report")
    arguments = parser.parse_args()
    sides = read_all(arguments.records)
    if not sides:
        print(f"no records in {arguments.records}", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "README.md").write_text("\n".join(report(sides, arguments)), encoding="utf-8")
    return 0


def read_all(folder: Path) -> list[Side]:
    """Complete and invalid records, as they were measured."""
    found = []
    for path in sorted(folder.iterdir()):
        if (path / RECORD_FILE).is_file():
            try:
                record = read_record(path)
            except EvalqError as error:
                print(f"skipped: {error}", file=sys.stderr)
                continue
            if record.status != "failed":
                found.append((record, path))
    return sorted(found, key=lambda side: side[0].created_at)


def report(sides: list[Side], arguments: argparse.Namespace) -> list[str]:
    first = sides[0][0]
    versions = ", ".join(f"{name} {version}" for name, version in first.environment.items() if name != "platform")
    lines = [f"# {arguments.title}", "", f"{first.created_at[:10]}. {versions}.", ""]
    if arguments.command:
        lines += ["Command:", "", *(f"    {line}" for line in arguments.command.splitlines()), ""]
    lines += ["## Do scores read the quantised cache?", ""]
    lines += sensitivity_lines(answers(sides))
    pairs = compared(sides)
    if pairs:
        lines += paths(pairs) + positions(pairs) + needles(pairs, arguments.out) + continuations(pairs) + scales(pairs)
    return lines


def answers(sides: list[Side]) -> list[tuple[str, str, object]]:
    """The newest answer of every scheme and engine."""
    found = {}
    for record, _ in sides:
        if record.kv is not None and record.kv.sensitivity is not None:
            where = f"vLLM {record.fingerprint.get('engine_version')}, {record.cell.gpu}"
            found[record.cell.quant, where] = record.kv.sensitivity
    return [(name, where, answer) for (name, where), answer in found.items()]


def compared(sides: list[Side]) -> list[tuple[Side, Side]]:
    """Each candidate with KV measurements beside the baseline that was measured alike; the baseline against itself too."""
    measured = [side for side in sides if side[0].kv is not None and side[0].kv.decode is not None]
    baselines = {side[0].fingerprint.get("kv"): side for side in reversed(measured) if side[0].cell.is_baseline}
    pairs = []
    for side in measured:
        baseline = baselines.get(side[0].fingerprint.get("kv"))
        if baseline is not None and not (side[0].cell.is_baseline and side is baseline):
            pairs.append((baseline, side))
    return pairs


def per_word(baseline: Side, candidate: Side, part: kv.PathPairs | None) -> Estimate | None:
    """Increase of word perplexity with its interval: of the whole documents, or of some of their tokens."""
    words = words_of(baseline, candidate)
    documents = words if part is None else kv.as_documents(part, words)
    found = ratio(documents.d, documents.counts["words"])
    low, high = found.interval(CONFIDENCE)
    return as_increase("word_perplexity", found.value, low, high, CONFIDENCE, len(documents.d), found.method)


def words_of(baseline: Side, candidate: Side) -> DocumentPairs:
    """The perplexity task's documents, matched."""
    return document_pairs(*(Tables.read(*side) for side in (baseline, candidate)), "wikitext")


def name_of(record: Record) -> str:
    """The scheme; a second measurement of the baseline says so."""
    return f"{record.cell.quant} (A/A)" if record.cell.is_baseline else record.cell.quant


def paths(pairs: list[tuple[Side, Side]]) -> list[str]:
    rows = []
    for baseline, candidate in pairs:
        record, folder = candidate
        decode = kv.path_pairs(baseline, candidate, "decode")
        same = kv.prefill_of(baseline, candidate, decode)
        check = perplexity_check(
            kv.as_documents(decode, words_of(baseline, candidate)), checked_policy(GateConfig()), None
        )
        verdict = read_verdict(folder) if (folder / VERDICT_FILE).is_file() else None
        prefill = per_word(baseline, candidate, None)
        perplexity = record.tasks["wikitext"].metrics.get("word_perplexity")
        rows.append(
            [
                name_of(record),
                f"{perplexity:.4f}" if perplexity is not None else "-",
                interval(prefill),
                interval(per_word(baseline, candidate, same)) if same is not None else "-",
                interval(per_word(baseline, candidate, decode)),
                f"{decode.kld.mean():.2e}",
                str(len(decode.kld)),
                check.status,
                size(record.ledger.kv_bytes_per_token if record.ledger else None),
                verdict_word(verdict) if verdict else "-",
            ]
        )
    yardstick = pairs[0][0][0].tasks["wikitext"]
    head = [
        "scheme",
        "word perplexity",
        "increase in prefill [95 %]",
        "prefill, the decode path's tokens",
        "decode path",
    ]
    head += ["KL decode, nats", "tokens", "decode path by the default policy", "KV per token", "verdict"]
    return [
        "## Prefill and decode path", "",
        f"Baseline: word perplexity {yardstick.metrics.get('word_perplexity'):.4f}, {yardstick.dataset}, {yardstick.n} documents.",
        "KL is a lower bound from the top k of both sides.", "", *markdown_table(head, rows),
    ]  # fmt: skip


def positions(pairs: list[tuple[Side, Side]]) -> list[str]:
    lines = ["## By position", ""]
    for path, title in (("decode", "Decode path"), ("long", "Long context, prefill")):
        rows = []
        for baseline, candidate in pairs:
            try:
                found = kv.position_buckets(kv.path_pairs(baseline, candidate, path), CONFIDENCE)
            except RecordError:
                continue
            for bucket in found:
                rows.append(
                    [
                        name_of(candidate[0]),
                        f"{bucket.low} to {bucket.high - 1}",
                        str(bucket.tokens),
                        f"{bucket.baseline_perplexity:.3f}",
                        interval(bucket.increase),
                        f"{bucket.mean_kld:.2e}",
                        f"{bucket.same_top1:.2%}",
                    ]
                )
        head = [
            "scheme",
            "context, tokens",
            "tokens",
            "baseline token perplexity",
            "increase [95 %]",
            "KL, nats",
            "same first choice",
        ]
        lines += [f"{title}:", "", *markdown_table(head, rows)] if rows else []
    return lines


def needles(pairs: list[tuple[Side, Side]], out: Path) -> list[str]:
    grids, lines = [], []
    for baseline, candidate in pairs:
        if "needles" not in baseline[0].tables or "needles" not in candidate[0].tables:
            continue
        if not grids:
            grids.append((baseline[0].cell.quant, kv.needle_grid(baseline)))
        grids.append((name_of(candidate[0]), kv.needle_grid(candidate)))
        found = kv.needle_pairs(baseline, candidate).values
        test = kv.mcnemar(found.baseline, found.candidate)
        lines.append(
            f"- {name_of(candidate[0])}: {found.baseline.mean():.1%} to {found.candidate.mean():.1%} of {len(found.baseline)}; "
            f"{test.lost} lost, {test.won} won, McNemar p={test.p_two_sided:.3g}"
        )
    if not grids:
        return []
    (out / "needle.svg").write_text(heat_map(grids), encoding="utf-8")
    return ["## Needles", "", "![needle retrieval, depth by length](needle.svg)", "", *needle_table(grids), *lines, ""]


def continuations(pairs: list[tuple[Side, Side]]) -> list[str]:
    rows = []
    for baseline, candidate in pairs:
        if "generations" in baseline[0].tables and "generations" in candidate[0].tables:
            found = kv.divergence(baseline, candidate)
            median = f"{sorted(found.first.tolist())[len(found.first) // 2]}"
            loops = f"{found.baseline_loops} / {found.candidate_loops}"
            rows.append([name_of(candidate[0]), str(len(found.first)), median, f"{found.identical:.1%}", loops])
    if not rows:
        return []
    head = ["scheme", "prompts", "first different token (median)", "identical to the end", "loops, baseline / scheme"]
    return ["## Greedy continuations", "", *markdown_table(head, rows)]


def scales(pairs: list[tuple[Side, Side]]) -> list[str]:
    rows = [
        [c[0].cell.quant, c[0].applied.kv_dtype_effective, c[0].applied.kv_scale_source, c[0].applied.attention_backend]
        for _, c in pairs
        if c[0].applied is not None and is_quantised_kv(c[0].applied.kv_dtype_requested)
    ]
    return [
        "## Scales, from the engine's state",
        "",
        *markdown_table(["scheme", "KV dtype", "source", "backend"], rows),
    ]


if __name__ == "__main__":
    sys.exit(main())
