"""Sums whose rows are sent while the product is computed, beside those that push them: the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from raylm import ops
from raylm.ops import peer_memory
from raylm.parallel.peer_reduce import LEAST_SENT_ROWS, SizeLimits, SplitLimits, connect_peers
from tests.support.spawned import Ranks

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    if (problem := peer_memory.missing(0)) is not None:
        pytest.skip(problem)
    if torch.cuda.device_count() < 2:
        pytest.skip(f"torch sees {torch.cuda.device_count()} GPUs, this needs 2")
    ranks = Ranks(min(torch.cuda.device_count(), 4), tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def test_sent_rows_give_the_bits_of_pushed_ones(ranks: Ranks) -> None:
    ranks.run(_check_sent)


def test_bad_arguments_are_named() -> None:
    if (problem := peer_memory.missing(0)) is not None:
        pytest.skip(problem)
    x, windows = torch.zeros(4, 8, device="cuda"), torch.zeros(2, dtype=torch.int64)
    place = {"windows": windows, "rank": 0, "capacity": 128, "number": 1}
    with pytest.raises(RuntimeError, match="peer_send_rows: to is 0, must be another rank"):
        ops.peer_send_rows(x, to=0, rows=8, **place)
    with pytest.raises(RuntimeError, match="peer_send_rows: x has 4 rows|size 4 .* share of the rows"):
        ops.peer_send_rows(x, to=1, rows=10, **place)
    with pytest.raises(RuntimeError, match="peers' shares of x have 160 bytes, must have at most 128"):
        ops.peer_send_rows(torch.zeros(5, 8, device="cuda"), to=1, rows=10, **place)
    with pytest.raises(RuntimeError, match="peer_sent_add_rms_norm: number is 0, must be 1 or more"):
        ops.peer_sent_add_rms_norm(x, torch.zeros(8, 8, device="cuda"), x[0], 1e-5, windows, 0, 128, 1.0, 0)


def _random(seed: int, rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, hidden, generator=generator, device="cuda").to(dtype)


def _check_sent(rank: int, calls: int = 120) -> None:
    """Some ranks come late, some products take long, and between them norms push their rows."""
    common, own = random.Random(0), random.Random(rank)
    device = torch.device("cuda", rank)
    split = SplitLimits(2 * LEAST_SENT_ROWS, 32 << 10)
    reducer, reason = connect_peers(dist.group.WORLD, device, limit_s=30.0, limits=SizeLimits(1 << 20, 0), split=split)
    assert reducer is not None and "norms are not split" not in reason, reason
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for call in range(calls):
        dtype, hidden = common.choice(DTYPES), common.choice([64, 1024, 4096])
        rows = common.choice([LEAST_SENT_ROWS, LEAST_SENT_ROWS + 1, 3001, 4096])
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
        mine = slice(rows * rank // dist.get_world_size(), rows * (rank + 1) // dist.get_world_size())
        wrong += (out != expected).any() | (residual[mine] != held[mine]).any()
        if own.random() < 0.05:
            torch.cuda.synchronize()
    assert int(wrong) == 0
    assert not reducer.sends(LEAST_SENT_ROWS - 1, 2048)
    reducer.close()
