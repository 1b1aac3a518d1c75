"""Stages for tokens that a request names, in rows beside others that name more."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from raylm.core.sampling import SamplingParams
from raylm.core.step import RowSampling
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling import tokens
from raylm.worker.sampling.stages import LogitRows
from raylm.worker.sampling.tokens import AllowedTokens, BadWords, LogitBias, MinTokens

VOCAB = 40
CPU = torch.device("cpu")


@pytest.fixture
def table():
    return RequestTable(max_rows=3, max_model_len=16, block_size=4, num_groups=1, device=CPU)


def changed(stage, rows: list[int], positions: list[int]) -> list[dict[int, float]]:
    """For each row, the tokens whose logits the stage changes, with the new ones."""
    logits = torch.zeros(len(rows), VOCAB)
    of = LogitRows(np.array(rows), torch.tensor(rows), torch.tensor(positions))
    found = stage.apply(logits, of)
    return [{token: row[token].item() for token in row.nonzero().flatten().tolist()} for row in found]


def test_min_tokens_of_a_row_do_not_depend_on_the_rows_beside_it(table):
    stage, forbidden = MinTokens(table), -torch.inf
    few, many = SamplingParams(min_tokens=2), SamplingParams(min_tokens=1)
    assert stage.set_row(0, RowSampling(few, num_prompt=4, stop_ids=[7, 9, 11]))
    assert stage.set_row(1, RowSampling(many, num_prompt=4, stop_ids=list(range(20, 29))))
    assert not stage.set_row(2, RowSampling(SamplingParams(), num_prompt=4))
    of_few, of_many = dict.fromkeys([7, 9, 11], forbidden), dict.fromkeys(range(20, 29), forbidden)
    assert changed(stage, [0, 1, 2], [4, 4, 4]) == [of_few, of_many, {}]
    assert changed(stage, [2, 1, 0], [5, 5, 5]) == [{}, {}, of_few]
    assert changed(stage, [0, 0], [5, 6]) == [of_few, {}]
    assert stage.set_row(1, RowSampling(few, num_prompt=0, stop_ids=[5]))
    assert changed(stage, [1, 0], [1, 4]) == [{5: forbidden}, of_few]


def test_biases_and_masks_of_a_row_do_not_depend_on_the_rows_beside_it(table):
    bias, allowed = LogitBias(table), AllowedTokens(table, VOCAB)
    assert bias.set_row(0, RowSampling(SamplingParams(logit_bias={3: 1.5})))
    assert bias.set_row(1, RowSampling(SamplingParams(logit_bias=dict.fromkeys(range(10, 19), -2.0))))
    assert not bias.set_row(2, RowSampling(SamplingParams()))
    assert changed(bias, [0, 1, 2], [1, 1, 1]) == [{3: 1.5}, dict.fromkeys(range(10, 19), -2.0), {}]
    assert allowed.set_row(0, RowSampling(SamplingParams(allowed_token_ids=[1, 39])))
    assert allowed.set_row(1, RowSampling(SamplingParams(bad_token_ids=[[2], [3, 4]])))
    assert not allowed.set_row(2, RowSampling(SamplingParams()))
    first, second, third = changed(allowed, [0, 1, 2], [1, 1, 1])
    assert set(range(VOCAB)) - set(first) == {1, 39} and second == {2: -torch.inf} and third == {}


def forbidden(words: list[tuple[int, ...]], completion: list[int]) -> set[int]:
    return {word[-1] for word in words if len(word) > 1 and completion[-len(word) + 1 :] == list(word[:-1])}


@pytest.mark.parametrize("at_a_time", [1, 1 << 20])
def test_bad_words_of_a_row_do_not_depend_on_those_of_other_requests(table, monkeypatch, at_a_time):
    monkeypatch.setattr(tokens, "_MAX_COMPARED", at_a_time)
    draw = random.Random(5)
    stage, num_prompt, num_tokens = BadWords(table), 3, 12
    words: dict[int, list[tuple[int, ...]]] = {row: [] for row in range(3)}
    found_some = 0
    for turn in range(40):
        # A request takes a row, with more or longer words than the last ones, or with none; other rows keep theirs.
        row, count, length = draw.randrange(3), draw.choice([0, 1, 3, 9]), draw.choice([1, 2, 3, 6])
        words[row] = [tuple(draw.choices(range(2), k=draw.randint(1, length))) for _ in range(count)]
        params = SamplingParams(bad_token_ids=words[row])
        needs = stage.set_row(row, RowSampling(params, num_prompt=num_prompt))
        assert needs == any(len(word) > 1 for word in words[row])
        table.token_ids[row, :num_tokens] = torch.tensor(draw.choices(range(2), k=num_tokens))
        if not any(len(word) > 1 for of_row in words.values() for word in of_row):
            continue
        rows = draw.choices(range(3), k=4) + [next(r for r in words if any(len(word) > 1 for word in words[r]))]
        places = draw.choices(range(num_prompt, num_tokens + 1), k=5)
        right = [
            forbidden(words[row], table.token_ids[row, num_prompt:place].tolist())
            for row, place in zip(rows, places, strict=True)
        ]
        assert changed(stage, rows, places) == [dict.fromkeys(of_row, -torch.inf) for of_row in right], turn
        found_some += any(right)
    assert found_some > 5


def test_a_step_takes_no_bad_words_to_the_device(table, monkeypatch):
    stage = BadWords(table)
    stage.set_row(1, RowSampling(SamplingParams(bad_token_ids=[[3, 4] * 8] * 256), num_prompt=2))
    taken = []
    upload = table.upload
    monkeypatch.setattr(table, "upload", lambda *arrays: taken.extend(map(len, arrays)) or upload(*arrays))
    changed(stage, [0, 1, 1], [4, 4, 5])
    assert taken and max(taken) <= 3
