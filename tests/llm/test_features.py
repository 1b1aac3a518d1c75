"""Greedy output of a real model with each feature of the scheduler on, against the same with all of them off, while
memory is so short that requests are preempted."""

from __future__ import annotations

import pytest

from raylm import LLM, SamplingParams
from raylm.config.base import parse
from raylm.config.engine import EngineConfig

pytestmark = pytest.mark.usefixtures("demo")
PREFIX = "Here is a list of capitals of Europe: Paris, Rome, Madrid, Berlin, Vienna, Oslo, Athens. "
PROMPTS = [
    PREFIX + ending
    for ending in ("The largest", "France", "I have been to", "The oldest of them", "A river", "Which one is")
]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


def load(**sections) -> LLM:
    settings = {
        "model": {"path": "smollm2-135m", "max_model_len": 96},
        "cache": {"num_blocks": 13, "block_size": 8, "prefix_caching": False},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 48},
        "runtime": {"device": "cpu", "plans_in_flight": 1},
    }
    for name, section in sections.items():
        settings[name] |= section
    return LLM(parse(EngineConfig, settings, source="test"), progress=False)


def run(llm: LLM) -> list[list[int]]:
    return [completion.outputs[0].token_ids for completion in llm.generate(PROMPTS, GREEDY, progress=False)]


@pytest.fixture(scope="module")
def plain(demo):
    llm = load(cache={"num_blocks": 200})
    tokens = run(llm)
    assert llm._engine.stats().num_preemptions == 0
    llm.close()
    return tokens


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"cache": {"prefix_caching": True}},
        {"cache": {"prefix_caching": True, "block_hash": "sha256"}},
        {"cache": {"swap_gib": 0.1}},
        {"cache": {"swap_gib": 0.1, "prefix_caching": True}, "runtime": {"plans_in_flight": 2}},
        {"scheduler": {"policy": "priority"}},
        {"scheduler": {"policy": "fair"}},
        {"scheduler": {"max_prompt_share": 0.4, "target_itl_ms": 20.0}},
    ],
    ids=["recompute", "prefix", "sha256", "swap", "swap-prefix-overlap", "priority", "fair", "paced"],
)
def test_no_feature_changes_a_token(sections, plain):
    llm = load(**sections)
    assert run(llm) == plain
    stats = llm._engine.stats()
    assert stats.num_preemptions > 0, "the test is meant to preempt"
    assert (stats.num_swaps > 0) == (sections.get("cache", {}).get("swap_gib", 0) > 0)
    if sections.get("cache", {}).get("prefix_caching"):
        assert stats.prefix_hits > 0
    llm.close()


def test_beams_and_samples_survive_memory_pressure():
    beams = SamplingParams(max_tokens=8, beam_width=3, n=3)
    samples = SamplingParams(temperature=0.8, seed=7, max_tokens=12, n=3)
    results = []
    for num_blocks in (200, 14):
        llm = load(cache={"num_blocks": num_blocks, "prefix_caching": True}, scheduler={"max_num_seqs": 12})
        found = [llm.generate(PROMPTS[:3], params, progress=False) for params in (beams, samples)]
        results.append([[output.token_ids for output in one.outputs] for batch in found for one in batch])
        assert (llm._engine.stats().num_preemptions > 0) == (num_blocks == 14)
        llm.close()
    assert results[0] == results[1]
