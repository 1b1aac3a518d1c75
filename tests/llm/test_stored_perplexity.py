"""Weights as stored give the demo model's perplexity and answers as decoded ones do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from raylm import LLM, SamplingParams, ops
from tests.check_layers import ROOT
from tests.support.asked import DEMO

PIECE = 512
MOST = 0.0005
"""Of perplexity, relative. 16-bit activations change it by 0.00001, 8-bit ones by up to 0.006."""
TEXTS = ("docs/reliability.md", "docs/scheduling.md", "README.md", "docs/deploy.md")
PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]


@pytest.fixture(scope="module")
def llms(demo: None) -> Iterator[tuple[LLM, LLM]]:
    """With weights as they are by default, and decoded."""
    if not ops.block_kernels(torch.empty(0), Kind.Q4_1):
        pytest.skip("the extension has no kernels for Q4_1: all weights are decoded")
    both = LLM(DEMO, max_model_len=PIECE + 1), LLM(DEMO, max_model_len=PIECE + 1, weights="decoded")
    yield both
    for llm in both:
        llm.close()


@pytest.fixture(scope="module")
def as_on_gpus(demo: None) -> Iterator[tuple[LLM, LLM]]:
    """The same of weights in patches, which GPUs have kernels for; torch stands for these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "block_kernels", lambda like, kind: False)
        patch.setattr(ops, "takes_patched", lambda numbers, rows, columns, dtype, device: columns % 64 == 0)
        both = LLM(DEMO, max_model_len=PIECE + 1), LLM(DEMO, max_model_len=PIECE + 1, weights="decoded")
    yield both
    for llm in both:
        llm.close()


def log_probabilities(llm: LLM, pieces: Sequence[list[int]]) -> list[float]:
    """Of each piece's tokens but the first."""
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found: list[float] = []
    for piece, output in zip(pieces, llm.generate(pieces, asked, progress=False), strict=True):
        assert output.prompt_logprobs is not None
        listed = zip(piece[1:], output.prompt_logprobs[1:], strict=True)
        found += [each[token].logprob for token, each in listed if each is not None]
    assert len(found) == len(pieces) * (PIECE - 1)
    return found


def change(llms: tuple[LLM, LLM], text: str, num_pieces: int) -> float:
    """How much larger the perplexity of the first pieces of a text is with weights as stored, as a share."""
    tokens = llms[0].get_tokenizer().encode((ROOT / text).read_text())
    pieces = [tokens[start : start + PIECE] for start in range(0, num_pieces * PIECE, PIECE)]
    stored, decoded = (log_probabilities(llm, pieces) for llm in llms)
    return math.expm1((sum(decoded) - sum(stored)) / len(stored))


def test_the_perplexity_of_a_piece(llms: tuple[LLM, LLM]) -> None:
    assert abs(change(llms, "README.md", 1)) < MOST


@pytest.mark.nightly
@pytest.mark.parametrize("text", TEXTS)
def test_the_perplexity_of_a_text(llms: tuple[LLM, LLM], text: str) -> None:
    assert abs(change(llms, text, 4)) < MOST


@pytest.mark.nightly
def test_the_perplexity_of_patches(as_on_gpus: tuple[LLM, LLM]) -> None:
    assert all(abs(change(as_on_gpus, text, 1)) < MOST for text in TEXTS)


def test_the_same_answers(llms: tuple[LLM, LLM]) -> None:
    asked = SamplingParams(temperature=0, max_tokens=24)
    answers = [[out.outputs[0].token_ids for out in llm.generate(PROMPTS, asked, progress=False)] for llm in llms]
    assert answers[0] == answers[1]
