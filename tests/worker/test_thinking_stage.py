"""The stage of thinking_token_budget against a walk through one row's tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.core.step import NewRow
from raylm.core.thinking import ThinkingSection
from raylm.parallel.context import ParallelContext
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling.sampler import Sampler
from raylm.worker.sampling.stages import LogitRows
from raylm.worker.transfer import Uploader, unpack
from tests.support.thinking_walk import forced_token
from tests.worker.rows import CPU, sampling

VOCAB = 8
NUM_PROMPT = 3


class Bench:
    """A table of rows that stand behind some generated tokens, and the token that each is forced to say."""

    def __init__(self) -> None:
        self._table = RequestTable(max_rows=4, max_model_len=64, block_size=4, num_groups=1, device=CPU)
        uploader = Uploader(CPU)
        # As to a GPU: packed, which takes fewer types of arrays than a CPU does.
        self._table.upload = lambda *arrays: unpack(uploader.pack(arrays), arrays)
        self._sampler = Sampler(self._table, ParallelContext.single(CPU), VOCAB)

    def begin(self, row: int, generated: list[int], section: ThinkingSection | None, budget: int) -> None:
        tokens = [1] * NUM_PROMPT + generated
        self._table.token_ids[row, : len(tokens)] = torch.tensor(tokens)
        self._table.known_bound[row] = len(tokens) + 1
        asked = sampling(thinking=section, thinking_token_budget=budget, num_prompt=NUM_PROMPT)
        self._sampler.begin([NewRow(row, tokens, 0, asked)])

    def forced(self, *places: tuple[int, int]) -> list[int | None]:
        """Of (row, number of generated tokens before): the only token left, or None where the logits are untouched."""
        rows = np.array([row for row, _ in places])
        of = LogitRows(rows, torch.from_numpy(rows), torch.tensor([NUM_PROMPT + count for _, count in places]))
        logits = torch.randn(len(places), VOCAB, generator=torch.Generator().manual_seed(1))
        found = self._sampler.staged(logits.clone(), of)
        told: list[int | None] = []
        for mine, own in zip(found, logits, strict=True):
            finite = torch.isfinite(mine).nonzero()[:, 0].tolist()
            assert len(finite) == 1 or torch.equal(mine, own)
            told.append(finite[0] if len(finite) == 1 else None)
        return told


def obeying(generated: list[int], section: ThinkingSection, budget: int) -> list[int]:
    """The tokens as they come where what is forced is said."""
    said: list[int] = []
    for token in generated:
        forced = forced_token(said, section, budget)
        said.append(token if forced is None else forced)
    return said


tokens = st.integers(0, 3)
marks = st.lists(tokens, min_size=1, max_size=3).map(tuple)
sections = st.builds(ThinkingSection, marks, marks, st.booleans()).filter(lambda one: one.begin != one.end)


@settings(max_examples=400, deadline=None)
@given(st.lists(tokens, max_size=20), sections, st.integers(0, 6), st.booleans())
def test_every_place_of_random_texts(generated: list[int], section: ThinkingSection, budget: int, obeys: bool) -> None:
    bench = Bench()
    said = obeying(generated, section, budget) if obeys else generated
    bench.begin(2, said, section, budget)
    bench.begin(0, [2, 2], None, -1)
    places = range(len(said) + 1)
    assert bench.forced((0, 2), *((2, count) for count in places)) == [
        None,
        *(forced_token(said[:count], section, budget) for count in places),
    ]


def test_the_end_comes_after_so_many_tokens() -> None:
    section, bench = ThinkingSection(begin=(5,), end=(6, 7)), Bench()
    bench.begin(1, [2, 5, 2, 2, 6, 7, 2, 5, 2], section, 2)
    assert bench.forced(*((1, count) for count in range(10))) == [None] * 4 + [6, 7] + [None] * 4
    assert forced_token([2, 5, 2, 2, 6], section, 2) == 7


def test_what_the_model_said_of_the_end_is_not_said_again() -> None:
    bench = Bench()
    bench.begin(0, [2, 6, 7], ThinkingSection(begin=(5,), end=(6, 7), begun=True), 2)
    assert bench.forced((0, 1), (0, 2), (0, 3)) == [None, 7, None]


def test_nothing_is_left_for_the_next_request_of_a_row() -> None:
    bench = Bench()
    bench.begin(0, [2, 2], ThinkingSection(begin=(), end=(6,), begun=True), 0)
    bench.begin(1, [2, 2], ThinkingSection(begin=(), end=(6,), begun=True), 9)
    assert bench.forced((0, 2), (1, 2)) == [6, None]
    bench.begin(0, [2, 2], ThinkingSection(begin=(), end=(6,), begun=True), -1)
    assert bench.forced((0, 2), (1, 2)) == [None, None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_is_sampled_though_other_stages_forbid_it(temperature: float) -> None:
    table = RequestTable(max_rows=1, max_model_len=16, block_size=4, num_groups=1, device=CPU)
    sampler = Sampler(table, ParallelContext.single(CPU), VOCAB)
    section = ThinkingSection(begin=(), end=(6,), begun=True)
    asked = sampling(
        temperature=temperature,
        num_prompt=1,
        thinking=section,
        thinking_token_budget=0,
        allowed_token_ids=(1, 2),
        logit_bias={6: -100},
        typical_p=0.5,
    )
    sampler.begin([NewRow(0, [1], 0, asked)])
    table.known_bound[0] = 2
    of = LogitRows(np.array([0]), torch.tensor([0]), torch.tensor([1]))
    assert sampler.sample(torch.zeros(1, VOCAB), of).token_ids.tolist() == [6]
