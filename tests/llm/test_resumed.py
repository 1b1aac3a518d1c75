"""Requests that another engine began, cut after every number of tokens: an engine goes on with the very tokens, log
probabilities and end of an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from raylm import LLM, SamplingParams, StructuredOutput
from raylm.core.options import RequestOptions
from raylm.core.request import Begun
from raylm.core.step import Logprobs
from raylm.core.thinking import ThinkingSection
from tests.llm.loading import load
from tests.support import checkpoints
from tests.support.drafting import Models
from tests.support.engines import Collected, audit, run_to_end

PROMPT = [5, 6, 7, 8, 9, 5, 6]
LENGTH = 14
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
HOT = SamplingParams(temperature=1.5, seed=3, max_tokens=LENGTH, ignore_eos=True)
TWO = replace(HOT, allowed_token_ids=(4, 9))
"""Two tokens to choose from, so that words of two of them come up all the time."""
SECTION = ThinkingSection((4,), (17, 18), begun=True)
THINKING = replace(HOT, logit_bias={4: 8.0}, thinking=SECTION, thinking_token_budget=3)
SCHEMA = StructuredOutput("json_schema", '{"type": "array", "items": {"enum": ["ab", 17]}, "maxItems": 3}')
BEHIND = StructuredOutput("choice", '["ab", "cd"]', SECTION.end)
WISHES: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded, n of 3": replace(HOT, n=3, top_p=0.9, top_k=60),
    "the highest seed, n of 3": replace(HOT, n=3, seed=2**63 - 1),
    "thinking_token_budget": THINKING,
    "thinking_token_budget of 0": replace(THINKING, thinking_token_budget=0, n=2),
    "bad_token_ids": replace(TWO, bad_token_ids=[[4, 4], [9, 4, 9]], n=2),
    "bad_words": replace(HOT, logit_bias={token: 6.0 for token in range(67, 71)}, bad_words=["ab", "ba"], n=2),
    "min_tokens": replace(TWO, stop_token_ids=[4], min_tokens=6, n=3),
    "min_tokens and the model's end": replace(HOT, ignore_eos=False, logit_bias={checkpoints.EOS: 50.0}, min_tokens=5),
    "stop_token_ids": replace(HOT, stop_token_ids=list(range(0, checkpoints.VOCAB_SIZE, 9)), n=3),
    "logit_bias": replace(HOT, logit_bias={4: 5.0, 9: 6.0, 11: -100.0}),
    "penalties": replace(TWO, presence_penalty=1.0, frequency_penalty=0.7, repetition_penalty=1.3),
    "min_p and typical_p": replace(HOT, min_p=0.01, typical_p=0.9),
    "logprobs": replace(HOT, logprobs=3, n=2),
    "logprob_token_ids": replace(GREEDY, logprobs=0, logprob_token_ids=[4, 9]),
    "prompt_logprobs": replace(GREEDY, prompt_logprobs=2, logprobs=1),
    "structure": replace(HOT, structure=SCHEMA, max_tokens=30, ignore_eos=False, n=2),
    "structure behind thinking": replace(
        THINKING, structure=BEHIND, ignore_eos=False, max_tokens=30, logit_bias={checkpoints.EOS: -100.0}
    ),
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefixes, two plans": {"cache": {"prefix_caching": False}, "runtime": {"plans_in_flight": 2}},
    "preempted": {"cache": {"num_blocks": 24}, "runtime": {"plans_in_flight": 2}},
    "ngram": {"speculation": {"method": "ngram", "min_n": 1, "num_drafts": 4}, "runtime": {"plans_in_flight": 2}},
    "grammar": {"speculation": {"method": "grammar"}},
    "draft_model": {"runtime": {"plans_in_flight": 2}},
}
OPTIONS = RequestOptions()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models.make(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def undisturbed(models: Models) -> Iterator[dict[str, Collected]]:
    """What an engine gives that nothing happens to."""
    llm = load(models.llama, {}, max_model_len=64)
    yield {name: ask(llm, params) for name, params in WISHES.items()}
    llm.close()


@pytest.fixture(scope="module")
def successor(request: pytest.FixtureRequest, models: Models) -> Iterator[LLM]:
    changes = ENGINES[request.param]
    if request.param == "draft_model":
        changes = {**changes, "speculation": models.speculation(request.param)}
    llm = load(models.llama, changes, max_model_len=64)
    yield llm
    audit(llm._engine)
    llm.close()


def ask(llm: LLM, params: SamplingParams) -> Collected:
    llm._engine.add([str(index) for index in range(params.n)], PROMPT, llm._core.inputs.ready(params))
    return run_to_end(llm._engine)


def same(found: Logprobs | None, expected: Logprobs | None) -> bool:
    """Those of computed batches of other sizes differ in their last digits."""
    if found is None or expected is None:
        return found is expected
    ranks = found.ranks == expected.ranks and found.top_ids == expected.top_ids
    values = [found.values, *found.top_values], [expected.values, *expected.top_values]
    return ranks and all(one == pytest.approx(other, abs=1e-3) for one, other in zip(*values, strict=True))


def pairs() -> Iterator[object]:
    """Every wish with the plain engine and one or two others; the rest is nightly."""
    for i, engine in enumerate(ENGINES):
        for j, wish in enumerate(WISHES):
            is_chosen = engine == "plain" or (i + j) % 4 == 0
            yield pytest.param(engine, wish, marks=[] if is_chosen else [pytest.mark.nightly])


@pytest.mark.parametrize(("successor", "wish"), [*pairs()], indirect=["successor"], scope="module")
def test_at_every_cut_the_rest_is_that_of_an_undisturbed_run(
    wish: str, undisturbed: dict[str, Collected], successor: LLM
) -> None:
    params, whole = successor._core.inputs.ready(WISHES[wish]), undisturbed[wish]
    engine = successor._engine
    engine.reset_prefix_cache()
    cuts = range(max(map(len, whole.tokens.values())))
    for cut in cuts:
        # Sequences that had ended do not go on; the others were not all equally far.
        begun = {
            f"{cut} {id}": Begun(int(id), whole.tokens[id][: max(cut - int(id), 0)])
            for id in whole.tokens
            if max(cut - int(id), 0) < len(whole.tokens[id])
        }
        engine.resume(list(begun), PROMPT, params, OPTIONS, list(begun.values()))
    found = run_to_end(engine)
    assert len(found.tokens) >= len(cuts)
    for name, tokens in found.tokens.items():
        cut, id = name.split()
        first = max(int(cut) - int(id), 0)
        assert tokens == whole.tokens[id][first:], name
        assert found.reasons[name] == whole.reasons[id], name
        logprobs = whole.logprobs[id]
        assert same(found.logprobs[name], logprobs and logprobs.since(first)), name
        # A sequence that has tokens has told of its prompt already.
        assert same(found.prompts.get(name), None if first else whole.prompts.get(id)), name


def test_the_wishes_mean_something(undisturbed: dict[str, Collected]) -> None:
    """A field that does nothing in these runs would be resumed well by nobody's merit."""
    tokens = {name: found.tokens["0"] for name, found in undisturbed.items()}
    assert len({tuple(each) for each in undisturbed["seeded, n of 3"].tokens.values()}) == 3
    assert tokens["thinking_token_budget"][3:5] == [17, 18] == tokens["thinking_token_budget of 0"][:2]
    for said in undisturbed["bad_token_ids"].tokens.values():
        pairs = list(zip(said, said[1:], strict=False))
        assert (4, 4) not in pairs and (9, 9) in pairs
    lengths = [len(said) for said in undisturbed["min_tokens"].tokens.values()]
    assert min(lengths) >= 6 + 1 and max(lengths) < LENGTH, "the end comes behind them"
    assert len(tokens["min_tokens and the model's end"]) == 6
    assert {"stop", "length"} >= set(undisturbed["stop_token_ids"].reasons.values()) >= {"stop"}
    assert undisturbed["prompt_logprobs"].prompts["0"].values
    assert set(undisturbed["structure"].reasons.values()) == {"stop"}
