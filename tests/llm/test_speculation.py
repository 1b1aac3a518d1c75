"""Speculative decoding with drafts of the host on a real model: the very tokens of plain decoding, several a step."""

from __future__ import annotations

import pytest

from raylm import LLM, SamplingParams
from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from tests.support.drafting import steps_in_a_millisecond

pytestmark = pytest.mark.usefixtures("demo")
LIST = "apples, pears, plums, grapes, figs, dates, apples, pears, plums, grapes, figs, dates, apples, pears,"
PROMPTS = [LIST, f"Repeat this list twice. {LIST}\n", "The capital of France is", "1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=32, ignore_eos=True, seed=5),
    SamplingParams(temperature=0.4, presence_penalty=0.2, max_tokens=32, ignore_eos=True, seed=6),
]


def load(**sections) -> LLM:
    settings = {
        "model": {"path": "smollm2-135m", "max_model_len": 128},
        "cache": {"num_blocks": 100, "block_size": 8},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
        "runtime": {"device": "cpu", "num_threads": 1},
        **sections,
    }
    return LLM(parse(EngineConfig, settings, source="test"), progress=False)


def run(llm: LLM):
    outputs = [completion.outputs[0] for completion in llm.generate(PROMPTS, PARAMS, progress=False)]
    return [output.token_ids for output in outputs], outputs[0]


@pytest.fixture(scope="module")
def plain(demo):
    llm = load()
    found = run(llm)
    llm.close()
    return found


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        ("ngram", {}),
        ("ngram", {"runtime": {"device": "cpu", "num_threads": 1, "plans_in_flight": 2}}),
        ("suffix", {}),
        ("ngram", {"cache": {"num_blocks": 30, "block_size": 8, "swap_gib": 0.1}}),
    ],
    ids=["ngram", "two plans", "suffix", "preempted"],
)
def test_drafts_change_no_token(method, sections, plain, monkeypatch):
    steps_in_a_millisecond(monkeypatch)
    llm = load(speculation={"method": method, "num_drafts": 5}, **sections)
    tokens, first = run(llm)
    assert run(llm)[0] == tokens
    drafts = llm._engine.stats().drafts
    llm.close()
    assert tokens == plain[0]
    for token, mine, others in zip(first.token_ids, first.logprobs, plain[1].logprobs, strict=True):
        assert mine[token].logprob == pytest.approx(others[token].logprob, abs=1e-3)
        assert mine[token].rank == others[token].rank == 1 and len(mine) == 2
    assert drafts.num_accepted_tokens > 0
