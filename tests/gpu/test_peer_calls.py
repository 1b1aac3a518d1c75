"""Calls over peer memory: sums whose rows are sent while the product is computed, and all kinds in one graph."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from raylm import ops
from raylm.parallel.peer_reduce import LEAST_SENT_SHARE, PeerReducer, SizeLimits, SplitLimits, connect_peers
from tests.support.peer_sums import in_order, share, skip_without_operators, started
from tests.support.spawned import Ranks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    skip_without_operators()
    yield from started(min(torch.cuda.device_count(), 4), tmp_path_factory.mktemp("ranks"))


def test_sent_rows_give_the_bits_of_pushed_ones(ranks: Ranks) -> None:
    ranks.run(_check_sent)


def test_a_graph_of_all_calls_between_sums_that_are_sent(ranks: Ranks) -> None:
    ranks.run(_check_mixed)


def test_bad_arguments_are_named() -> None:
    skip_without_operators()
    x, windows = torch.zeros(4, 8, device="cuda"), torch.zeros(2, dtype=torch.int64)
    place = {"windows": windows, "rank": 0, "capacity": 128, "number": 1}
    with pytest.raises(RuntimeError, match="peer_send_rows: to is 0, must be another rank"):
        ops.peer_send_rows(x, to=0, rows=8, **place)
    with pytest.raises(RuntimeError, match="size 4 .* share of the rows"):
        ops.peer_send_rows(x, to=1, rows=10, **place)
    with pytest.raises(RuntimeError, match="peers' shares of x have 160 bytes, must have at most 128"):
        ops.peer_send_rows(torch.zeros(5, 8, device="cuda"), to=1, rows=10, **place)
    with pytest.raises(RuntimeError, match="peer_sent_add_rms_norm: number is 0, must be 1 or more"):
        ops.peer_sent_add_rms_norm(x, torch.zeros(8, 8, device="cuda"), x[0], 1e-5, windows, 0, 128, 1.0, 0)


def _random(seed: int, rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, hidden, generator=generator, device="cuda").to(dtype)


def _connected(rank: int) -> PeerReducer:
    split = SplitLimits(2 * _least(), 32 << 10)
    device, limits = torch.device("cuda", rank), SizeLimits(1 << 20, 0)
    reducer, reason = connect_peers(dist.group.WORLD, device, limit_s=30.0, limits=limits, split=split)
    assert reducer is not None and "norms are not split" not in reason, reason
    return reducer


def _least() -> int:
    """The fewest rows that are sent."""
    return LEAST_SENT_SHARE * dist.get_world_size()


def _check_sent(rank: int, calls: int = 120) -> None:
    """Some ranks come late, some products take long, and between them norms push their rows."""
    common, own = random.Random(0), random.Random(rank)
    reducer = _connected(rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for call in range(calls):
        dtype, hidden = common.choice(DTYPES), common.choice([64, 1024, 4096])
        rows = common.choice([_least(), _least() + 1, _least() + 953, 2 * _least()])
        x, residual = _random(100 * call + rank, rows, hidden, dtype), _random(100 * call + 50, rows, hidden, dtype)
        weight, held = _random(100 * call + 51, 1, hidden, dtype)[0], residual.clone()
        expected = reducer.add_rms_norm(x, held, weight, 1e-5)
        slow = own.random() < 0.3

        def product(part: slice, x: Tensor = x, slow: bool = slow) -> Tensor:
            if slow:
                torch.cuda._sleep(own.randrange(400_000))  # cycles: up to 0.2 ms
            return x[part].clone()

        assert reducer.sends(rows, hidden * dtype.itemsize)
        out = reducer.add_rms_norm(reducer.send(product, rows), residual, weight, 1e-5)
        if dtype == torch.bfloat16:
            ops.scale_rows(out)  # starts early, in the room that the norm leaves
        mine = share(rows, rank, dist.get_world_size())
        wrong += (out != expected).any() | (residual[mine] != held[mine]).any()
        if own.random() < 0.05:
            torch.cuda.synchronize()
    assert int(wrong) == 0
    assert not reducer.sends(_least() - 1, 2048)
    reducer.close()


def _differs(norm: Tensor, expected: Tensor) -> Tensor:
    """Beyond what another order of adding up the squares can change."""
    return ((norm - expected).abs() > 4 * torch.finfo(norm.dtype).eps * (1 + expected.abs())).any()


def _check_mixed(rank: int, replays: int = 60) -> None:
    """A graph of a sum, norms and gathers is replayed with new inputs; after each replay a norm of sent rows."""
    reducer, dtype, hidden, ranks = _connected(rank), torch.bfloat16, 1024, dist.get_world_size()
    sizes = {"sum": 3, "norm": 16, "gather": 8, "split gather": 16 * ranks, "split norm": 1027}
    given = {name: torch.zeros(rows, hidden, dtype=dtype, device="cuda") for name, rows in sizes.items()}
    residuals = {name: torch.zeros_like(given[name]) for name in ("norm", "split norm")}
    weight = _random(7, 1, hidden, dtype)[0]

    def calls() -> dict[str, Tensor]:
        out = {name: reducer.add_rms_norm(given[name], residual, weight, 1e-5) for name, residual in residuals.items()}
        out["gather"] = reducer.gather(given["gather"], split=False)
        out["sum"] = reducer(given["sum"].clone())
        out["split gather"] = reducer.gather(given["split gather"], split=True)
        return out

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = calls()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(replays):
        parts = {
            name: [_random(1000 * replay + 10 * n + r, rows, hidden, dtype) for r in range(ranks)]
            for n, (name, rows) in enumerate(sizes.items())
        }
        for name, x in given.items():
            x.copy_(parts[name][rank])
        for residual in residuals.values():
            residual.fill_(0.5)
        graph.replay()
        sums = {name: in_order(of_ranks) for name, of_ranks in parts.items()}
        wrong += (found["sum"] != sums["sum"]).any()
        wrong += (found["gather"] != torch.cat(parts["gather"], dim=1)).any()
        mine = share(sizes["split gather"], rank, ranks)
        wrong += (found["split gather"] != torch.cat(parts["split gather"], dim=1)[mine]).any()
        for name in residuals:
            wrong += _differs(found[name], ops.add_rms_norm(sums[name], torch.full_like(sums[name], 0.5), weight, 1e-5))
        own = [_random(1000 * replay + 90 + r, _least(), hidden, dtype) for r in range(ranks)]
        sent = reducer.send(lambda part, own=own: own[rank][part].clone(), _least())
        out = reducer.add_rms_norm(sent, torch.zeros_like(own[0]), weight, 1e-5)
        wrong += _differs(out, ops.add_rms_norm(in_order(own), torch.zeros_like(own[0]), weight, 1e-5))
    assert int(wrong) == 0
    reducer.close()
