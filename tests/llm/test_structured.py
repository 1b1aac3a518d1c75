"""Structured output offline: a model of random weights gives documents of the schema, whatever else an engine does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from raylm import LLM, SamplingParams, StructuredOutput
from raylm.errors import RequestRejected
from tests.llm.loading import load
from tests.support import checkpoints
from tests.support.drafting import steps_in_a_millisecond

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["first", "second"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "maxItems": 2},
    },
    "required": ["kind", "count", "tags"],
}
JSON = StructuredOutput("json_schema", json.dumps(SCHEMA))
HOT = SamplingParams(temperature=2.0, seed=7, max_tokens=120, structure=JSON)
PROMPTS = [[5, 6, 7], list(range(10, 31)), [9], [5, 6, 7, 8]]
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two plans": {"runtime": {"plans_in_flight": 2}},
    "little room, two plans": {"cache": {"num_blocks": 45}, "runtime": {"plans_in_flight": 2}},
    "drafts": {"speculation": {"method": "ngram", "min_n": 1, "num_drafts": 4}, "runtime": {"plans_in_flight": 2}},
    "forced": {"speculation": {"method": "grammar"}, "runtime": {"plans_in_flight": 2}},
    "no prefixes": {"cache": {"prefix_caching": False}, "scheduler": {"max_num_seqs": 2}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = load(folder, {}, max_model_len=160)
    yield made
    made.close()


def answers(llm: LLM, params: SamplingParams) -> list[list[tuple[str, str]]]:
    found = llm.generate(PROMPTS, params, progress=False)
    return [[(output.text, output.finish_reason) for output in completion.outputs] for completion in found]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[tuple[str, str]]]:
    found = answers(llm, replace(HOT, n=2))
    ended = [text for outputs in found for text, reason in outputs if reason == "stop"]
    assert len(set(ended)) > 4
    for text in ended:
        validate(json.loads(text), SCHEMA)
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_documents_are_the_same_in_every_engine(folder: Path, expected: list[Any], name: str) -> None:
    llm = load(folder, ENGINES[name], max_model_len=160)
    try:
        assert answers(llm, replace(HOT, n=2)) == expected
    finally:
        llm.close()


@pytest.mark.parametrize("plans", [1, 2])
def test_what_a_grammar_forces_is_verified_several_tokens_a_step(
    folder: Path, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_in_a_millisecond(monkeypatch)
    text = "the longest of all words, which nobody can choose otherwise, " * 2
    params = replace(HOT, structure=StructuredOutput("choice", json.dumps([text])), max_tokens=130)
    llm = load(folder, {"speculation": {"method": "grammar"}, "runtime": {"plans_in_flight": plans}}, max_model_len=160)
    try:
        assert all(reason == "stop" and found == text for ((found, reason),) in answers(llm, params))
        drafts = llm._engine.stats().drafts
        assert drafts.num_accepted_tokens > 50
        # A model of random weights often cuts the text into shorter tokens.
        assert drafts.num_accepted_tokens > 0.3 * drafts.num_draft_tokens
    finally:
        llm.close()


def test_rows_with_and_without_a_grammar_share_steps(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, seed=2, max_tokens=30, ignore_eos=True)
    choice = replace(free, structure=StructuredOutput("choice", '["yes", "no"]'), ignore_eos=False)
    number = replace(choice, structure=StructuredOutput("regex", "[0-9]{3}-[0-9]{2}"))
    alone = [llm.generate([PROMPTS[0]], one, progress=False)[0].outputs[0].text for one in (free, choice, number)]
    together = llm.generate([PROMPTS[0]] * 3, [free, choice, number], progress=False)
    assert [completion.outputs[0].text for completion in together] == alone
    assert alone[1] in ("yes", "no")
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", alone[2])


def test_a_stop_string_ends_it_before_its_grammar_does(llm: LLM) -> None:
    params = replace(HOT, structure=StructuredOutput("regex", "[a-z]{3}END[0-9]{40}"), stop=["END"])
    (output,) = llm.generate([PROMPTS[0]], params, progress=False)[0].outputs
    assert re.fullmatch("[a-z]{3}", output.text) and output.stop_reason == "END"


def test_a_grammar_begins_after_its_sequence_of_tokens(llm: LLM) -> None:
    begin = tuple(llm.text.encode("#", add_special_tokens=False))
    form = StructuredOutput("regex", "[0-9]{4}", begin)
    for seed in range(3):
        params = replace(HOT, seed=seed, structure=form, max_tokens=150)
        (output,) = llm.generate([PROMPTS[0]], params, progress=False)[0].outputs
        before, mark, after = output.text.partition("#")
        assert not mark or re.fullmatch("[0-9]{0,4}", after), output.text
    biased = replace(HOT, structure=form, logit_bias={begin[0]: 8.0}, temperature=0.5)
    (output,) = llm.generate([PROMPTS[0]], biased, progress=False)[0].outputs
    assert re.search("#[0-9]{4}$", output.text) and output.finish_reason == "stop"


def test_log_probabilities_are_those_before_the_mask(llm: LLM) -> None:
    params = replace(HOT, logprobs=0, structure=StructuredOutput("choice", '["yes"]'))
    (output,) = llm.generate([PROMPTS[0]], params, progress=False)[0].outputs
    assert output.text == "yes"
    assert output.cumulative_logprob is not None and output.cumulative_logprob < -1


def test_a_text_must_be_able_to_end(llm: LLM) -> None:
    endless = replace(HOT, ignore_eos=True, stop_token_ids=(10**6,))
    with pytest.raises(RequestRejected, match="structure needs a token that ends the text"):
        llm.generate([PROMPTS[0]], endless, progress=False)


def test_a_stream_is_a_document(llm: LLM) -> None:
    text = "".join(piece.text for piece in llm.stream(PROMPTS[0], replace(HOT, temperature=0.8)))
    validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"beam_width": 2}, "beam_width"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"allowed_token_ids": (5,)}, "allowed_token_ids"),
        ({"bad_words": ("a",)}, "bad_words"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"structure": "json"}, "structure"),
    ],
)
def test_what_a_grammar_cannot_go_with_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRejected, match=field) as caught:
        replace(HOT, **changes)
    assert caught.value.param == field


def test_a_structure_that_cannot_be_kept_to_is_refused_before_anything_runs(llm: LLM) -> None:
    bad = StructuredOutput("json_schema", '{"type": "array", "minItems": 2, "maxItems": 1}')
    with pytest.raises(RequestRejected, match="minItems 2 is over maxItems 1"):
        llm.generate(PROMPTS, replace(HOT, structure=bad), progress=False)
    with pytest.raises(RequestRejected, match="grammar first"):
        llm._engine.add(["a"], [5], HOT)
