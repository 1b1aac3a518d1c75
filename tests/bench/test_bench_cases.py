from __future__ import annotations

import json
import random

import pytest

from raylm.bench.cases import Case, Lengths, Request, load_dataset, parse_case, prompt_token_ids
from raylm.errors import ConfigError


def test_a_case_is_read():
    assert parse_case("short:16:128:64") == Case("short", 16, 128, Lengths(64, 64))
    mixed = parse_case("mixed:5:128:8-128")
    assert (mixed.output_label, mixed.input_len) == ("8-128", 128)
    assert parse_case("short:16:128:64").output_label == 64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:1:2", "name:requests:input_len:output_len"),
        (":1:2:3", "name:requests:input_len:output_len"),
        ("a:0:2:3", "requests must be an integer of at least 1, got '0'"),
        ("a:1:x:3", "input_len must be an integer of at least 1, got 'x'"),
        ("a:1:2:3-", "output_len must be an integer of at least 1, got ''"),
        ("a:1:2:9-3", "a rising range"),
        ("a:1:0+2:3", "the common part of input_len must be an integer of at least 1, got '0'"),
        ("a:1:2+:3", "input_len must be an integer of at least 1, got ''"),
    ],
)
def test_a_wrong_case_names_its_field(text, problem):
    with pytest.raises(ConfigError, match="--case") as error:
        parse_case(text)
    assert problem in str(error.value)


def test_lengths_spread_evenly_in_a_seeded_order():
    lengths = Lengths(8, 128)
    spread = lengths.spread(5, random.Random(1))
    assert sorted(spread) == [8, 38, 68, 98, 128]
    assert spread == lengths.spread(5, random.Random(1))
    assert Lengths(8, 128).spread(1, random.Random(1)) == [8]


def test_random_prompts_follow_the_seed():
    case = parse_case("a:4:6:3-5")
    allowed = prompt_token_ids(100, [50])
    requests = case.token_requests(1, allowed)
    assert requests == case.token_requests(1, allowed)
    assert requests != case.token_requests(2, allowed)
    assert [len(request.prompt) for request in requests] == [6] * 4
    assert all(token in allowed for request in requests for token in request.prompt)
    assert sorted(request.output_len for request in requests) == [3, 4, 4, 5]


def test_prompts_with_a_common_part_begin_alike():
    case = parse_case("a:4:6+3:2")
    assert (case.input_len, case.common_len) == (9, 6)
    prompts = [request.prompt for request in case.token_requests(1, prompt_token_ids(100))]
    assert {len(prompt) for prompt in prompts} == {9} and len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 4
    [*texts] = (request.prompt[0]["content"].split() for request in case.chat_requests(1))
    assert {len(words) for words in texts} == {9} and len({tuple(words[:6]) for words in texts}) == 1


def test_prompt_tokens_avoid_special_ones():
    ids = prompt_token_ids(100, [50])
    assert ids[0] == 10 and ids[-1] == 89 and 50 not in ids
    with pytest.raises(ConfigError, match="none to draw"):
        prompt_token_ids(3, [0, 1, 2])


def test_chat_prompts_are_words():
    requests = parse_case("a:2:7:3").chat_requests(1)
    assert [len(request.prompt[0]["content"].split()) for request in requests] == [7, 7]
    assert all(request.is_chat for request in requests)


def test_a_dataset_is_read(tmp_path):
    messages = [{"role": "user", "content": "Hello"}]
    lines = [{"prompt": "one", "output_len": 5}, {"prompt": [1, 2]}, {"messages": messages, "output_len": 9}]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    dataset = load_dataset(str(path))
    assert dataset.name == "mine" and dataset.requests == 3 and dataset.output_label == "5-128"
    assert dataset.entries == (Request("one", 5), Request([1, 2], 128), Request(messages, 9))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be an object"),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"prompt": ""}', "the prompt must be"),
        ('{"messages": ["a"]}', "the prompt must be"),
        ('{"prompt": "a", "output_len": 0}', "output_len must be an integer of at least 1, got 0"),
    ],
)
def test_a_wrong_line_of_a_dataset_is_named(tmp_path, line, problem):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(ConfigError, match="x.jsonl:2") as error:
        load_dataset(str(path))
    assert problem in str(error.value)


def test_no_dataset(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_dataset(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no requests"):
        load_dataset(str(tmp_path / "empty.jsonl"))
