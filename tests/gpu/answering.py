"""What a model answers in one way and in another."""

from __future__ import annotations

from pathlib import Path

from raylm import SamplingParams
from raylm.llm.results import Completion
from tests.gpu.test_llm_on_cuda import TIGHT, load

WISHES = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
Answers = list[list[dict[int, float]]]
"""Of each prompt, the likeliest tokens' log probabilities, place by place; the first is the one that was taken."""


def answers(
    folder: Path, prompts: list[list[int]], *, device: str = "cuda", graphs: bool = True, **model: object
) -> Answers:
    """Of a model in bfloat16; `model` is what its section of the configuration has besides."""
    llm = load(folder, graphs=graphs, dtype="bfloat16", **{**TIGHT, "runtime": {"device": device}, "model": model})
    for _ in range(2):  # Graphs are there from the second time on.
        completions = llm.generate(prompts, WISHES, progress=False)
    llm.close()
    return places(completions)


def places(completions: list[Completion]) -> Answers:
    return [
        [{token: entry.logprob for token, entry in place.items()} for place in completion.outputs[0].logprobs]
        for completion in completions
    ]


def differences(ours: Answers, theirs: Answers) -> list[float]:
    """Of the taken tokens' log probabilities, up to where two texts part: there each has the other's token among its
    likeliest."""
    found: list[float] = []
    for mine_of_text, others in zip(ours, theirs, strict=True):
        for mine, other in zip(mine_of_text, others, strict=True):
            taken, expected = next(iter(mine)), next(iter(other))
            assert taken in other and expected in mine
            found.append(abs(mine[taken] - other[taken]))
            if taken != expected:
                break
    return found
