"""Where ranks cannot share GPU memory, all of them learn why. tests/gpu/test_peer_reduce.py has the rest."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from spawned import Ranks

from raylm.parallel.peer_reduce import SizeLimits, connect_peers


def test_ranks_without_gpus_have_no_reducer(tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path)
    try:
        assert set(ranks.run(_connect)) == {(None, "rank 0: its device is cpu, not a GPU")}
    finally:
        ranks.close()


def test_a_rank_alone_has_no_reducer(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert _connect(0) == (None, "the group has 1 ranks; peer memory serves 2 to 8")
    finally:
        dist.destroy_process_group()


def test_two_shots_only_where_they_read_less() -> None:
    assert SizeLimits.measured(2).two_shot == 0
    for ranks in range(3, 9):
        limits = SizeLimits.measured(ranks)
        assert 0 < limits.one_shot < limits.two_shot == limits.most


def _connect(_: int) -> tuple[None, str]:
    reducer, reason = connect_peers(dist.group.WORLD, torch.device("cpu"), limit_s=1.0)
    assert reducer is None
    return None, reason
