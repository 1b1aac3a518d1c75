"""What a request sets up for its row: nothing but settings where it asks for nothing else, and nothing is left of the
row's last request."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from raylm.core.sampling import SamplingParams
from raylm.core.step import NewRow, RowSampling
from raylm.core.thinking import ThinkingSection
from raylm.parallel.context import ParallelContext
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling.grammar import GrammarStage
from raylm.worker.sampling.logprobs import LogprobWishes
from raylm.worker.sampling.processors import Processors
from raylm.worker.sampling.sampler import NO_STAGE, Sampler, make_stages
from raylm.worker.sampling.stages import LogitRows, RowNotes
from tests.worker.rows import CPU

VOCAB = 70
STOP_IDS = [3]
WITHOUT_STAGE: dict[str, object] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.5,
    "seed": 5,
    "max_tokens": 5,
    "n": 2,
    "length_penalty": 2.0,
    "early_stopping": True,
    "stop": ("a",),
    "stop_token_ids": (3,),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "thinking": ThinkingSection((3,), (4,)),
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}
ASKING: list[dict[str, object]] = [
    {"typical_p": 0.5},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 1.0},
    {"repetition_penalty": 1.5},
    {"logit_bias": {4: 2.0}},
    {"allowed_token_ids": (4, 5)},
    {"bad_token_ids": ((4,),)},
    {"bad_token_ids": ((4, 5),)},
    {"min_tokens": 4},
    {"logits_processors": ("double",)},
    {"thinking_token_budget": 0, "thinking": ThinkingSection((), (9,), begun=True)},
    {"logprobs": 2},
    {"logprobs": 2, "logprob_token_ids": (4,)},
]


def double(logits, token_ids, num_tokens):
    return logits * 2


def make_table() -> RequestTable:
    return RequestTable(max_rows=4, max_model_len=32, block_size=4, num_groups=1, device=CPU)


class Bench:
    def __init__(self) -> None:
        self.table = make_table()
        self.sampler = Sampler(self.table, ParallelContext.single(CPU), VOCAB, {"double": double})
        self.logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))

    def begin(self, *requests: SamplingParams) -> None:
        new = [NewRow(row, [4], 0, RowSampling(params, 0, 1, STOP_IDS)) for row, params in enumerate(requests)]
        self.table.token_ids[:, :3] = 4
        self.table.known_bound[:] = 4
        self.sampler.begin(new)

    def drawn(self):
        """The logits that rows 0 and 1 are sampled from, and what their sampling gives."""
        rows = np.arange(2)
        of = LogitRows(rows, torch.from_numpy(rows), torch.tensor([3, 3]))
        staged = self.sampler.staged(self.logits.clone(), of)
        return staged, self.sampler.sample(self.logits.clone(), of)


def test_every_field_that_needs_no_stage_is_tried():
    assert set(WITHOUT_STAGE) == NO_STAGE


@pytest.mark.parametrize("name", sorted(NO_STAGE))
def test_a_field_without_a_stage_needs_none(name):
    table = make_table()
    params = SamplingParams(**{name: WITHOUT_STAGE[name]})
    assert getattr(params, name) != {field.name: field.default for field in fields(SamplingParams)}[name]
    sampling = RowSampling(params, 0, 1, STOP_IDS)
    notes = RowNotes()
    stages = make_stages(table, VOCAB, Processors(table, {}, notes), GrammarStage(table, None, notes))
    for one in [*stages, LogprobWishes(table)]:
        assert not one.set_row(0, sampling)


@pytest.mark.parametrize("asked", ASKING, ids=str)
def test_a_plain_request_finds_nothing_of_the_one_before_it(asked):
    bench, plain = Bench(), SamplingParams()
    bench.begin(SamplingParams(**asked), plain)
    assert bench.sampler.are_plain(np.array([1])) and not bench.sampler.are_plain(np.array([0]))
    staged, drawn = bench.drawn()
    assert torch.equal(staged[1], bench.logits[1])
    assert not torch.equal(staged[0], bench.logits[0]) or drawn.logprobs is not None
    # The second row keeps the stage at work, where the first one's wishes would still be seen.
    bench.begin(plain, SamplingParams(**asked))
    assert bench.sampler.are_plain(np.array([0])) and not bench.sampler.are_plain(np.array([1]))
    staged, _ = bench.drawn()
    assert torch.equal(staged[0], bench.logits[0])
    assert (bench.sampler.logprobs.num_top(np.array([0])) == -1).all()


def test_prompt_log_probabilities_end_with_their_request():
    bench = Bench()
    bench.begin(SamplingParams(prompt_logprobs=2))
    assert bench.sampler.prompt_top[0] == 2
    bench.begin(SamplingParams())
    assert bench.sampler.prompt_top[0] == -1


def test_a_beam_is_not_plain_and_the_request_after_it_is():
    bench = Bench()
    bench.sampler.begin([NewRow(0, [4], 0, RowSampling(SamplingParams(beam_width=2), num_candidates=4))])
    assert not bench.sampler.are_plain(np.array([0]))
    bench.begin(SamplingParams())
    assert bench.sampler.are_plain(np.array([0]))


def test_settings_are_of_the_last_request():
    bench = Bench()
    bench.begin(SamplingParams(top_k=3), SamplingParams(temperature=0.25, top_p=0.5, min_p=0.125))
    temperature, top_k, top_p, min_p, _ = bench.sampler.settings(np.array([0, 1]))
    assert (temperature.tolist(), top_k.tolist()) == ([1, 0.25], [3, 0])
    assert (top_p.tolist(), min_p.tolist()) == ([1, 0.5], [0, 0.125])
