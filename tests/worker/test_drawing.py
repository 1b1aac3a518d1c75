"""Tokens straight from hidden states: of many rows each tensor rank draws its share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from raylm import ops
from raylm.layers.embedding import VocabParallelEmbedding
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext
from raylm.worker.drawing import draw
from tests.support.threaded_ranks import ThreadedRanks

CPU = torch.device("cpu")
VOCAB, HIDDEN = 321, 16


class NoReducer:
    """Of GPUs that read each other's memory, whose gathers here go through the group."""

    def takes_gather(self, x: torch.Tensor) -> bool:
        return False


def _settings(rows: int) -> list[torch.Tensor]:
    temperature = torch.linspace(0, 2, rows)
    temperature[::3] = 0
    top_k, top_p = torch.arange(rows) % 5 * 10, torch.linspace(1, 0.5, rows)
    return [temperature, top_k, top_p, torch.zeros(rows), torch.arange(rows) * 7]


@pytest.mark.parametrize("rows", [1, 63, 64, 66, 130, 256])
def test_ranks_draw_what_one_does(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, hidden = torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(rows, HIDDEN, generator=generator)
    settings, positions, ranks = _settings(rows), torch.arange(rows), ThreadedRanks(2)
    expected = ops.sample(hidden @ weight.T, *settings, positions)
    monkeypatch.setattr(collectives, "_parts", lambda x, context: torch.stack(ranks.exchange(x, context)))
    seen: list[int] = []

    def run(rank: int) -> torch.Tensor:
        context = ParallelContext(rank, rank, 2, 0, 1, CPU, reducer=NoReducer())
        head = VocabParallelEmbedding(VOCAB, HIDDEN, context=context, dtype=torch.float32)
        slot = head.slots()["weight", None]
        slot.destination.copy_(weight[slot.start : slot.start + len(slot.destination)])

        def logits(hidden: torch.Tensor, *, split: bool = False) -> torch.Tensor:
            found = head.logits(hidden, split=split)
            seen.append(len(found))
            return found

        return draw(SimpleNamespace(context=context, logits=logits), hidden, settings, positions)

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(run, range(2)):
            assert torch.equal(found, expected)
    assert seen == [rows // 2 if rows in (64, 256) else rows] * 2
