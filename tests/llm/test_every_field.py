"""Every field of SamplingParams does something: a field without a case here, or one that reaches nothing, fails."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from raylm import LLM, EngineConfig, SamplingParams, StructuredOutput
from raylm.core.step import TokenDelta
from raylm.core.thinking import ThinkingSection
from raylm.text.definition import TokenizerInfo
from raylm.text.processor import TextProcessor
from raylm.text.tokenizer import Tokenizer
from raylm.worker.sampling import processors
from tests.support import checkpoints

PROMPT = [5, 6, 7]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
HOT = SamplingParams(temperature=1.5, seed=3, max_tokens=8, ignore_eos=True)


class Ask:
    """A model, and what it says to a prompt with some fields changed."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def outputs(self, base: SamplingParams = GREEDY, **changes: object):
        return self.llm.generate([PROMPT], replace(base, **changes), progress=False)[0].outputs

    def tokens(self, base: SamplingParams = GREEDY, **changes: object) -> list[int]:
        return self.outputs(base, **changes)[0].token_ids

    def deltas(self, **changes: object) -> list[TokenDelta]:
        """What the engine says, before it is text."""
        self.llm._engine.add(["a"], PROMPT, replace(GREEDY, **changes))
        found: list[TokenDelta] = []
        while self.llm._engine.has_work:
            found += self.llm._engine.step()
        return found

    def differ(self, name: str, value: object, base: SamplingParams = GREEDY) -> None:
        """The field alone changes the tokens."""
        assert self.tokens(base, **{name: value}) != self.tokens(base)

    def is_greedy_with(self, name: str, value: object) -> None:
        """The field leaves one token to sample from, the likeliest."""
        assert self.tokens(HOT) != self.tokens() == self.tokens(HOT, **{name: value})


def typical_p(ask: Ask) -> None:
    assert len({tuple(ask.tokens(HOT, typical_p=1e-6, seed=seed)) for seed in range(4)}) == 1
    assert len({tuple(ask.tokens(HOT, seed=seed)) for seed in range(4)}) == 4


def logit_bias(ask: Ask) -> None:
    assert ask.tokens(logit_bias={9: 100}) == [9] * 8


def allowed_token_ids(ask: Ask) -> None:
    assert set(ask.tokens(HOT, allowed_token_ids=[4, 9])) == {4, 9}


def bad_token_ids(ask: Ask) -> None:
    first, second = ask.tokens()[:2]
    assert ask.tokens(bad_token_ids=[[first]])[0] != first
    assert ask.tokens(bad_token_ids=[[first, second]])[:2] != [first, second]
    assert ask.tokens(bad_token_ids=[[first, second]])[0] == first


def bad_words(ask: Ask) -> None:
    (token,) = ask.llm.text.encode("a", add_special_tokens=False)
    assert set(ask.tokens(logit_bias={token: 100})) == {token}
    assert token not in ask.tokens(logit_bias={token: 100}, bad_words=["a"])


def min_tokens(ask: Ask) -> None:
    first = ask.tokens()[0]
    assert len(ask.tokens(stop_token_ids=[first])) == 1
    assert len(ask.tokens(stop_token_ids=[first], min_tokens=3)) >= 3


def logits_processors(ask: Ask) -> None:
    assert ask.tokens(HOT, logits_processors=["only"]) == [11] * 8


def n(ask: Ask) -> None:
    assert len({tuple(output.token_ids) for output in ask.outputs(HOT, n=3)}) == 3


def max_tokens(ask: Ask) -> None:
    assert len(ask.tokens(max_tokens=3)) == 3


def logprobs(ask: Ask) -> None:
    assert {delta.logprobs for delta in ask.deltas()} == {None}
    (first, *_) = ask.deltas(logprobs=2)
    assert [len(top) for top in first.logprobs.top_ids] == [2] * len(first.token_ids)


def prompt_logprobs(ask: Ask) -> None:
    assert ask.deltas()[0].prompt_logprobs is None
    found = ask.deltas(prompt_logprobs=1)[0].prompt_logprobs
    assert [len(top) for top in found.top_ids] == [1] * (len(PROMPT) - 1)


def logprob_token_ids(ask: Ask) -> None:
    assert ask.deltas(logprobs=0, logprob_token_ids=[4, 9])[0].logprobs.top_ids[0] == [4, 9]


def beam_width(ask: Ask) -> None:
    assert len({tuple(output.token_ids) for output in ask.outputs(beam_width=3, n=3)}) == 3


def ended_lengths(ask: Ask, **changes: object) -> list[int]:
    """Lengths of a search's sequences, which can end at any token of half of the vocabulary."""
    ends = tuple(range(0, checkpoints.VOCAB_SIZE, 2))
    return [len(output.token_ids) for output in ask.outputs(beam_width=4, n=4, stop_token_ids=ends, **changes)]


def length_penalty(ask: Ask) -> None:
    assert sum(ended_lengths(ask, length_penalty=10)) > sum(ended_lengths(ask, length_penalty=-10))


def early_stopping(ask: Ask) -> None:
    long = {"length_penalty": 3.0}
    assert ended_lengths(ask, early_stopping=True, **long) != ended_lengths(ask, **long)


def stop(ask: Ask) -> None:
    text = ask.outputs()[0].text
    assert len(text) > 1 and ask.outputs(stop=[text[1]])[0].text == text[: text.index(text[1])]


def stop_token_ids(ask: Ask) -> None:
    second = ask.tokens()[1]
    assert ask.tokens(stop_token_ids=[second])[-1] == second and len(ask.tokens(stop_token_ids=[second])) < 8


def include_stop_str_in_output(ask: Ask) -> None:
    text = ask.outputs()[0].text
    assert ask.outputs(stop=[text[1]], include_stop_str_in_output=True)[0].text.endswith(text[1])


def ignore_eos(ask: Ask) -> None:
    biased = {"logit_bias": {checkpoints.EOS: 100}}
    assert len(ask.tokens(**biased)) == 8 and len(ask.tokens(**biased, ignore_eos=False)) == 1


def structure(ask: Ask) -> None:
    form = StructuredOutput("choice", '["ab", "cd"]')
    (output,) = ask.outputs(HOT, structure=form, ignore_eos=False)
    assert output.text in ("ab", "cd") and output.finish_reason == "stop"


def thinking_token_budget(ask: Ask) -> None:
    section = ThinkingSection(begin=(), end=(9, 11), begun=True)
    found = ask.tokens(thinking=section, thinking_token_budget=3)
    assert found[:5] == [*ask.tokens()[:3], 9, 11] and ask.tokens(thinking=section) == ask.tokens()


def thinking(ask: Ask) -> None:
    first, _, third = ask.tokens()[:3]
    section = ThinkingSection(begin=(first,), end=(9,))
    assert ask.tokens(thinking=section, thinking_token_budget=1)[2] == 9 != third


def skip_special_tokens(ask: Ask) -> None:
    biased = {"logit_bias": {checkpoints.EOS: 100}}
    assert ask.outputs(**biased)[0].text == ""
    assert ask.outputs(**biased, skip_special_tokens=False)[0].text == "<|eos|>" * 8


def spaces_between_special_tokens(_: Ask) -> None:
    backend = Backend(models.WordLevel({"the": 0}))
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    text = TextProcessor(Tokenizer(backend, TokenizerInfo({}, None, (), None)))
    params = SamplingParams(skip_special_tokens=False)
    assert text.stream(params).push([1, 1, 0], "length").text == "<s> <s> the"
    assert (
        text.stream(replace(params, spaces_between_special_tokens=False)).push([1, 1, 0], "length").text == "<s><s> the"
    )


CASES: dict[str, Callable[[Ask], None]] = {
    "temperature": lambda ask: ask.differ("temperature", 1.5),
    "top_p": lambda ask: ask.is_greedy_with("top_p", 1e-6),
    "top_k": lambda ask: ask.is_greedy_with("top_k", 1),
    "min_p": lambda ask: ask.is_greedy_with("min_p", 1),
    "typical_p": typical_p,
    "presence_penalty": lambda ask: ask.differ("presence_penalty", 2, REPEATING),
    "frequency_penalty": lambda ask: ask.differ("frequency_penalty", 2, REPEATING),
    "repetition_penalty": lambda ask: ask.differ("repetition_penalty", 1e-6),
    "logit_bias": logit_bias,
    "allowed_token_ids": allowed_token_ids,
    "bad_words": bad_words,
    "bad_token_ids": bad_token_ids,
    "min_tokens": min_tokens,
    "logits_processors": logits_processors,
    "seed": lambda ask: ask.differ("seed", 4, HOT),
    "max_tokens": max_tokens,
    "n": n,
    "logprobs": logprobs,
    "prompt_logprobs": prompt_logprobs,
    "logprob_token_ids": logprob_token_ids,
    "beam_width": beam_width,
    "length_penalty": length_penalty,
    "early_stopping": early_stopping,
    "stop": stop,
    "stop_token_ids": stop_token_ids,
    "include_stop_str_in_output": include_stop_str_in_output,
    "ignore_eos": ignore_eos,
    "structure": structure,
    "thinking_token_budget": thinking_token_budget,
    "thinking": thinking,
    "skip_special_tokens": skip_special_tokens,
    "spaces_between_special_tokens": spaces_between_special_tokens,
}
REPEATING = replace(GREEDY, allowed_token_ids=(4, 9))
"""Two tokens to choose from: whatever is taken from one that is there already makes the other one the likelier."""


class OnlyToken:
    """A user's processor: it leaves one token."""

    def __call__(self, logits, token_ids, num_tokens):
        return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([11]), 0)


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    entry = importlib.metadata.EntryPoint("only", f"{__name__}:OnlyToken", processors.GROUP)
    config = {
        "model": {"path": str(checkpoints.llama(tmp_path_factory.mktemp("llama"))), "max_model_len": 64},
        "generation": {"logits_processors": ["only"]},
        "runtime": {"device": "cpu"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processors, "entry_points", lambda *, group: [entry])
        llm = LLM(EngineConfig.model_validate(config), progress=False)
    yield Ask(llm)
    llm.close()


def test_every_field_has_a_case():
    assert set(CASES) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", CASES)
def test_the_field_has_an_effect(ask, name):
    CASES[name](ask)
