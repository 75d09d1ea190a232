"""Policy files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from evalq.config import GateConfig
from evalq.errors import ConfigError
from evalq.judge.policy import checked_policy, parse_condition, policy_from_mapping, read_policy


@pytest.mark.parametrize("name", ["default", "strict"])
def test_shipped_policies_are_sound(name: str) -> None:
    policy = read_policy(name)
    rules = checked_policy(policy)
    assert policy.name == name
    assert (rules.target, rules.limit) == (0.01, 0.015)
    assert {f.name for f in dataclasses.fields(GateConfig)} == set(dataclasses.asdict(policy))


def test_a_number_in_yaml_is_a_fraction(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("target: 0.005\nlimit: 1.5%\n")
    rules = checked_policy(read_policy(file))
    assert (rules.target, rules.limit) == (0.005, 0.015)


def test_every_problem_is_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_from_mapping({"limmit": "1%", "strict": "yes", "min_documents": 2.5}, "p.yaml")
    text = str(caught.value)
    assert "did you mean limit?" in text
    assert "strict is 'yes'; expected true or false" in text
    assert "min_documents is 2.5; expected a whole number" in text


@pytest.mark.parametrize("data", [{"looks": ["a"]}, {"looks": 20}, {"allow": [1]}, {"required_tasks": "wikitext"}])
def test_lists_hold_what_they_should(data: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="a list of"):
        policy_from_mapping(data, "p.yaml")


@pytest.mark.parametrize("content", ["", "[]", "a: [", "just text"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError):
        read_policy(file)


def test_missing_files_and_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_policy(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="did you mean strict"):
        read_policy("strickt")


@pytest.mark.parametrize(
    "change",
    [
        {"metric": "perplexity"},
        {"required_margins": ["hellaswag"]},
        {"confidence": 0.4},
        {"confidence": float("nan")},
        {"min_documents": 1},
        {"looks": [40, 20]},
        {"looks": [1, 20]},
        {"target": "2%"},
        {"task_margins": {"hellaswag": "one"}},
        {"conditions": ["weight_bytes < 70%"]},
    ],
)
def test_contradictions_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        checked_policy(dataclasses.replace(GateConfig(), **change))


def test_condition_by_parts() -> None:
    found = parse_condition("output_tokens_per_second@100 >= 97%")
    assert (found.quantity, found.load, found.at_most) == ("output_tokens_per_second", "100", False)
    assert found.share == pytest.approx(0.97)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("weight_byte <= 70%", "did you mean weight_bytes"),
        ("weight_bytes <= 70", "ambiguous"),
        ("weight_bytes@100 <= 70%", "name no load"),
        ("output_tokens_per_second >= 100%", "name its load"),
        ("weight_bytes <= -5%", "not a share"),
        ("lots of memory", "not a condition"),
    ],
)
def test_bad_conditions_say_why(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_condition(text)
