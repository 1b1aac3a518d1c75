"""Steps planned by hand give what transformers gives for whole sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from raylm import ops
from raylm.core.step import Copies, NewBlocks, NewRow
from raylm.ops import fallback
from tests.support import checkpoints
from tests.worker.rows import BLOCK, GREEDY, Rig, WindowScheduler, sampling, tokens


class Reference:
    """One family's checkpoint, and what transformers says of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model = checkpoints.reference(folder)

    def logits(self, text: list[int]) -> torch.Tensor:
        """The logits [vocab] of the next token."""
        with torch.inference_mode():
            return self._model(torch.tensor([text])).logits[0, -1]

    def greedy(self, text: list[int], count: int) -> list[int]:
        """The text and its next `count` tokens."""
        text = list(text)
        for _ in range(count):
            text.append(int(self.logits(text).argmax()))
        return text


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(checkpoints.llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module", params=["gemma3", "mistral", "qwen2"])
def sliding(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    changes = {"qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}}
    folder = tmp_path_factory.mktemp(request.param)
    return Reference(checkpoints.FAMILIES[request.param](folder, **changes.get(request.param, {})))


@pytest.fixture(params=["dispatched", "fallback"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that torch's dispatcher picks, or the one in terms of torch's operators."""
    if request.param == "fallback":
        monkeypatch.setattr(ops, "_paged_attention", fallback.paged_attention)


def decode(rig: Rig, texts: dict[int, list[int]], count: int) -> None:
    """Greedy steps of rows that have blocks enough."""
    for _ in range(count):
        for row, token in zip(texts, rig.step({row: 1 for row in texts}).token_ids, strict=True):
            texts[row].append(token)


def test_a_row_takes_over_a_prefix_that_another_computed(llama: Reference, attention: None) -> None:
    rig = Rig(llama.folder)
    first = tokens(10)
    second = first[: 2 * BLOCK] + tokens(5, seed=3)
    first.append(
        rig.step({0: 10}, new_rows=[NewRow(0, first, 0, GREEDY)], new_blocks=[blocks(0, 5, 2, 7)]).token_ids[0]
    )
    # In two chunks, beside the first row's decode.
    hit = NewRow(3, second, 2 * BLOCK, GREEDY)
    first += rig.step({3: 2, 0: 1}, new_rows=[hit], new_blocks=[blocks(3, 5, 2, 9, 1)]).token_ids
    for row, token in zip(
        (0, 3), rig.step({0: 1, 3: 3}, new_blocks=[blocks(0, 11, 4, first=3)]).token_ids, strict=True
    ):
        {0: first, 3: second}[row].append(token)
    decode(rig, {0: first, 3: second}, 2)
    assert first == llama.greedy(tokens(10), 5)
    assert second == llama.greedy(tokens(10)[: 2 * BLOCK] + tokens(5, seed=3), 3)


def test_a_fork_writes_into_a_copy_of_the_shared_block(llama: Reference) -> None:
    rig = Rig(llama.folder)
    parent = tokens(10)
    parent += rig.step({0: 10}, new_rows=[NewRow(0, parent, 0, GREEDY)], new_blocks=[blocks(0, 5, 2, 7, 8)]).token_ids
    child = [*tokens(10), 99]
    # The block table comes with the shared block; the copy takes its column in the same plan.
    result = rig.step(
        {0: 1, 1: 1},
        new_rows=[NewRow(1, child, 10, GREEDY)],
        new_blocks=[blocks(1, 5, 2, 7), blocks(1, 11, 12, first=2)],
        copies=Copies([], [(7, 11)], []),
    )
    texts = {0: [*parent, result.token_ids[0]], 1: [*child, result.token_ids[1]]}
    decode(rig, texts, 3)
    assert texts == {0: llama.greedy(tokens(10), 5), 1: llama.greedy(child, 4)}


def test_a_preempted_row_goes_on_from_the_swap_pool(llama: Reference) -> None:
    rig = Rig(llama.folder, num_host_blocks=8)
    text, other = tokens(10), tokens(12, seed=5)
    text += rig.step({0: 10}, new_rows=[NewRow(0, text, 0, GREEDY)], new_blocks=[blocks(0, 5, 2, 7)]).token_ids
    # Its row and its blocks go to another request in the step that copies them out.
    other += rig.step(
        {0: 12},
        new_rows=[NewRow(0, other, 0, GREEDY)],
        new_blocks=[blocks(0, 7, 5, 2, 1)],
        copies=Copies([(5, 7), (2, 1), (7, 6)], [], []),
    ).token_ids
    result = rig.step(
        {2: 1, 0: 1},
        new_rows=[NewRow(2, text, 10, GREEDY)],
        new_blocks=[blocks(2, 20, 21, 22, 23)],
        copies=Copies([], [], [(6, 22), (7, 20), (1, 21)]),
    )
    texts = {2: [*text, result.token_ids[0]], 0: [*other, result.token_ids[1]]}
    decode(rig, texts, 3)
    assert texts == {2: llama.greedy(tokens(10), 5), 0: llama.greedy(tokens(12, seed=5), 5)}


def test_a_plan_may_only_copy(llama: Reference) -> None:
    rig = Rig(llama.folder, num_host_blocks=1)
    key = rig.store.layers[0][0]
    key[3] = 1.5
    assert rig.step({}, copies=Copies([(3, 0)], [], [])).token_ids == []
    rig.poison([3])
    rig.step({}, copies=Copies([], [], [(0, 3)]))
    assert (key[3] == 1.5).all()


def test_taking_the_likeliest_candidate_is_greedy_decoding(llama: Reference) -> None:
    rig = Rig(llama.folder)
    text = tokens(6)
    row = NewRow(1, text, 0, sampling(num_candidates=4))
    assert rig.step({1: 2}, new_rows=[row], new_blocks=[blocks(1, 3, 4, 9)]).candidates == []
    result = rig.step({1: 4})
    for _ in range(5):
        assert result.token_ids == [] and result.logprobs == []
        [found] = result.candidates
        expected = llama.logits(text).log_softmax(-1).topk(4)
        assert found.token_ids == expected.indices.tolist()
        np.testing.assert_allclose(found.logprobs, expected.values, atol=1e-3)
        text.append(found.token_ids[0])
        result = rig.step({1: 1}, chosen=[(1, text[-1])])
    assert text == llama.greedy(tokens(6), 5)


def test_a_chosen_token_may_be_any(llama: Reference) -> None:
    rig = Rig(llama.folder)
    text = tokens(6)
    row = NewRow(1, text, 0, sampling(num_candidates=2))
    rig.step({1: 6}, new_rows=[row], new_blocks=[blocks(1, 3, 4)])
    [found] = rig.step({1: 1}, chosen=[(1, 123)]).candidates
    assert found.token_ids[0] == int(llama.logits([*text, 123]).argmax())


def test_rows_report_what_they_ask_for_in_the_plans_order(llama: Reference) -> None:
    rig = Rig(llama.folder)
    drawn = sampling(temperature=5.0, top_k=3, logprobs=2)
    samplings = {2: GREEDY, 0: sampling(num_candidates=3), 3: drawn, 1: sampling(num_candidates=400)}
    texts = {row: tokens(5 + row, seed=row + 1) for row in samplings}
    result = rig.step(
        {row: len(text) for row, text in texts.items()},
        new_rows=[NewRow(row, texts[row], 0, wanted) for row, wanted in samplings.items()],
        new_blocks=[blocks(row, 1 + 3 * row, 2 + 3 * row, 3 + 3 * row) for row in samplings],
    )
    expected = {row: llama.logits(text).log_softmax(-1) for row, text in texts.items()}
    plain, drawn_token = result.token_ids
    assert plain == int(expected[2].argmax())
    assert drawn_token in expected[3].topk(3).indices
    [(index, found)] = result.logprobs
    assert index == 1, "the second of the rows that sampled"
    # Of the model's own distribution: neither the temperature nor top-k changes it.
    assert found.values == [pytest.approx(float(expected[3][drawn_token]), abs=1e-3)]
    assert found.ranks == [1 + int((expected[3] > expected[3][drawn_token]).sum())]
    assert found.top_ids == [expected[3].topk(2).indices.tolist()]
    assert found.top_values == [pytest.approx(expected[3].topk(2).values.tolist(), abs=1e-3)]
    few, all_of_them = result.candidates
    assert few.token_ids == expected[0].topk(3).indices.tolist()
    assert sorted(all_of_them.token_ids) == list(range(checkpoints.VOCAB_SIZE))
    assert sum(np.exp(all_of_them.logprobs)) == pytest.approx(1, abs=1e-4)
    # Only rows that sampled know one token more.
    again = rig.step({2: 1, 3: 1}, new_blocks=[blocks(3, 20, first=2)])
    assert again.token_ids[0] == llama.greedy(texts[2], 2)[-1] and len(again.logprobs) == 1


def test_without_a_wish_nothing_is_reported(llama: Reference) -> None:
    rig = Rig(llama.folder)
    result = rig.step({0: 3}, new_rows=[NewRow(0, [3, 4, 5], 0, GREEDY)], new_blocks=[blocks(0, 1)])
    assert result.logprobs == [] and result.candidates == []


def test_a_row_forgets_what_the_last_one_on_it_wished(llama: Reference) -> None:
    rig = Rig(llama.folder)
    wish = sampling(logprobs=0)
    assert rig.step({0: 2}, new_rows=[NewRow(0, [3, 4], 0, wish)], new_blocks=[blocks(0, 1)]).logprobs
    assert not rig.step({0: 2}, new_rows=[NewRow(0, [3, 4], 0, GREEDY)], new_blocks=[blocks(0, 1)]).logprobs


def test_blocks_that_left_a_window_serve_another_row(sliding: Reference, attention: None) -> None:
    num_blocks = 64
    rig = Rig(sliding.folder, num_blocks=num_blocks)
    assert 8 in rig.groups.layout.windows
    scheduler = WindowScheduler(rig, num_blocks=num_blocks)
    prompts = {0: tokens(31), 2: tokens(3, seed=5), 1: tokens(22, seed=11)}
    scheduler.add(0, prompts[0])
    scheduler.step({0: 13})
    scheduler.add(2, prompts[2])
    scheduler.step({2: 3, 0: 13})
    scheduler.add(1, prompts[1])
    scheduler.step({0: 5, 1: 9, 2: 1})
    scheduler.step({1: 13, 0: 1})
    for _ in range(14):
        scheduler.step({0: 1, 1: 1, 2: 1})
    assert scheduler.given_again, "no block went from one row to another"
    for row, text in scheduler.texts.items():
        assert text == sliding.greedy(prompts[row], len(text) - len(prompts[row])), row


def test_a_prefix_hit_brings_only_what_its_windows_read(sliding: Reference, attention: None) -> None:
    rig = Rig(sliding.folder, num_blocks=64)
    windows = rig.groups.layout.windows
    text = tokens(26)
    tables = [[1 + 8 * group + column for column in range(8)] for group in range(len(windows))]
    new_blocks = [NewBlocks(0, group, 0, table) for group, table in enumerate(tables)]
    rig.step({0: 24}, new_rows=[NewRow(0, text[:24], 0, GREEDY)], new_blocks=new_blocks)
    first_read = (24 - 8 + 1) // BLOCK
    shared = [([0] * first_read + table[first_read:]) if windows[g] else table for g, table in enumerate(tables)]
    rig.poison([0] + [block for g, table in enumerate(tables) if windows[g] for block in table[:first_read]])
    new_blocks = [NewBlocks(1, group, 0, table) for group, table in enumerate(shared)]
    texts = {1: text + rig.step({1: 2}, new_rows=[NewRow(1, text, 24, GREEDY)], new_blocks=new_blocks).token_ids}
    decode(rig, texts, 4)
    assert texts[1] == sliding.greedy(text, 5)


def blocks(row: int, *block_ids: int, first: int = 0) -> NewBlocks:
    """Blocks of a model's only cache group."""
    return NewBlocks(row, 0, first, list(block_ids))
