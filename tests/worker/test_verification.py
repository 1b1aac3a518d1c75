"""Drafts change how many tokens a step gives, and never which: rows that verify drafts against rows that have none."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from raylm.core.step import Drafts, NewBlocks, NewRow, RowSampling, Sampled
from raylm.worker import graph_runner
from raylm.worker.graph_runner import GraphRunner, Run
from tests.support import checkpoints
from tests.worker.rows import GREEDY, Rig, sampling, tokens

NUM_TOKENS = 14
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": 0.3}
WANTED = {
    "greedy": {},
    "drawn": {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 5},
    "penalties": {"temperature": 0.9, "seed": 3, "num_prompt": 6, **PENALTIES},
    "masks": {"temperature": 1.0, "logit_bias": {3: 4.0}, "bad_token_ids": ((17,), (17, 18)), "num_prompt": 6},
    "min_tokens": {"temperature": 0.0, "min_tokens": 9, "num_prompt": 6},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llama(tmp_path_factory.mktemp("llama"))


def eager_again(run: Run) -> Run:
    """A capture whose graph launches the same function."""
    return run


class Speculation:
    """Rows 0, 1 and 2 of a rig, generating NUM_TOKENS tokens each, with drafts of which some are right."""

    def __init__(self, rig: Rig, wanted: RowSampling, expected: list[list[int]] | None, *, seed: int = 0) -> None:
        """`expected`: each row's tokens without drafts, which right drafts are taken from; None drafts nothing."""
        self._rig = rig
        self._expected = expected
        self._random = Random(seed)
        self.texts = [tokens(6, seed=row + 2) for row in range(3)]
        self.num_steps = 0
        new_rows = [NewRow(row, text, 0, wanted) for row, text in enumerate(self.texts)]
        new_blocks = [NewBlocks(row, 0, 0, list(range(1 + 8 * row, 9 + 8 * row))) for row in range(3)]
        self._take({row: 6 for row in range(3)}, rig.step({0: 6, 1: 6, 2: 6}, new_rows=new_rows, new_blocks=new_blocks))

    def run(self) -> list[list[int]]:
        """All tokens of the rows, prompts included."""
        while rows := [row for row, text in enumerate(self.texts) if len(text) < 6 + NUM_TOKENS]:
            drafts = [Drafts(row, len(self.texts[row]), self._drafts(row)) for row in rows]
            num_tokens = {draft.row: 1 + len(draft.token_ids) for draft in drafts}
            bounds = [(row, len(self.texts[row])) for row in rows]
            result = self._rig.step(num_tokens, drafts=[draft for draft in drafts if draft.token_ids], bounds=bounds)
            self._take(num_tokens, result)
            self.num_steps += 1
        return [text[: 6 + NUM_TOKENS] for text in self.texts]

    def _drafts(self, row: int) -> list[int]:
        if self._expected is None:
            return []
        known, right = len(self.texts[row]), self._expected[row]
        drafts = right[known : known + self._random.randint(0, 4)]
        return [token if self._random.random() < 0.7 else (token + 1) % 300 for token in drafts]

    def _take(self, num_tokens: dict[int, int], result: Sampled) -> None:
        counts = result.counts or [1] * len(num_tokens)
        assert sum(counts) == len(result.token_ids)
        start = 0
        for row, count in zip(num_tokens, counts, strict=True):
            self.texts[row] += result.token_ids[start : start + count]
            start += count


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("wish", WANTED)
def test_tokens_do_not_depend_on_drafts(folder: Path, wish: str, graphs: bool) -> None:
    wanted = sampling(**WANTED[wish])._replace(stop_ids=[11, 12] if wish == "min_tokens" else [])
    plain = Speculation(Rig(folder), wanted, None)
    expected = plain.run()
    rig = Rig(folder, capture=eager_again if graphs else None, num_drafts=4)
    drafted = Speculation(rig, wanted, expected, seed=len(wish))
    assert drafted.run() == expected
    assert drafted.num_steps < plain.num_steps, "some drafts are right"


def test_tokens_do_not_depend_on_whether_a_graph_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of more tokens than _MOST_VERIFIED are none of a graph's."""
    expected = Speculation(Rig(folder), GREEDY, None).run()
    sampled = set[bool]()
    samples = GraphRunner.samples
    monkeypatch.setattr(
        GraphRunner, "samples", lambda self, step: sampled.add(samples(self, step)) or samples(self, step)
    )
    monkeypatch.setattr(graph_runner, "_MOST_VERIFIED", 8)
    rig = Rig(folder, capture=eager_again, num_drafts=4)
    assert Speculation(rig, GREEDY, expected).run() == expected
    assert sampled == {True, False}


def test_what_stands_in_the_cells_is_verified_whatever_it_is(folder: Path) -> None:
    """Nobody need propose: a step that verifies old contents of the cells is right all the same."""
    rig = Rig(folder)
    expected = Speculation(rig, GREEDY, None).run()
    again = Rig(folder)
    text = tokens(6, seed=2)
    result = again.step(
        {0: 6}, new_rows=[NewRow(0, text, 0, GREEDY)], new_blocks=[NewBlocks(0, 0, 0, list(range(1, 9)))]
    )
    text += result.token_ids
    while len(text) < 16:
        result = again.step({0: 3}, bounds=[(0, len(text))])
        assert len(result.token_ids) == result.counts[0]
        text += result.token_ids
    assert text[:16] == expected[0][:16]


def test_known_tokens_keep_their_cells_when_drafts_come_late(folder: Path) -> None:
    """A proposer may guess tokens of a step on its way: wrong guesses of what is known by then do no harm."""
    expected = Speculation(Rig(folder), GREEDY, None).run()[0]
    rig = Rig(folder)
    text = tokens(6, seed=2)
    blocks = [NewBlocks(0, 0, 0, list(range(1, 9)))]
    text += rig.step({0: 6}, new_rows=[NewRow(0, text, 0, GREEDY)], new_blocks=blocks).token_ids
    wrong = [(token + 1) % 300 for token in text[5:]]
    result = rig.step({0: 3}, drafts=[Drafts(0, 5, [*wrong, *expected[7:9]])])
    assert result.token_ids == expected[7:10] and result.counts == [3]


def test_log_probabilities_of_accepted_tokens(folder: Path) -> None:
    wanted = sampling(logprobs=3)
    text = tokens(6, seed=2)
    blocks = [NewBlocks(0, 0, 0, list(range(1, 9)))]
    plain, drafted = Rig(folder), Rig(folder)
    first = [rig.step({0: 6}, new_rows=[NewRow(0, text, 0, wanted)], new_blocks=blocks) for rig in (plain, drafted)]
    assert first[0].token_ids == first[1].token_ids
    one_by_one = [plain.step({0: 1}) for _ in range(4)]
    following = [step.token_ids[0] for step in one_by_one]
    result = drafted.step({0: 4}, drafts=[Drafts(0, 7, [*following[:2], (following[2] + 1) % 300])])
    assert result.token_ids == following[:3]
    [(index, found)] = result.logprobs
    singles = [step.logprobs[0][1] for step in one_by_one[:3]]
    assert index == 0 and len(found.values) == 3
    assert found.values == pytest.approx([one.values[0] for one in singles], abs=1e-4)
    assert found.ranks == [one.ranks[0] for one in singles]
    assert found.top_ids == [one.top_ids[0] for one in singles]


@pytest.mark.parametrize("chunks", [[9], [4, 5], [1, 1, 6, 1], [8, 1]], ids=str)
def test_log_probabilities_of_a_prompt(folder: Path, chunks: list[int]) -> None:
    rig, prompt = Rig(folder), tokens(9)
    with torch.inference_mode():
        expected = checkpoints.reference(folder)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    row = NewRow(2, prompt, 0, sampling(prompt_logprobs=2, num_prompt=9))
    deltas: dict[str, Any] = {"new_rows": [row], "new_blocks": [NewBlocks(2, 0, 0, [5, 2, 7])]}
    values, top_ids, ranks = [], [], []
    for number, chunk in enumerate(chunks):
        result = rig.step({2: chunk}, **({} if number else deltas))
        for found in result.prompt_logprobs:
            values += found.values
            ranks += found.ranks
            top_ids += found.top_ids
    follow = torch.tensor(prompt[1:])
    own = expected[:-1].gather(1, follow[:, None])[:, 0]
    assert values == pytest.approx(own.tolist(), abs=1e-3)
    assert ranks == (1 + (expected[:-1] > own[:, None]).sum(-1)).tolist()
    assert top_ids == expected[:-1].topk(2).indices.tolist()
    assert not rig.step({2: 1}).prompt_logprobs
