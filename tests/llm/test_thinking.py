"""thinking_token_budget in whole engines: the end mark comes in time, and no feature of an engine changes a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raylm import LLM, SamplingParams, StructuredOutput
from raylm.core.thinking import ThinkingSection
from tests.llm.loading import load
from tests.support import checkpoints
from tests.support.thinking_walk import forced_token

PROMPTS = [[5, 6, 7], list(range(10, 31)), [9], [5, 6, 7, 8]]
BEGIN, END = (4,), (17, 18)
HOT = SamplingParams(
    temperature=1.5,
    seed=7,
    max_tokens=60,
    ignore_eos=True,
    # Sections begin again and again.
    logit_bias={4: 8.0},
    thinking=ThinkingSection(BEGIN, END, begun=True),
    thinking_token_budget=6,
    n=2,
)
ENGINES: dict[str, dict[str, Any]] = {
    "two plans": {"runtime": {"plans_in_flight": 2}},
    "little room, two plans": {"cache": {"num_blocks": 40}, "runtime": {"plans_in_flight": 2}},
    "swapped": {"cache": {"num_blocks": 40, "swap_gib": 0.1}},
    "drafts": {"speculation": {"method": "ngram", "min_n": 1, "num_drafts": 4}, "runtime": {"plans_in_flight": 2}},
    "no prefixes": {"cache": {"prefix_caching": False}, "scheduler": {"max_num_seqs": 2}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = load(folder, {}, max_model_len=100)
    yield made
    made.close()


def tokens(llm: LLM, params: SamplingParams = HOT) -> list[list[int]]:
    found = llm.generate(PROMPTS, params, progress=False)
    return [output.token_ids for one in found for output in one.outputs]


def test_each_section_ends_with_its_budget(llm: LLM) -> None:
    num_forced = 0
    for said in tokens(llm):
        section = HOT.thinking
        assert section is not None and len(said) == 60
        for count in range(60):
            forced = forced_token(said[:count], section, 6)
            assert forced in (None, said[count]), count
            num_forced += forced is not None
    assert num_forced > 60, "sections after the first one have it too"


@pytest.mark.parametrize("changes", ENGINES.values(), ids=ENGINES)
def test_no_feature_changes_a_token(llm: LLM, folder: Path, changes: dict[str, Any]) -> None:
    other = load(folder, changes, max_model_len=100)
    assert tokens(other) == tokens(llm)
    if "cache" in changes and "num_blocks" in changes["cache"]:
        assert other._engine.stats().num_preemptions > 0, "the test is meant to preempt"
    other.close()


@pytest.mark.parametrize("changes", [{}, ENGINES["drafts"], {"speculation": {"method": "grammar"}}], ids=str)
def test_a_grammar_begins_behind_the_forced_end(folder: Path, changes: dict[str, Any]) -> None:
    llm = load(folder, changes, max_model_len=100)
    form = StructuredOutput("choice", '["ab", "cd"]', END)
    asked = replace(HOT, structure=form, ignore_eos=False, max_tokens=40, n=1, logit_bias={checkpoints.EOS: -100})
    for (output,) in (one.outputs for one in llm.generate(PROMPTS, asked, progress=False)):
        assert output.token_ids[6:8] == list(END) and output.finish_reason == "stop"
        assert output.text.endswith(("ab", "cd"))
    llm.close()


def test_a_plain_request_beside_it_is_untouched(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = llm.generate(PROMPTS[:1], plain, progress=False)[0].outputs[0].token_ids
    mixed = llm.generate([PROMPTS[0], PROMPTS[1]], [plain, HOT], progress=False)[0].outputs[0].token_ids
    assert mixed == alone
