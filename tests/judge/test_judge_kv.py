"""KV schemes: blind scores refused, the decode path within the budget, position buckets, needles, continuations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import record_builder as rb

from evalq.config import GateConfig
from evalq.errors import RecordError
from evalq.judge import kv
from evalq.judge.gate import judge
from evalq.kvrecord import DecodeScore, GenerationScore, KvReport, LongScore, NeedleScore, Sensitivity, kv_token_schema
from evalq.records import Record, Verdict, file_sha256, from_mapping, parse_json, to_json, token_schema, write_record

FP8 = dataclasses.replace(rb.APPLIED, kv_dtype_requested="fp8_e4m3", kv_dtype_effective="fp8_e4m3 (uint8)")
SMALL = dataclasses.replace(rb.LEDGER, kv_bytes_per_token=48)
DOCUMENTS, TOKENS = 30, 40


def answer(prefill: str = "yes", decode: str = "yes") -> Sensitivity:
    moved = {"one step, scales x 1000": 2.0}
    return Sensitivity(
        prefill, decode, "scales", "fp8_e4m3", "CPU_ATTN", "0.32", 766, moved, 0.0, 0.01, {}, "f", "2026"
    )


DECODE = DecodeScore(DOCUMENTS, DOCUMENTS, DOCUMENTS * TOKENS, 0, 1, 20.0, "h", 1.0)


def token_table(nll_per_token: float, increase: float = 0.0, path: str = "decode", seed: int = 5) -> pa.Table:
    """TOKENS tokens of each document; `increase` in nats per token on top, the same noise for everyone."""
    rng = np.random.default_rng(seed)
    rows = []
    for doc in range(DOCUMENTS):
        for position in range(100, 100 + TOKENS):
            logprob = -nll_per_token - abs(rng.normal(0, 0.5)) - increase
            top = [7, 8] if increase < 0.05 else [8, 7]
            rows.append(
                {"path": path, "doc_id": doc, "window_position": position, "token_id": 9, "logprob": logprob,
                 "top1_id": top[0], "top1_logprob": -1.0, "topk_ids": top, "topk_logprobs": [-1.0, -2.0]}
            )  # fmt: skip
    return pa.Table.from_pylist(rows)


def side(folder: Path, name: str, tables: dict[str, pa.Table], **changes: Any) -> tuple[Record, Path]:
    rows = rb.baseline_rows(documents=DOCUMENTS)
    rows = rows if name == "baseline" else rb.damaged(rows, 0.002)
    made = rb.record(name, rows, **changes)
    return write_record(folder / name, made, {**rb.tables(rows), **tables}), folder / name


def verdict(first: tuple[Record, Path], second: tuple[Record, Path]) -> Verdict:
    return judge(*first, *second, GateConfig())


def kv_side(folder: Path, report: KvReport | None, tables: dict[str, pa.Table] | None = None) -> tuple[Record, Path]:
    return side(folder, "fp8-kv", tables or {}, quant="fp8-kv", applied=FP8, ledger=SMALL, kv=report)


def test_kv_scheme_whose_prefill_reads_the_cache_passes(tmp_path: Path) -> None:
    found = verdict(side(tmp_path, "baseline", {}), kv_side(tmp_path, KvReport(answer())))
    assert found.status == "PASS"


def test_a_verdict_says_how_long_the_contexts_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 KV loses more the longer the context: a pass on short documents must not be taken for one on long ones."""
    baseline = side(tmp_path, "baseline", {})
    assert not any(
        "longest context" in text for text in verdict(baseline, kv_side(tmp_path, KvReport(answer()))).reasons
    )
    window = baseline[0].tasks["wikitext"].window_tokens
    monkeypatch.setattr(kv, "LONG_CONTEXT", window + 1)
    (note,) = [text for text in verdict(baseline, kv_side(tmp_path, KvReport(answer()))).reasons if "longest" in text]
    assert note.startswith(f"note: the KV cache is fp8_e4m3 and the longest context scored has {window:,} tokens")
    scored = KvReport(answer(), long=LongScore(2, 0, 4096, 8192, 20.0, "h", 1.0))
    for other in (kv_side(tmp_path / "long", scored), side(tmp_path, "int8-w8a8", {}, quant="int8-w8a8")):
        assert not any("longest context" in text for text in verdict(baseline, other).reasons)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (None, "does not say whether the scores"),
        (KvReport(notes=["the hook was refused"]), "the hook was refused"),
        (KvReport(answer("only across chunks")), "scored blind"),
        (KvReport(answer("no")), "scored blind"),
    ],
)
def test_kv_scheme_scored_blind_is_invalid(tmp_path: Path, report: KvReport | None, words: str) -> None:
    """a5."""
    found = verdict(side(tmp_path, "baseline", {}), kv_side(tmp_path, report))
    assert (found.status, found.exit_code) == ("INVALID", 5)
    assert words in found.reasons[0]


def test_blind_prefill_is_judged_by_the_decode_path(tmp_path: Path) -> None:
    first = side(tmp_path, "baseline", {"kv_tokens": token_table(3.0)}, kv=KvReport(decode=DECODE))
    report = KvReport(answer("no"), decode=DECODE)
    found = verdict(first, kv_side(tmp_path, report, {"kv_tokens": token_table(3.0, 0.001)}))
    assert found.status == "PASS"
    assert any(check.metric == "decode word_perplexity" and check.required for check in found.checks)


def test_decode_scores_that_do_not_read_the_cache_are_invalid(tmp_path: Path) -> None:
    first = side(tmp_path, "baseline", {"kv_tokens": token_table(3.0)}, kv=KvReport(decode=DECODE))
    report = KvReport(answer("yes", decode="no"), decode=DECODE)
    found = verdict(first, kv_side(tmp_path, report, {"kv_tokens": token_table(3.0)}))
    assert found.status == "INVALID"
    assert "do not react" in found.reasons[0]


def test_damage_on_the_decode_path_alone_is_a_fail(tmp_path: Path) -> None:
    first = side(tmp_path, "baseline", {"kv_tokens": token_table(3.0)}, kv=KvReport(decode=DECODE))
    second = kv_side(tmp_path, KvReport(answer(), decode=DECODE), {"kv_tokens": token_table(3.0, 0.2)})
    found = verdict(first, second)
    assert (found.status, found.exit_code) == ("FAIL", 1)
    check = next(check for check in found.checks if check.metric == "decode word_perplexity")
    assert check.estimate is not None
    # two tokens to a word: 0.4 nats per word more
    assert check.estimate.value == pytest.approx(np.expm1(0.4), rel=1e-4)
    assert "decode path (1200 tokens of 30 documents" in check.reason


def test_decode_score_on_one_side_only_is_invalid(tmp_path: Path) -> None:
    second = kv_side(tmp_path, KvReport(answer(), decode=DECODE), {"kv_tokens": token_table(3.0)})
    found = verdict(side(tmp_path, "baseline", {}), second)
    assert found.status == "INVALID"
    assert "only the candidate has it" in found.reasons[0]


def test_pool_no_smaller_than_the_baselines_is_invalid(tmp_path: Path) -> None:
    """a2."""
    first = side(tmp_path, "baseline", {})
    second = side(tmp_path, "fp8-kv", {}, quant="fp8-kv", applied=FP8, kv=KvReport(answer()))  # the baseline's bytes
    found = verdict(first, second)
    assert found.status == "INVALID"
    assert "96 bytes per token and the baseline's 96" in found.reasons[0]


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    first = side(tmp_path, "baseline", {"kv_tokens": token_table(3.0)}, kv=KvReport(decode=DECODE))
    other = token_table(3.0)
    other = other.set_column(3, "token_id", pa.array([1] * len(other)))
    second = kv_side(tmp_path, KvReport(answer(), decode=DECODE), {"kv_tokens": other})
    assert verdict(first, second).status == "INVALID"
    with pytest.raises(RecordError, match="token_id of path decode"):
        kv.path_pairs(first, second, "decode")


def test_buckets_hold_every_token_once(tmp_path: Path) -> None:
    first = side(tmp_path, "baseline", {"kv_tokens": token_table(3.0)})
    second = side(tmp_path, "cand", {"kv_tokens": token_table(3.0, 0.1)})
    pairs = kv.path_pairs(first, second, "decode")
    found = kv.position_buckets(pairs, 0.95, (1, 64, 120, 512))
    assert [(b.low, b.high, b.tokens) for b in found] == [(64, 120, 600), (120, 140, 600)]
    for bucket in found:
        assert bucket.increase is not None
        assert bucket.increase.value == pytest.approx(np.expm1(0.1), rel=1e-5)
        assert bucket.same_top1 == 0.0
    assert kv.path_pairs(first, first, "decode").kld.max() == 0.0


def test_divergence_is_worked_by_hand(tmp_path: Path) -> None:
    """Both know the tokens 9, 7 and 8; p = (e-3, e-1, e-2), q = the same but for the scored token; the rest is the tail."""
    one = pa.Table.from_pylist([{**token_table(3.0).to_pylist()[0], "logprob": -3.0}])
    two = pa.Table.from_pylist([{**one.to_pylist()[0], "logprob": -4.0}])
    p, q = np.exp([-3.0, -1.0, -2.0]), np.exp([-4.0, -1.0, -2.0])
    expected = p[0] * 1.0 + (1 - p.sum()) * np.log((1 - p.sum()) / (1 - q.sum()))
    found = kv._divergence(one, two, [np.array([-3.0]), np.array([-4.0])])
    assert found[0] == pytest.approx(expected, rel=1e-6)


def needles(values: list[float]) -> pa.Table:
    rows = [
        {
            "item_id": i,
            "length": 512 if i < 4 else 1024,
            "depth": 50,
            "ids_hash": f"h{i}",
            "expected": "12345",
            "answer": "x",
            "value": v,
        }
        for i, v in enumerate(values)
    ]
    return pa.Table.from_pylist(rows)


def test_needles_are_paired(tmp_path: Path) -> None:
    score = NeedleScore(8, [512, 1024], [50], 0.5, "h", 1.0)
    first = side(tmp_path, "baseline", {"needles": needles([1] * 8)}, kv=KvReport(needle=score))
    second = side(tmp_path, "cand", {"needles": needles([1, 1, 1, 0, 0, 0, 0, 0])}, kv=KvReport(needle=score))
    check = next(check for check in verdict(first, second).checks if check.metric == "needle")
    assert not check.required
    assert check.status == "FAIL"
    assert "5 lost, 0 won, McNemar p=0.0625" in check.reason
    assert kv.needle_grid(second) == {(512, 50): (3, 4), (1024, 50): (0, 4)}


def generations(ids: list[list[int]], loops: list[int]) -> pa.Table:
    rows = [
        {"item_id": i, "ids_hash": f"h{i}", "token_ids": x, "loop_from": loop}
        for i, (x, loop) in enumerate(zip(ids, loops))
    ]
    return pa.Table.from_pylist(rows)


def test_continuations_are_compared_token_by_token(tmp_path: Path) -> None:
    score = GenerationScore(3, 4, 0, "h", 1.0)
    same = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
    other = [[1, 2, 3, 4], [5, 0, 7, 8], [9, 9, 9, 0]]
    first = side(tmp_path, "baseline", {"generations": generations(same, [-1, -1, 0])}, kv=KvReport(generation=score))
    second = side(tmp_path, "cand", {"generations": generations(other, [0, 0, 0])}, kv=KvReport(generation=score))
    found = kv.divergence(first, second)
    assert found.first.tolist() == [4, 1, 3]
    assert found.identical == pytest.approx(1 / 3)
    assert (found.baseline_loops, found.candidate_loops) == (1, 3)
    check = next(check for check in verdict(first, second).checks if check.metric == "generation")
    assert check.status == "FAIL"
    assert "token 3 (median)" in check.reason


def test_long_context_advises(tmp_path: Path) -> None:
    score = LongScore(30, 0, 200, 1200, 20.0, "h", 1.0)
    first = side(tmp_path, "baseline", {"kv_tokens": token_table(3.0, path="long")}, kv=KvReport(long=score))
    second = side(tmp_path, "cand", {"kv_tokens": token_table(3.0, 0.2, path="long")}, kv=KvReport(long=score))
    found = verdict(first, second)
    assert found.status == "PASS"
    assert [check.status for check in found.checks if check.metric.startswith("long context")] == ["FAIL"]


def test_prefill_scores_of_the_same_tokens(tmp_path: Path) -> None:
    def tokens(shift: float) -> pa.Table:
        rows = [
            {"task": "wikitext", "doc_id": doc, "position": p - 1, "window_position": p, "token_id": 9, "logprob": -3.0 - shift,
             "top1_id": 7, "top1_logprob": -1.0, "entropy_nats": None, "topk_ids": None, "topk_logprobs": None,
             "exact_kld_nats": None}
            for doc in range(DOCUMENTS) for p in range(90, 150)
        ]  # fmt: skip
        return pa.Table.from_pylist(rows, schema=token_schema())

    tables = [{"kv_tokens": token_table(3.0), "tokens": tokens(shift)} for shift in (0.0, 0.01)]
    first, second = side(tmp_path, "baseline", tables[0]), side(tmp_path, "cand", tables[1])
    decode = kv.path_pairs(first, second, "decode")
    found = kv.prefill_of(first, second, decode)
    assert found is not None
    assert (found.candidate_nll - found.baseline_nll) == pytest.approx(np.full(1200, 0.01), abs=1e-6)
    assert kv.prefill_of(side(tmp_path, "none", {"kv_tokens": token_table(3.0)}), second, decode) is None


def test_report_survives_the_disk_and_old_records_are_read(tmp_path: Path) -> None:
    record, _ = kv_side(tmp_path, KvReport(answer(), decode=DECODE, notes=["a"]))
    data = parse_json(to_json(record), "x")
    assert from_mapping(Record, data).kv == record.kv
    del data["kv"], data["applied"]["layers"]
    assert from_mapping(Record, data).kv is None


def decode_pair(
    folder: Path,
    prefill: str = "no",
    increase: float = 0.001,
    change: Callable[[pa.Table], pa.Table] = lambda table: table,
) -> tuple[tuple[Record, Path], tuple[Record, Path]]:
    """Baseline and KV scheme with a decode score; `change` is made to the rows of both."""
    first = side(folder, "baseline", {"kv_tokens": change(token_table(3.0))}, kv=KvReport(decode=DECODE))
    report = KvReport(answer(prefill), decode=DECODE)
    return first, kv_side(folder, report, {"kv_tokens": change(token_table(3.0, increase))})


@pytest.mark.parametrize(("prefill", "lacking"), [("no", "baseline"), ("yes", "baseline"), ("yes", "candidate")])
def test_a_decode_score_that_one_side_lacks_passes_nothing(tmp_path: Path, prefill: str, lacking: str) -> None:
    """Both have a report, and in one of them the decode path is missing."""
    first, second = decode_pair(tmp_path, prefill, 0.5)
    if lacking == "baseline":
        first = side(tmp_path, "baseline", {}, kv=KvReport(notes=["decode: refused"]))
    else:
        second = kv_side(tmp_path, KvReport(answer(prefill)))
    found = verdict(first, second)
    assert (found.status, found.exit_code) == ("INVALID", 5)
    assert "measure both with kv=decode" in found.summary


def column_of(name: str, value: Any) -> Callable[[pa.Table], pa.Table]:
    """The first row's `name` becomes `value`; every row, as text, for the value "text"."""

    def change(table: pa.Table) -> pa.Table:
        values = table.column(name).to_pylist()
        if value == "text":
            return table.set_column(table.schema.names.index(name), name, pa.array([str(x) for x in values]))
        return table.set_column(table.schema.names.index(name), name, pa.array([value, *values[1:]]))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (column_of("doc_id", None), "empty values in doc_id"),
        (column_of("token_id", None), "empty values in token_id"),
        (column_of("logprob", None), "empty values in logprob"),
        (column_of("logprob", 5.0), "no probability is above 1"),
        (column_of("topk_logprobs", [-1.0]), "not of one length"),
        (column_of("topk_logprobs", None), "not of one length"),
        (column_of("topk_logprobs", [-1.0, float("nan")]), "not numbers"),
        (lambda table: pa.concat_tables([table, table]), "twice"),
        (lambda table: table.slice(0, 0), "no rows"),
    ],
)
def test_damaged_rows_of_the_decode_path_are_refused(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], words: str
) -> None:
    found = verdict(*decode_pair(tmp_path, change=change))
    assert (found.status, found.exit_code) == ("INVALID", 5)
    assert words in found.summary


def test_kv_columns_of_another_type_are_refused(tmp_path: Path) -> None:
    first, (second, folder) = decode_pair(tmp_path)
    for name in ("doc_id", "logprob", "topk_ids"):
        pq.write_table(
            column_of(name, "text")(token_table(3.0, 0.001).cast(kv_token_schema())), folder / "kv_tokens.parquet"
        )
        tables = {**second.tables, "kv_tokens": file_sha256(folder / "kv_tokens.parquet")}
        found = verdict(first, (dataclasses.replace(second, tables=tables), folder))
        assert found.status == "INVALID"
        assert f"have {name} as string" in found.summary


def test_a_text_that_the_data_holds_twice_is_one_document_of_the_decode_path(tmp_path: Path) -> None:
    rows = rb.baseline_rows(documents=DOCUMENTS)
    sides = []
    for name, increase, changes in (
        ("baseline", 0.0, {"kv": KvReport(decode=DECODE)}),
        ("fp8-kv", 0.001, {"kv": KvReport(answer("no"), decode=DECODE), "applied": FP8, "ledger": SMALL}),
    ):
        own = rows if name == "baseline" else rb.damaged(rows, 0.002)
        tables = rb.tables(own)
        hashes = [f"doc{i // 2 if i < 4 else i}" for i in range(DOCUMENTS)]  # 0 and 1 are one text, 2 and 3 another
        documents = tables["documents"]
        documents = documents.set_column(documents.schema.names.index("doc_hash"), "doc_hash", pa.array(hashes))
        tables |= {"documents": documents, "kv_tokens": token_table(3.0, increase)}
        made = rb.record(name, own, quant=name, **changes)
        sides.append((write_record(tmp_path / name, made, tables), tmp_path / name))
    found = verdict(sides[0], sides[1])
    assert found.status == "PASS"
    decode = next(check for check in found.checks if check.metric.startswith("decode"))
    assert decode.estimate is not None
    assert decode.estimate.n == DOCUMENTS - 2
