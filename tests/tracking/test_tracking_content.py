"""What records become in MLflow: names, units, what is no number (case d1), what is too long (case d7)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import tracked_records as build
from hypothesis import given
from hypothesis import strategies as st

from evalq.errors import RecordError
from evalq.records import Estimate, read_record
from evalq.tracking import content


def test_metrics_carry_their_units_and_prefix() -> None:
    made = build.record(stage_seconds={"start": 20.0, "score wikitext": 60.0})
    metrics = content.metrics_of(made, None).values
    assert metrics["time/score_wikitext_seconds"] == 60.0
    assert metrics["quality/wikitext_word_perplexity"] == 32.2
    assert metrics["quality/hellaswag_acc_norm"] == 0.46
    assert metrics["memory/weight_bytes"] == 269_000_000
    assert metrics["memory/weight_gib"] == pytest.approx(0.250526, abs=1e-6)
    assert metrics["memory/kv_bytes_per_token"] == 23_040
    # (269,000,000 + 32,768 x 23,040) / 2^30
    assert metrics["memory/weights_and_kv_of_32768_tokens_gib"] == pytest.approx(0.953651, abs=1e-6)
    assert metrics["load/output_tokens_per_second"] == 410.0
    assert metrics["time/total_seconds"] == 80.0


def test_increase_is_a_percentage_with_its_interval() -> None:
    made = build.record("int8-w8a8")
    metrics = content.metrics_of(made, build.verdict(made, increase=0.008, half_width=0.003)).values
    assert metrics["quality/perplexity_increase_percent"] == pytest.approx(0.8)
    assert metrics["quality/perplexity_increase_percent_low"] == pytest.approx(0.5)
    assert metrics["quality/perplexity_increase_percent_high"] == pytest.approx(1.1)


def test_estimates_besides_the_verdict_keep_their_own_names() -> None:
    """The verdict's interval decides and has the common name; byte perplexity does not overwrite it."""
    made = build.record("int8-w8a8")
    besides = [
        Estimate("byte_perplexity_increase", 0.002, 0.001, 0.003, 0.95, 8, "paired"),
        Estimate("hellaswag_acc_flips", 0.25, 0.1, 0.4, 0.95, 8, "Wilson"),
        Estimate("mean_kld_nats", 0.02, 0.01, 0.03, 0.95, 800, "mean"),
    ]
    metrics = content.metrics_of(made, build.verdict(made, increase=0.008), besides).values
    assert metrics["quality/perplexity_increase_percent"] == pytest.approx(0.8)
    assert metrics["quality/byte_perplexity_increase_percent_high"] == pytest.approx(0.3)
    assert metrics["quality/hellaswag_acc_flips_percent_low"] == pytest.approx(10.0)
    assert metrics["fidelity/mean_kld_nats"] == 0.02
    assert (metrics["fidelity/mean_kld_nats_low"], metrics["fidelity/mean_kld_nats_high"]) == (0.01, 0.03)


def test_accuracies_of_whole_items_have_an_interval() -> None:
    """4 of 8: Clopper-Pearson 0.157 to 0.843; 0.46 of 8 items is no count."""
    metrics = content.metrics_of(build.record(), None).values
    assert metrics["quality/hellaswag_acc_low"] == pytest.approx(0.157, abs=1e-3)
    assert metrics["quality/hellaswag_acc_high"] == pytest.approx(0.843, abs=1e-3)
    assert "quality/hellaswag_acc_norm_low" not in metrics


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("token_perplexity_increase", "quality/perplexity_increase_percent"),
        ("hellaswag_acc_norm_difference", "quality/hellaswag_acc_norm_difference_points"),
        ("hellaswag_acc_flips", "quality/hellaswag_acc_flips_percent"),
        ("weight_bytes_share", "memory/weight_bytes_percent_of_baseline"),
        ("output_tokens_per_second_share", "load/output_tokens_per_second_percent_of_baseline"),
        ("mean_kld_nats", "fidelity/mean_kld_nats"),
        ("kld_nats_p99", "fidelity/kld_nats_p99"),
        ("review_coherence", "quality/review_coherence"),
    ],
)
def test_names_of_estimates(name: str, metric: str) -> None:
    assert content.estimate_metric(name)[0] == metric


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_what_is_no_number_is_a_tag_and_no_metric(value: float | None) -> None:
    """Case d1."""
    made = build.record(perplexity=value)
    metrics = content.metrics_of(made, None)
    assert "quality/wikitext_word_perplexity" not in metrics.values
    tags = content.tags_of(made, None, False, metrics)
    assert tags["evalq.invalid.quality/wikitext_word_perplexity"] == "no words were scored"


@given(st.dictionaries(st.text(max_size=30), st.one_of(st.none(), st.floats()), max_size=6))
def test_only_finite_numbers_are_ever_metrics(metrics: dict[str, float | None]) -> None:
    made = build.record(tasks={"t": build.scores("t", metrics)})
    found = content.metrics_of(made, None)
    assert all(math.isfinite(value) for value in found.values.values())
    assert not set(found.values) & set(found.invalid)


def test_invalid_load_is_no_metric() -> None:
    made = build.record(loads={"smoke": replace(build.load(), valid=False, reasons=["output lengths differ"])})
    metrics = content.metrics_of(made, None)
    assert metrics.invalid["load/output_tokens_per_second"] == "output lengths differ"


def test_several_loads_keep_their_names() -> None:
    metrics = content.metrics_of(build.record(loads={"a": build.load(), "b": build.load()}), None).values
    assert {"load/a_output_tokens_per_second", "load/b_output_tokens_per_second"} <= set(metrics)


def test_params_are_the_flattened_config() -> None:
    config = {
        "quant": {"name": "4_8", "groups": {"g": {"weights": {"num_bits": 4}}}, "notes": ["x"]},
        "paths": {"root": "/x"},
    }
    params = content.params_of(build.record(), config)
    assert params["quant.name"] == "4_8"
    assert params["quant.groups.g.weights.num_bits"] == "4"
    assert params["engine_reported.max_num_seqs"] == "64"
    assert not any(key.startswith(("paths", "quant.notes")) for key in params)


def test_long_values_point_to_where_they_are_whole() -> None:
    """Case d7: 7,000 characters; two values that differ only at the end do not look equal."""
    first, second = "x" * 7000, "x" * 6999 + "y"
    params = [
        content.params_of(build.record(), {"engine": {"extra": text}})["engine.extra"] for text in (first, second)
    ]
    assert all(len(text) <= content.PARAM_LIMIT for text in params)
    assert "7,000 characters" in params[0]
    assert "record/config.yaml" in params[0]
    assert params[0] != params[1]


def test_tags_name_cell_and_end() -> None:
    made = build.failed("w4a16")
    tags = content.tags_of(made, None, False, content.metrics_of(made, None))
    assert tags["evalq.quant"] == "w4a16"
    assert tags["evalq.status"] == "failed"
    assert tags["evalq.failure"] == "oom in score: no memory left"
    assert content.run_status(made) == "FAILED"
    assert content.run_status(build.failed("x", "interrupted")) == "KILLED"
    assert content.run_status(build.record()) == "FINISHED"


def test_fingerprints_that_differ_show() -> None:
    none = content.Metrics({}, {})
    one, two = (build.record(fingerprint={"window": window}) for window in (2048, 4096))
    assert (
        content.tags_of(one, None, False, none)["evalq.fingerprint"]
        == content.tags_of(one, None, True, none)["evalq.fingerprint"]
    )
    assert (
        content.tags_of(one, None, False, none)["evalq.fingerprint"]
        != content.tags_of(two, None, False, none)["evalq.fingerprint"]
    )


def test_times_span_the_stages() -> None:
    start, end = content.times_of(build.record())
    assert end - start == 80_000


def test_changed_table_is_refused(tmp_path: Path) -> None:
    folder = build.write(tmp_path / "r", build.record())
    made = read_record(folder)
    content.refuse_changed_tables(folder, made)
    (folder / "items.parquet").write_bytes(b"other")
    with pytest.raises(RecordError, match=r"items\.parquet is not the table"):
        content.refuse_changed_tables(folder, made)


def test_tables_that_no_judge_needs_may_be_away(tmp_path: Path) -> None:
    folder = build.write(tmp_path / "r", build.record())
    made = replace(read_record(folder), tables={**read_record(folder).tables, "tokens": "a" * 64})
    content.refuse_changed_tables(folder, made)
    (folder / "tokens.parquet").write_bytes(b"other")
    with pytest.raises(RecordError, match=r"tokens\.parquet is not the table"):
        content.refuse_changed_tables(folder, made)
    (folder / "tokens.parquet").unlink()
    (folder / "items.parquet").unlink()
    with pytest.raises(RecordError, match=r"items\.parquet is not the table"):
        content.refuse_changed_tables(folder, made)
