"""What stages pass on, between two processes over gloo."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from raylm.parallel.stages import StageLinks
from tests.support.spawned import Ranks

STEPS = 12
CPU = torch.device("cpu")


def test_everything_arrives_in_order_and_what_was_sent_is_given_back(tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path)
    try:
        (arrived, kept), (seen, _) = ranks.run(_two_stages)
    finally:
        ranks.close()
    assert seen == [float(step) for step in range(STEPS)]
    assert arrived == list(range(STEPS))
    assert kept <= 2


def _two_stages(rank: int) -> tuple[list[object], int]:
    """Hidden states onward and tokens back, both up to two steps late. Returns what came, and how many of the tensors
    that were sent are still held."""
    onward, back = dist.new_group([0, 1]), dist.new_group([0, 1])
    links = StageLinks([0, 1], rank, onward=onward, back=back, device=CPU)
    came: list[object] = []
    sent: list[weakref.ref[torch.Tensor]] = []
    for step in range(STEPS):
        if rank == 0:
            hidden = torch.full((3, 4), float(step))
            sent.append(weakref.ref(hidden))
            links.send_hidden(hidden)
            del hidden
            if step >= 2:
                came.append(int(links.receive_tokens(1)))
        else:
            came.append(float(links.receive_hidden(3, 4, torch.float32)[0, 0]))
            links.send_tokens(torch.tensor([step]))
    while rank == 0 and len(came) < STEPS:
        came.append(int(links.receive_tokens(1)))
    dist.barrier()  # What a rank still sends goes with its links.
    return came, sum(reference() is not None for reference in sent)
