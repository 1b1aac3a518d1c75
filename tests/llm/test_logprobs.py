"""Log probabilities offline, against transformers: of sampled tokens, of prompts, of beams."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from raylm import LLM, EngineConfig, SamplingParams
from raylm.engine.factory import local_engine
from raylm.llm import Logprob
from tests.support import checkpoints
from tests.support.drafting import Fixed
from tests.support.greedy import random_prompts

VOCAB = checkpoints.VOCAB_SIZE
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoints.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(folder):
    return checkpoints.reference(folder)


def make_llm(folder, **sections) -> LLM:
    """Blocks of 4, chunks of 16 tokens, and memory for about three of the requests below."""
    config = {
        "model": {"path": str(folder), "max_model_len": 64},
        "cache": {"block_size": 4, "num_blocks": 40},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
        "runtime": {"device": "cpu"},
        "generation": {"max_logprobs": 1024},
        **sections,
    }
    return LLM(EngineConfig.model_validate(config), progress=False)


@pytest.fixture(scope="module")
def llm(folder):
    llm = make_llm(folder)
    yield llm
    llm.close()


@torch.inference_mode()
def expected(model, tokens: list[int]) -> torch.Tensor:
    """Log probabilities [len(tokens) - 1, vocab] of what follows each token but the last."""
    return model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def own_of(tokens: list[int], listed: list[dict[int, Logprob]]) -> torch.Tensor:
    """The log probabilities of the tokens themselves."""
    return torch.tensor([each[token].logprob for token, each in zip(tokens, listed, strict=True)])


def check(found: torch.Tensor, tokens: list[int], listed: list[dict[int, Logprob]], num_top: int) -> None:
    """`found` are the log probabilities [N, vocab] where the N tokens stand."""
    own = found.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(own_of(tokens, listed), own, **CLOSE)
    for row, token, value, each in zip(found, tokens, own, listed, strict=True):
        # Nearly equal ones may stand in another order here than there.
        assert int((row > value + 1e-3).sum()) < each[token].rank <= int((row > value - 1e-3).sum())
        assert next(iter(each)) == token
        top = sorted((one.rank, other) for other, one in each.items() if one.rank <= num_top)
        assert [rank for rank, _ in top] == list(range(1, num_top + 1)) and len(each) <= num_top + 1
        likeliest = row.topk(num_top).values
        torch.testing.assert_close(torch.tensor([each[other].logprob for _, other in top]), likeliest, **CLOSE)
        torch.testing.assert_close(row[[other for _, other in top]], likeliest, **CLOSE)


def test_prompts_and_answers_in_chunks_cached_and_preempted(llm, reference):
    """In each chunk of a prompt, in a cache that knows the prompt already, in requests that give way and come back."""
    prompts = random_prompts(8, VOCAB)
    params = SamplingParams(
        temperature=1.2, seed=5, n=2, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=2, presence_penalty=1
    )
    llm.generate(prompts, SamplingParams(max_tokens=1), progress=False)
    before = llm._engine.stats().num_preemptions
    for completion in llm.generate(prompts, params, progress=False):
        prompt = completion.prompt_token_ids
        assert len(completion.prompt_logprobs) == len(prompt) and completion.prompt_logprobs[0] is None
        for output in completion.outputs:
            found = expected(reference, prompt + output.token_ids)
            check(found[len(prompt) - 1 :], output.token_ids, output.logprobs, 3)
        check(found[: len(prompt) - 1], prompt[1:], completion.prompt_logprobs[1:], 2)
    assert llm._engine.stats().num_preemptions > before, "the test is meant to preempt"


def test_nothing_is_listed_that_was_not_asked_for(llm):
    completion = llm.generate([[1, 2]], SamplingParams(max_tokens=2), progress=False)[0]
    output = completion.outputs[0]
    assert (output.logprobs, output.cumulative_logprob, completion.prompt_logprobs) == (None, None, None)
    few = llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True, logprobs=0), progress=False)[0].outputs[
        0
    ]
    assert [list(each) for each in few.logprobs] == [[token] for token in few.token_ids]


def test_a_prompt_alone_is_scored(llm, reference):
    prompt = list(range(3, 50))
    completion = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0), progress=False)[0]
    assert completion.outputs[0].token_ids == []
    found = expected(reference, prompt).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(own_of(prompt[1:], completion.prompt_logprobs[1:]), found, **CLOSE)
    first = llm.generate([[7]], SamplingParams(max_tokens=0, prompt_logprobs=4), progress=False)[0]
    assert first.prompt_logprobs == [None]


def test_given_tokens_and_the_whole_vocabulary(llm, reference):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0, logprob_token_ids=[9, 4, 9])
    given, whole = llm.generate(
        [[5, 6]] * 2, [params, dataclasses.replace(params, logprob_token_ids=(), logprobs=-1)], progress=False
    )
    tokens = given.outputs[0].token_ids
    found = expected(reference, [5, 6, *tokens])[1:]
    for row, token, each in zip(found, tokens, given.outputs[0].logprobs, strict=True):
        assert set(each) == {token, 4, 9} and {each[other].rank for other in {4, 9} - {token}} <= {None}
        torch.testing.assert_close(torch.tensor([each[9].logprob, each[4].logprob]), row[[9, 4]], **CLOSE)
    for row, each in zip(found, whole.outputs[0].logprobs, strict=True):
        assert sorted(each) == list(range(VOCAB))
        best = int(row.argmax())
        assert each[best].rank == 1 and each[best].decoded_token == llm.text.token_bytes(best).decode()


def test_processed_are_those_of_the_distribution_that_is_drawn_from(folder, reference):
    """By configuration: after biases, temperature and what top_k drops; a greedy request has no temperature."""
    llm = make_llm(folder, generation={"logprobs": "processed"})
    params = SamplingParams(
        temperature=0.7,
        top_k=3,
        seed=2,
        max_tokens=6,
        ignore_eos=True,
        logprobs=4,
        logit_bias={8: 100},
        prompt_logprobs=0,
    )
    greedy = dataclasses.replace(params, temperature=0, logit_bias={8: 3.0})
    free = dataclasses.replace(params, top_k=0, logit_bias=())
    prompt = [5, 6]
    completions = llm.generate([prompt] * 3, [params, greedy, free], progress=False)
    llm.close()
    raw = [expected(reference, prompt + one.outputs[0].token_ids)[1:] for one in completions]
    biased, plain = raw[0].clone(), raw[1].clone()
    biased[:, 8] += 100
    plain[:, 8] += 3
    biased /= 0.7
    dropped = biased < biased.topk(3).values[:, -1:]
    dists = [
        biased.masked_fill(dropped, -torch.inf).log_softmax(-1),
        plain.log_softmax(-1),
        (raw[2] / 0.7).log_softmax(-1),
    ]
    for found, completion in zip(dists, completions, strict=True):
        output = completion.outputs[0]
        own = found.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(own_of(output.token_ids, output.logprobs), own, **CLOSE)
        for row, each in zip(found, output.logprobs, strict=True):
            values = sorted((one.logprob for one in each.values() if one.rank <= 4), reverse=True)
            torch.testing.assert_close(torch.tensor(values), row.topk(4).values, **CLOSE)
        of_prompt = expected(reference, prompt)[0, 6].item()
        assert completion.prompt_logprobs[1][6].logprob == pytest.approx(of_prompt, abs=1e-3), "a prompt is not sampled"
    (fourth,) = (one for one in completions[0].outputs[0].logprobs[0].values() if one.rank == 4)
    assert fourth.logprob == -torch.inf


@pytest.mark.parametrize("listed", ["raw", "processed"])
def test_accepted_drafts_have_theirs(folder, reference, listed):
    """The model drafts for itself, so that most are right: a step then gives several tokens, each with its own."""
    drafter = Fixed(3)
    llm = make_llm(
        folder,
        cache={"block_size": 4, "num_blocks": 200},
        speculation={"method": "draft_model", "model": str(folder), "num_drafts": 3},
        generation={"logprobs": listed},
    )
    llm._engine.shutdown()
    llm._core.engine = local_engine(llm.config, progress=False, drafter=drafter)
    prompts = random_prompts(4, VOCAB)
    greedy = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    drawn = dataclasses.replace(greedy, temperature=0.7, seed=3)
    for params in (greedy, drawn):
        scale = 0.7 if listed == "processed" and params.temperature else 1.0
        for completion in llm.generate(prompts, params, progress=False):
            prompt, output = completion.prompt_token_ids, completion.outputs[0]
            found = (expected(reference, prompt + output.token_ids)[len(prompt) - 1 :] / scale).log_softmax(-1)
            check(found, output.token_ids, output.logprobs, 2)
    llm.close()
    assert sum(accepted for _, accepted in drafter.accepted) > 20


@pytest.mark.parametrize("num_top", [0, 2, 12])
def test_beams(llm, reference, num_top):
    prompt = [5, 6, 7]
    params = SamplingParams(beam_width=4, n=3, max_tokens=6, ignore_eos=True, logprobs=num_top, prompt_logprobs=1)
    completion = llm.generate([prompt], params, progress=False)[0]
    for output in completion.outputs:
        found = expected(reference, prompt + output.token_ids)
        check(found[2:], output.token_ids, output.logprobs, num_top)
        check(found[:2], prompt[1:], completion.prompt_logprobs[1:], 1)


@pytest.mark.parametrize("includes", [False, True])
def test_a_beam_ends_at_its_stop_string(llm, includes):
    """As any other answer: cut there, said so, and not computed further."""
    prompt = [5, 6, 7]
    params = SamplingParams(beam_width=3, n=3, max_tokens=8, ignore_eos=True, include_stop_str_in_output=includes)
    best = llm.generate([prompt], params, progress=False)[0].outputs[0]
    stop = best.text[len(best.text) // 2 :][:3]
    assert stop
    outputs = llm.generate([prompt], dataclasses.replace(params, stop=(stop,)), progress=False)[0].outputs
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert ended and all(output.stop_reason == stop for output in ended)
    for output in outputs:
        text = llm.text.decode(output.token_ids)
        assert (stop in text) == (output in ended)
        if output in ended:
            assert stop not in llm.text.decode(output.token_ids[:-1]), "it went on behind its stop string"
            assert output.text == text[: text.index(stop) + (len(stop) if includes else 0)]
