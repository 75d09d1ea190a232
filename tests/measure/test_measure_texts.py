"""What is kept for people: prompts, answers, beginnings of documents, texts of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
from fake_engine import word_tokenizer

from evalq.config import RunConfig, config_hash
from evalq.measure.texts import DOCUMENT_LIMIT, TEXT_LIMIT, kept_texts, piece_table, text_row
from evalq.records import piece_schema, text_schema


def sample(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"doc_id": 3, "arguments": arguments, **more}


def test_a_choice_keeps_prompt_and_answers() -> None:
    row = text_row("hellaswag", sample([("He sits", " down."), ("He sits", " up.")], filtered_resps=[(-1.0, True)]))
    assert row == {"task": "hellaswag", "id": 3, "prompt": "He sits", "choices": ["down.", "up."], "response": None}


def test_lm_evals_mappings_read_the_same() -> None:
    pairs = {"gen_args_0": {"arg_0": "Q", "arg_1": " a"}, "gen_args_1": {"arg_0": "Q", "arg_1": " b"}}
    assert text_row("t", sample(pairs))["choices"] == ["a", "b"]


def test_a_document_keeps_its_beginning_and_a_long_prompt_its_end() -> None:
    document = text_row("wikitext", sample([("x" * 1000,)]))
    assert (len(document["prompt"]), document["choices"]) == (DOCUMENT_LIMIT, [])
    prompt = "shots " * 1000 + "the question?"
    long = text_row("arc", sample([(prompt, " yes")]))
    assert len(long["prompt"]) == TEXT_LIMIT
    assert long["prompt"].endswith("the question?")


def test_a_generated_answer_is_kept() -> None:
    row = text_row("gsm8k", sample([("How many?", {"until": ["\n"]})], filtered_resps=["42"]))
    assert (row["response"], row["choices"]) == ("42", [])


def test_half_characters_do_not_stop_a_record() -> None:
    row = text_row("t", sample([("bad \ud800", " \udfff")]))
    assert row["prompt"] == "bad ?"
    pa.Table.from_pylist([row], schema=text_schema())


def test_pieces_of_scored_and_first_ranked_tokens() -> None:
    tokens = pa.table({"token_id": pa.array([3, 4, 3], pa.int32()), "top1_id": pa.array([5, 4, 3], pa.int32())})
    table = piece_table(tokens, word_tokenizer())
    assert table.schema == piece_schema()
    assert table.to_pylist() == [{"token_id": 3 + i, "piece": f"w{i}"} for i in range(3)]


def test_sentencepiece_keeps_its_space() -> None:
    class Spaced:
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return ["▁the"] * len(ids)

        def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
            return ["the"] * len(ids)

    tokens = pa.table({"token_id": pa.array([1], pa.int32()), "top1_id": pa.array([1], pa.int32())})
    assert piece_table(tokens, Spaced()).column("piece").to_pylist() == [" the"]


def test_nothing_to_keep_makes_no_table() -> None:
    assert kept_texts({"wikitext": []}, None, word_tokenizer()) == {}


def test_keeping_texts_changes_no_measurement() -> None:
    config = RunConfig()
    other = dataclasses.replace(config, tasks=dataclasses.replace(config.tasks, keep_texts=False))
    assert config_hash(config) == config_hash(other)
