"""Where ranks cannot share GPU memory, all of them learn why. tests/gpu/test_peer_reduce.py has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from raylm.config.engine import ParallelConfig
from raylm.ops import extension, peer_memory
from raylm.ops.extension import ExtensionStatus
from raylm.parallel import groups
from raylm.parallel.groups import Seat
from raylm.parallel.peer_reduce import SizeLimits, SplitLimits, connect_peers
from tests.support.spawned import Ranks


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


def test_norms_are_split_by_their_shape_alone() -> None:
    limits = SplitLimits(8192, 8192)
    assert limits.takes(512, 8192) and limits.takes(8192, 8192) and limits.takes(513, 16)
    assert not limits.takes(511, 8192) and not limits.takes(8193, 16), "rows"
    assert not limits.takes(512, 8208) and not limits.takes(512, 24) and not limits.takes(512, 0), "bytes of a row"
    assert not SplitLimits(8192, 64 << 10).takes(512, 64 << 10), "more than a block holds"
    assert SplitLimits(8, 16, least_rows=1).takes(1, 16)


def test_a_split_norm_s_window_has_the_other_ranks_shares() -> None:
    assert SplitLimits(8192, 8192).capacity(2) == 4096 * 8192
    assert SplitLimits(8192, 8192).capacity(8) == 7 * 1024 * 8192
    assert SplitLimits(8191, 16).capacity(3) == 2 * 2731 * 16
    assert SplitLimits(511, 8192).capacity(2) == 0, "no step has so many rows"
    assert SplitLimits(8192, 24).capacity(2) == 0


@pytest.mark.parametrize(("stages", "splits"), [(1, True), (2, False)])
def test_stages_split_no_norms(stages: int, splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage hands on its whole residual; with split norms no rank would have it. Nor has it cells for few rows."""
    given: list[tuple[SplitLimits | None, int]] = []

    def connected(*_: object, split: SplitLimits | None, cells_hidden_size: int, **__: object) -> tuple[None, str]:
        given.append((split, cells_hidden_size))
        return None, "only asked"

    monkeypatch.setattr(groups, "connect_peers", connected)
    monkeypatch.setattr(groups.dist, "init_process_group", lambda *_, **__: None)
    for name in ("TCPStore", "StageLinks", "set_up_libraries", "_group"):
        monkeypatch.setattr(groups, name, lambda *_, **__: object())
    limits, seat = SplitLimits(8192, 8192), Seat(0, "127.0.0.1", "127.0.0.1:1")
    parallel = ParallelConfig(tensor=2, pipeline=stages)
    context = groups.connect(parallel, seat, torch.device("cuda"), timeout_s=1.0, split=limits, hidden_size=64)
    assert context.reducer is None and given == [(limits, 64) if splits else (None, 0)]


def test_parts_of_a_gpu_sum_through_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over peer memory hold blocks that wait for each other, which few multiprocessors may not run at once."""
    ops = ("peer_all_reduce", "peer_all_gather", "peer_add_rms_norm", "peer_split_add_rms_norm")
    ops += ("peer_send_rows", "peer_sent_add_rms_norm")
    monkeypatch.setattr(extension, "load", lambda: ExtensionStatus(Path("x.so"), ops={"cuda": ops}))
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    assert peer_memory.missing(0) is None
    assert str(peer_memory.missing(1)).startswith(f"{names[1]} is a part of a GPU")


def _connect(_: int) -> tuple[None, str]:
    reducer, reason = connect_peers(dist.group.WORLD, torch.device("cpu"), limit_s=1.0)
    assert reducer is None
    return None, reason
