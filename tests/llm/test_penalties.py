"""Penalties through the whole engine, against transformers' own and against plain ones."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from raylm import LLM, EngineConfig, SamplingParams
from tests.support import checkpoints
from tests.support.greedy import assert_greedy, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
KINDS = [
    GREEDY,
    dataclasses.replace(GREEDY, repetition_penalty=1.4),
    dataclasses.replace(GREEDY, frequency_penalty=0.3),
    dataclasses.replace(GREEDY, presence_penalty=1.5),
    dataclasses.replace(GREEDY, repetition_penalty=0.8, frequency_penalty=1.0, presence_penalty=-0.5),
    dataclasses.replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.7, temperature=1.0, seed=5),
]


def load(folder: Path, *, num_blocks: int = 400, swap_gib: float = 0.0, plans_in_flight: int = 1) -> LLM:
    sections = {
        "model": {"path": str(folder), "max_model_len": 64},
        "cache": {"block_size": 4, "num_blocks": num_blocks, "swap_gib": swap_gib},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 32},
        "runtime": {"device": "cpu", "plans_in_flight": plans_in_flight},
    }
    return LLM(EngineConfig.model_validate(sections), progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(folder: Path):
    llm = load(folder)
    yield llm
    llm.close()


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [completion.outputs[0].token_ids for completion in llm.generate(prompts, params, progress=False)]


def _processed(
    processor: RepetitionPenaltyLogitsProcessor, prompt: list[int], generated: list[int], logits: Tensor
) -> Tensor:
    return processor(torch.tensor([prompt + generated]), logits[None])[0]


def test_repetition_is_transformers_own(folder, llm):
    model = checkpoints.reference(folder)
    prompts = random_prompts(6, llm.info.vocab_size)
    plain = run(llm, prompts, GREEDY)
    for penalty in (1.5, 0.7):
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        found = run(llm, prompts, dataclasses.replace(GREEDY, repetition_penalty=penalty))
        assert sum(ours != theirs for ours, theirs in zip(found, plain, strict=True)) >= 4
        for prompt, tokens in zip(prompts, found, strict=True):
            assert_greedy(model, prompt, tokens, partial(_processed, processor, prompt))


@pytest.mark.parametrize(("frequency", "presence"), [(0.4, 0.0), (0.0, 1.5), (1.0, -0.5)])
def test_only_what_was_generated_pays_for_frequency_and_presence(folder, llm, frequency, presence):
    model = checkpoints.reference(folder)
    prompts = random_prompts(6, llm.info.vocab_size)
    # What it would say first is in the prompt: that must not keep it from saying so.
    firsts = [tokens[0] for tokens in run(llm, prompts, GREEDY)]
    prompts = [[first] * 3 + prompt for first, prompt in zip(firsts, prompts, strict=True)]
    params = dataclasses.replace(GREEDY, frequency_penalty=frequency, presence_penalty=presence)

    def change(generated: list[int], logits: Tensor) -> Tensor:
        logits = logits.clone()
        for token, count in Counter(generated).items():
            logits[token] -= frequency * count + presence
        return logits

    found = run(llm, prompts, params)
    assert found != run(llm, prompts, GREEDY)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert_greedy(model, prompt, tokens, change)


def test_a_batch_of_every_kind_is_each_alone(llm):
    prompts = random_prompts(6, llm.info.vocab_size)
    alone = [run(llm, [prompt], params)[0] for prompt, params in zip(prompts, KINDS, strict=True)]
    assert run(llm, prompts, KINDS) == alone
    assert len(set(map(tuple, alone))) == 6


@pytest.mark.parametrize(("swap_gib", "plans_in_flight"), [(0.0, 2), (0.01, 1)], ids=["recompute", "swap"])
def test_preempted_requests_pay_the_same(folder, llm, swap_gib, plans_in_flight):
    """One that comes back brings generated tokens with its row: they are not the prompt's."""
    prompts = random_prompts(6, llm.info.vocab_size)
    expected = run(llm, prompts, KINDS)
    tight = load(folder, num_blocks=28, swap_gib=swap_gib, plans_in_flight=plans_in_flight)
    assert run(tight, prompts, KINDS) == expected
    stats = tight._engine.stats()
    assert stats.num_preemptions > 0, "the test is meant to preempt"
    assert (stats.num_swaps > 0) == (swap_gib > 0)
    tight.close()


def test_log_probabilities_stay_the_models_own(folder, llm):
    prompt = [5, 6, 7]
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, logprobs=0, repetition_penalty=2, frequency_penalty=2
    )
    output = llm.generate([prompt], params, progress=False)[0].outputs[0]
    with torch.inference_mode():
        logits = checkpoints.reference(folder)(torch.tensor([prompt + output.token_ids])).logits[
            0, len(prompt) - 1 : -1
        ]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    own = [each[token].logprob for token, each in zip(output.token_ids, output.logprobs, strict=True)]
    torch.testing.assert_close(torch.tensor(own), expected, rtol=1e-3, atol=1e-3)


def test_each_of_several_completions_pays_for_its_own_tokens(llm):
    """Each is what it is alone: the i-th samples with the seed + i."""
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=12, ignore_eos=True, presence_penalty=2)
    outputs = llm.generate([[5, 6, 7] * 4], params, progress=False)[0].outputs
    for index, output in enumerate(outputs):
        alone = dataclasses.replace(params, n=1, seed=11 + index)
        assert run(llm, [[5, 6, 7] * 4], alone) == [output.token_ids]


def test_a_beam_search_pays_nothing(llm):
    beams = SamplingParams(beam_width=3, n=2, max_tokens=6, ignore_eos=True)
    paying = dataclasses.replace(beams, repetition_penalty=2, presence_penalty=2, frequency_penalty=2)
    expected, found = (llm.generate([[5, 6, 7]], params, progress=False)[0].outputs for params in (beams, paying))
    assert found == expected


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_smallest_penalty_gives_a_token(llm, temperature):
    """It makes the logits of seen tokens as large as numbers get."""
    params = dataclasses.replace(GREEDY, repetition_penalty=1e-300, temperature=temperature, top_p=0.9, seed=1)
    [tokens] = run(llm, [[5, 6, 7]], params)
    assert len(tokens) == 24
