"""Sums over peer memory: the kernels, their flags and the reducer, in one process a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from raylm import ops
from raylm.ops import fallback
from raylm.ops.peer_memory import Window
from raylm.parallel.peer_reduce import PeerReducer, SizeLimits, SplitLimits, connect_peers
from tests.support.peer_sums import in_order, share, skip_without_operators, started
from tests.support.spawned import Ranks

CAPACITY = 4 << 20
ONE_SHOT, TWO_SHOT, MIXED = SizeLimits(CAPACITY, 0), SizeLimits(0, CAPACITY), SizeLimits(32 << 10, CAPACITY)
SPLIT = SplitLimits(8192, 32 << 10)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Vectors of 16 bytes: one, fewer than ranks or threads, one more than a block or a part has, many to a thread.
VECTORS = [1, 2, 3, 5, 31, 127, 128, 129, 512, 1000, 4096, 8191, 8192, 8193, 40_001, CAPACITY // 16]
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def extension() -> None:
    skip_without_operators()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from started(min(torch.cuda.device_count(), 4), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("limits", [ONE_SHOT, TWO_SHOT], ids=["one-shot", "two-shot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_have_the_reference_s_bits_on_every_rank(ranks: Ranks, dtype: torch.dtype, limits: SizeLimits) -> None:
    digests = ranks.run(_check_sums, dtype, limits)
    assert all(digest == digests[0] for digest in digests)


@pytest.mark.parametrize("limits", [ONE_SHOT, TWO_SHOT, MIXED], ids=["one-shot", "two-shot", "mixed"])
def test_thousands_of_calls_with_delays(ranks: Ranks, limits: SizeLimits) -> None:
    ranks.run(_check_many_calls, limits)


@pytest.mark.parametrize("limits", [ONE_SHOT, TWO_SHOT, MIXED], ids=["one-shot", "two-shot", "mixed"])
def test_graphs_replay_between_eager_calls(ranks: Ranks, limits: SizeLimits) -> None:
    ranks.run(_check_graphs, limits)


def test_parts_are_gathered_between_sums(ranks: Ranks) -> None:
    ranks.run(_check_gathers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_in_the_same_kernel(ranks: Ranks, dtype: torch.dtype) -> None:
    digests = ranks.run(_check_norms, dtype)
    assert all(digest == digests[0] for digest in digests)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_that_ranks_split(ranks: Ranks, dtype: torch.dtype) -> None:
    digests = ranks.run(_check_split_norms, dtype)
    assert all(digest == digests[0] for digest in digests)


def test_split_norms_between_others_with_delays(ranks: Ranks) -> None:
    ranks.run(_check_split_calls)


def test_graphs_of_split_norms_replay_between_eager_calls(ranks: Ranks) -> None:
    ranks.run(_check_split_graphs)


def test_split_norms_straight_after_each_other(ranks: Ranks) -> None:
    ranks.run(_check_split_in_a_row)


def test_two_reducers_on_two_streams(ranks: Ranks) -> None:
    ranks.run(_check_two_reducers)


def test_a_rank_may_come_a_second_late(ranks: Ranks) -> None:
    ranks.run(_check_late_rank)


def test_takes_only_what_the_kernels_can(ranks: Ranks) -> None:
    ranks.run(_check_takes)


def test_close_gives_the_memory_back(ranks: Ranks) -> None:
    ranks.run(_check_close)


def test_where_a_rank_has_no_gpu_nobody_has_a_reducer(ranks: Ranks) -> None:
    reasons = ranks.run(_connect_without_a_gpu)
    assert set(reasons) == {"rank 1: its device is cpu, not a GPU"}


def test_ranks_that_share_a_gpu_have_no_reducer(ranks: Ranks) -> None:
    assert set(ranks.run(_connect_on_one_gpu)) == {"ranks 0 and 1 share a GPU"}


def test_a_peer_that_stays_away_is_an_error(tmp_path: Path) -> None:
    for ranks in started(2, tmp_path):
        assert ranks.run(_wait_for_nobody) == ["RuntimeError", "absent"]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_windows_of_one_gpu(count: int, tmp_path: Path) -> None:
    """The ranks are streams of one process here; few enough blocks that all of them run at once."""
    ranks = Ranks(1, tmp_path)
    try:
        if count <= 4:
            ranks.run(_check_one_gpu, count)
        ranks.run(_check_split_on_one_gpu, count)
    finally:
        ranks.close()


def test_bad_arguments_are_named() -> None:
    x, windows = torch.zeros(64, device="cuda"), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="peer_all_reduce: x has 256 bytes, must have at most 128"):
        ops.peer_all_reduce(x, windows, 0, 128, 1.0)
    with pytest.raises(RuntimeError, match="peer_all_reduce: x has 252 bytes at .*, must be a multiple of 16"):
        ops.peer_all_reduce(x[1:], windows, 0, 256, 1.0)
    with pytest.raises(RuntimeError, match="peer_all_reduce: x is float64"):
        ops.peer_all_reduce(x.double(), windows, 0, 1024, 1.0)
    with pytest.raises(RuntimeError, match="peer_all_reduce: x must be contiguous"):
        ops.peer_all_reduce(x.view(8, 8).t(), windows, 0, 256, 1.0)
    with pytest.raises(RuntimeError, match="peer_all_reduce: windows has 9 ranks, must have 2 to 8"):
        ops.peer_all_reduce(x, torch.zeros(9, dtype=torch.int64), 0, 256, 1.0)
    with pytest.raises(RuntimeError, match="peer_all_reduce: windows is not on the CPU"):
        ops.peer_all_reduce(x, windows.cuda(), 0, 256, 1.0)
    with pytest.raises(RuntimeError, match="peer_all_reduce: rank is 2, must be 0 to 1"):
        ops.peer_all_reduce(x, windows, 2, 256, 1.0)
    with pytest.raises(RuntimeError, match="peer_all_reduce: limit_s is 0"):
        ops.peer_all_reduce(x, windows, 0, 256, 0.0)
    norm = (1e-6, windows, 0, 256, 1.0)
    with pytest.raises(RuntimeError, match="peer_add_rms_norm: x has 288 bytes, must have at most 256"):
        ops.peer_add_rms_norm(torch.zeros(9, 8, device="cuda"), torch.zeros(9, 8, device="cuda"), x[:8], *norm)
    with pytest.raises(RuntimeError, match="peer_all_gather: x has rows of 36 bytes at .*, must be a multiple of 16"):
        ops.peer_all_gather(x[:18].view(2, 9), windows, 0, 256, 1.0)
    with pytest.raises(RuntimeError, match="peer_all_gather: x has 1 rows, must have a multiple of 2"):
        ops.peer_all_gather(x.view(1, 64), windows, 0, 256, 1.0, split=True)
    with pytest.raises(RuntimeError, match="peer_add_rms_norm: x has 10 columns, must have a multiple of 4"):
        ops.peer_add_rms_norm(x[:20].view(2, 10), x[20:40].view(2, 10), x[:10], *norm)
    with pytest.raises(RuntimeError, match="must start at multiples of 16 bytes"):
        ops.peer_add_rms_norm(x[1:9].view(1, 8), x[:8].view(1, 8), x[:8], *norm)
    split = (x[:8], 1e-6, windows, 0, 64, 1.0)
    with pytest.raises(RuntimeError, match="peers' shares of x have 96 bytes, must have at most 64"):
        ops.peer_split_add_rms_norm(torch.zeros(5, 8, device="cuda"), torch.zeros(5, 8, device="cuda"), *split)
    with pytest.raises(RuntimeError, match="peer_split_add_rms_norm: x has 10 columns, must have a multiple of 4"):
        ops.peer_split_add_rms_norm(x[:20].view(2, 10), x[20:40].view(2, 10), x[:10], *split[1:])


# What each rank does.


@contextmanager
def _reducer(rank: int, limits: SizeLimits, split: SplitLimits | None = None) -> Iterator[PeerReducer]:
    device = torch.device("cuda", rank)
    reducer, reason = connect_peers(dist.group.WORLD, device, limit_s=LIMIT_S, limits=limits, split=split)
    assert reducer is not None, reason
    yield reducer
    reducer.close()


def _random(rank: int, seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator, device="cuda").to(dtype)


def _pattern(rank: int, call: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers, other ones for every rank, call and place."""
    return ((torch.arange(numel, device="cuda") * (rank + 3) + call * 37 + rank * 11) % 251 - 125).to(dtype)


def _expected(call: int, numel: int, dtype: torch.dtype) -> Tensor:
    return in_order([_pattern(r, call, numel, dtype) for r in range(dist.get_world_size())])


def _check_sums(rank: int, dtype: torch.dtype, limits: SizeLimits) -> list[str]:
    digests = []
    with _reducer(rank, limits) as reducer:
        for seed, vectors in enumerate(VECTORS):
            numel = vectors * 16 // dtype.itemsize
            parts = [_random(r, seed, numel, dtype) for r in range(dist.get_world_size())]
            x = parts[rank].clone()
            assert reducer.takes(x)
            assert reducer(x) is x
            exact = torch.stack([part.double() for part in parts]).sum(0)
            tolerance = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
            torch.testing.assert_close(x.double(), exact, atol=8 * tolerance, rtol=tolerance)
            assert torch.equal(x, in_order(parts)), (vectors, dtype)
            digests.append(sha256(x.view(torch.uint8).cpu().numpy().tobytes()).hexdigest())
    return digests


def _check_many_calls(rank: int, limits: SizeLimits, calls: int = 2000) -> None:
    common, own = random.Random(0), random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with _reducer(rank, limits) as reducer:
        for call in range(calls):
            dtype = common.choice(DTYPES)
            numel = common.choice([1, 8, 64, 511, 512, 513, 4000, 30_000]) * 16 // dtype.itemsize
            x, expected = _pattern(rank, call, numel, dtype), _expected(call, numel, dtype)
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(200_000))  # cycles: up to 0.1 ms
            reducer(x)
            wrong += (x != expected).any()
            if own.random() < 0.02:
                torch.cuda.synchronize()
        assert int(wrong) == 0


def _check_graphs(rank: int, limits: SizeLimits, replays: int = 300) -> None:
    sizes = [512, 8, 40_000, 4096, 1, 513, 513, 100_000, 64, 2048]
    own = random.Random(rank)
    with _reducer(rank, limits) as reducer:
        base = torch.zeros((), dtype=torch.float32, device="cuda")
        inputs = [_pattern(rank, i, 8 * size, torch.bfloat16) for i, size in enumerate(sizes)]
        expected = [_expected(i, 8 * size, torch.bfloat16) for i, size in enumerate(sizes)]
        outputs = [torch.empty_like(x) for x in inputs]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")

        def step() -> None:
            for x, out in zip(inputs, outputs, strict=True):
                reducer(out.copy_(x * base))

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        for replay in range(replays):
            # Powers of two keep the sums' bits comparable.
            scale = 2.0 ** (replay % 7 - 3)
            base.fill_(scale)
            if own.random() < 0.5:
                torch.cuda._sleep(own.randrange(300_000))
            graph.replay() if replay % 5 else step()
            for out, sums in zip(outputs, expected, strict=True):
                wrong += (out != sums * scale).any()
        assert int(wrong) == 0


def _check_gathers(rank: int, calls: int = 300) -> None:
    """Also of more bytes than a window has."""
    common, own = random.Random(0), random.Random(rank)
    wrong, ranks = torch.zeros((), dtype=torch.int64, device="cuda"), dist.get_world_size()
    with _reducer(rank, ONE_SHOT) as reducer:
        for call in range(calls):
            dtype = common.choice([*DTYPES, torch.int64])
            rows, vectors = common.choice([1, 2, 7, 64, 132, 256]), common.choice([1, 3, 128, 513, 4008])
            numel = rows * vectors * 16 // dtype.itemsize
            parts = [_pattern(r, call, numel, dtype).view(rows, -1) for r in range(ranks)]
            expected, x = torch.cat(parts, 1), parts[rank].contiguous()
            assert reducer.takes_gather(x)
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(200_000))  # cycles: up to 0.1 ms
            wrong += (reducer.gather(x) != expected).any()
            if rows % ranks == 0:
                wrong += (reducer.gather(x, split=True) != expected[share(rows, rank, ranks)]).any()
            if common.random() < 0.3:
                sums = _pattern(rank, call, 4096, torch.float16)
                wrong += (reducer(sums) != _expected(call, 4096, torch.float16)).any()
        assert int(wrong) == 0


def _check_norms(rank: int, dtype: torch.dtype) -> list[str]:
    """Between calls of other kinds and sizes, so that slots and flags change hands."""
    digests = []
    with _reducer(rank, SizeLimits(2 << 20, 2 * CAPACITY)) as reducer:
        shapes = [(1, 8), (1, 4096), (3, 576), (64, 4096), (2, 8192), (17, 16_384 // (dtype.itemsize // 2)), (64, 64)]
        shapes += [(129, 1024), (255, 2048), (256, 576), (511, 64), (300, 1032), (128, 4096), (640, 256)]
        for seed, (rows, hidden) in enumerate(shapes * 10):
            parts = [_random(r, seed, rows * hidden, dtype).view(rows, hidden) for r in range(dist.get_world_size())]
            residual = _random(90, seed, rows * hidden, dtype).view(rows, hidden)
            weight, x = _random(91, seed, hidden, dtype), parts[rank].clone()
            expected = (in_order(parts).float() + residual.float()).to(dtype)
            assert reducer.takes_norm(x, residual)
            out = reducer.add_rms_norm(x, residual, weight, 1e-5)
            assert torch.equal(residual, expected) and torch.equal(x, parts[rank])
            norm = fallback.rms_norm(expected, weight, 1e-5)
            tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(out.float(), norm.float(), atol=tolerance, rtol=tolerance)
            digests.append(sha256(out.view(torch.uint8).cpu().numpy().tobytes()).hexdigest())
            numel = (32, 3 << 20, 16 << 10)[seed % 3] // dtype.itemsize
            assert torch.equal(reducer(_pattern(rank, seed, numel, dtype)), _expected(seed, numel, dtype))
        x = torch.zeros(1, (2 << 20) // dtype.itemsize, dtype=dtype, device="cuda")
        assert reducer.takes(x) and not reducer.takes_norm(x, x), "a row is too wide"
        odd = x.view(-1)[:144].view(16, 9)
        assert reducer.takes(odd) and not reducer.takes_norm(odd, odd) and not reducer.takes_gather(odd)
    return digests


def _check_split_norms(rank: int, dtype: torch.dtype) -> list[str]:
    """Between sums and norms of few rows. What a rank holds of the others' residual is not read: it is no number."""
    digests, vec, ranks = [], 16 // dtype.itemsize, dist.get_world_size()
    shapes = [(512, 4096), (513, 1024), (1000, 8192), (4099, 4096), (777, 576), (600, vec), (515, 2048 * vec)]
    shapes.append((8192, 4096))  # four chunks of several rounds between two ranks
    with _reducer(rank, SizeLimits(2 << 20, CAPACITY), SPLIT) as reducer:
        for seed, (rows, hidden) in enumerate(shapes * 2):
            parts = [_random(r, seed, rows * hidden, dtype).view(rows, hidden) for r in range(ranks)]
            residual = _random(90, seed, rows * hidden, dtype).view(rows, hidden)
            weight, x = _random(91, seed, hidden, dtype), parts[rank].clone()
            expected, own = (in_order(parts).float() + residual.float()).to(dtype), share(rows, rank, ranks)
            residual[: own.start] = residual[own.stop :] = float("nan")
            assert reducer.takes_norm(x, residual)
            out = reducer.add_rms_norm(x, residual, weight, 1e-5)
            assert torch.equal(residual[own], expected[own]) and torch.equal(x, parts[rank]), (rows, hidden)
            assert int(residual.isnan().sum()) == (rows - (own.stop - own.start)) * hidden
            norm = fallback.rms_norm(expected, weight, 1e-5)
            tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(out.float(), norm.float(), atol=tolerance, rtol=tolerance)
            digests.append(sha256(out.view(torch.uint8).cpu().numpy().tobytes()).hexdigest())
            few, held = x[: 8 + seed].contiguous(), residual[: 8 + seed].nan_to_num()
            assert reducer.takes_norm(few, held)
            reducer.add_rms_norm(few, held, weight, 1e-5)
            assert torch.equal(reducer(_pattern(rank, seed, 4096, dtype)), _expected(seed, 4096, dtype))
    return digests


class _SplitCase:
    """A norm that is split, and what it must give; whole numbers, other ones for every call."""

    def __init__(self, rank: int, call: int, rows: int, hidden: int, dtype: torch.dtype) -> None:
        self.x = _pattern(rank, call, rows * hidden, dtype).view(rows, hidden)
        self.residual = _pattern(90, call, rows * hidden, dtype).view(rows, hidden)
        self._own = share(rows, rank, dist.get_world_size())
        self._weight = torch.ones(hidden, dtype=dtype, device="cuda")
        self._sums = self.residual.clone()
        self._norm = ops.add_rms_norm(
            _expected(call, rows * hidden, dtype).view_as(self.x), self._sums, self._weight, 0.0
        )

    def run(self, reducer: PeerReducer, residual: Tensor) -> Tensor:
        return reducer.add_rms_norm(self.x, residual, self._weight, 0.0)

    def differs(self, out: Tensor, residual: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        # Values up to 4 or so: the norm may be rounded the other way.
        near = ((out - self._norm).float().abs() <= 0.05).all()
        return ~near | (residual[self._own] != (self._sums * scale)[self._own]).any()

    def is_wrong(self, reducer: PeerReducer, scale: Tensor | float = 1.0) -> Tensor:
        """Runs it, all of it times a power of two."""
        residual = self.residual * scale
        out = reducer.add_rms_norm(self.x * scale, residual, self._weight, 0.0)
        return self.differs(out, residual, scale)


def _check_split_calls(rank: int, calls: int = 400) -> None:
    common, own = random.Random(0), random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with _reducer(rank, MIXED, SPLIT) as reducer:
        for call in range(calls):
            dtype = common.choice(DTYPES)
            rows, hidden = common.choice([512, 513, 640, 1000, 2049]), common.choice([64, 1024, 4096])
            case = _SplitCase(rank, call, rows, hidden, dtype)
            numel = common.choice([64, 512, 4000, 30_000]) * 8
            x, expected = _pattern(rank, call, numel, dtype), _expected(call, numel, dtype)
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(400_000))  # cycles: up to 0.2 ms
            if call == calls // 2 and rank == 0:
                torch.cuda._sleep(1_000_000_000)  # half a second
            wrong += case.is_wrong(reducer)
            if common.random() < 0.5:
                wrong += (reducer(x) != expected).any()
            if own.random() < 0.02:
                torch.cuda.synchronize()
        assert int(wrong) == 0


def _check_split_graphs(rank: int, replays: int = 200) -> None:
    shapes, own = [(512, 4096), (4099, 1024), (513, 64), (513, 4096), (1000, 8192)], random.Random(rank)
    with _reducer(rank, MIXED, SPLIT) as reducer:
        base = torch.zeros((), dtype=torch.bfloat16, device="cuda")
        cases = [_SplitCase(rank, call, *shape, torch.bfloat16) for call, shape in enumerate(shapes)]
        sums, expected = _pattern(rank, 99, 4096, torch.bfloat16), _expected(99, 4096, torch.bfloat16)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")

        def step() -> None:
            for case in cases:
                wrong.add_(case.is_wrong(reducer, base))
                wrong.add_((reducer(sums * base) != expected * base).any())

        base.fill_(1.0)
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        for replay in range(replays):
            # Powers of two keep the sums' bits comparable, and the norm as it is.
            base.fill_(2.0 ** (replay % 7 - 3))
            if own.random() < 0.5:
                torch.cuda._sleep(own.randrange(300_000))
            graph.replay() if replay % 5 else step()
        assert int(wrong) == 0


def _check_split_in_a_row(rank: int, calls: int = 48, replays: int = 40) -> None:
    """Nothing between the calls: a rank may begin one while another still copies what the last one gave."""
    own = random.Random(rank)
    shapes = [(512, 4096), (2049, 1024), (513, 64), (1000, 4096), (600, 8192)]
    with _reducer(rank, MIXED, SPLIT) as reducer:
        cases = [_SplitCase(rank, call, *shapes[call % len(shapes)], torch.bfloat16) for call in range(calls)]
        held = [torch.empty_like(case.residual) for case in cases]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = [case.run(reducer, residual) for case, residual in zip(cases, held, strict=True)]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(replays):
            for case, residual in zip(cases, held, strict=True):
                residual.copy_(case.residual)
            if own.random() < 0.5:
                torch.cuda._sleep(own.randrange(1_000_000))
            graph.replay()
            for case, residual, out in zip(cases, held, outs, strict=True):
                wrong += case.differs(out, residual)
        assert int(wrong) == 0


def _check_two_reducers(rank: int, calls: int = 300) -> None:
    own = random.Random(rank)
    with _reducer(rank, MIXED) as first, _reducer(rank, ONE_SHOT) as second:
        reducers, sizes = (first, second), (24_000, 4096)
        # All made before, on all ranks: while ranks wait for each other, none may need its device to be idle.
        tensors = [[_pattern(rank, call, size, torch.float32) for call in range(calls)] for size in sizes]
        expected = [[_expected(call, size, torch.float32) for call in range(calls)] for size in sizes]
        for which, reducer in enumerate(reducers):
            reducer(torch.zeros(sizes[which], device="cuda"))
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        dist.barrier()
        for call in range(calls):
            for which in own.sample((0, 1), 2):  # Ranks need not agree on the order between two reducers.
                with torch.cuda.stream(streams[which]):
                    torch.cuda._sleep(own.randrange(20_000))
                    reducers[which](tensors[which][call])
        torch.cuda.synchronize()
        for which in (0, 1):
            assert all(map(torch.equal, tensors[which], expected[which]))


def _check_late_rank(rank: int) -> None:
    with _reducer(rank, MIXED) as reducer:
        for late in (0, dist.get_world_size() - 1):
            for call, numel in enumerate((4096, 400_000)):
                x, expected = _pattern(rank, call, numel, torch.bfloat16), _expected(call, numel, torch.bfloat16)
                if rank == late:
                    torch.cuda._sleep(2_000_000_000)  # About a second.
                assert torch.equal(reducer(x), expected)


def _check_takes(rank: int) -> None:
    with _reducer(rank, SizeLimits(64, 128)) as reducer:
        x = torch.zeros(64, dtype=torch.bfloat16, device="cuda")
        assert reducer.takes(x) and reducer.takes(x[:8]) and reducer.takes(x.view(8, 8))
        assert not reducer.takes(x[:7]), "14 bytes"
        assert not reducer.takes(x[1:9]), "not aligned"
        assert not reducer.takes(x[:0])
        assert not reducer.takes(torch.zeros(72, dtype=torch.bfloat16, device="cuda")), "144 bytes"
        assert not reducer.takes(x.view(8, 8).t())
        assert not reducer.takes(x.int())
        assert not reducer.takes(x.cpu())
        many = torch.zeros(512, 8, dtype=torch.bfloat16, device="cuda")
        assert not reducer.takes_norm(many, many)
    with _reducer(rank, SizeLimits(64, 128), SplitLimits(600, 16)) as reducer:
        assert reducer.takes_norm(many, many) and not reducer.takes(many)
        assert not reducer.takes_norm(many[:511], many[:511])
        assert not reducer.takes_norm(torch.zeros(601, 8, dtype=torch.bfloat16, device="cuda"), many)
        wide = torch.zeros(512, 16, dtype=torch.bfloat16, device="cuda")
        assert not reducer.takes_norm(wide, wide) and not reducer.takes_norm(wide[:, :8], many)


def _check_close(rank: int) -> None:
    limits = SizeLimits(64 << 20, 0)
    with _reducer(rank, limits):
        pass
    torch.cuda.synchronize()
    dist.barrier()
    free = torch.cuda.mem_get_info()[0]
    dist.barrier()
    for _ in range(3):
        with _reducer(rank, limits, SplitLimits(4096, 16 << 10)) as reducer:
            reducer(torch.ones(8, device="cuda"))
            torch.cuda.synchronize()
            assert torch.cuda.mem_get_info()[0] < free - (180 << 20)
            dist.barrier()
    dist.barrier()
    assert torch.cuda.mem_get_info()[0] > free - (32 << 20)


def _connect_without_a_gpu(rank: int) -> str:
    device = torch.device("cpu") if rank == 1 else torch.device("cuda", rank)
    reducer, reason = connect_peers(dist.group.WORLD, device, limit_s=LIMIT_S, limits=ONE_SHOT)
    assert reducer is None
    return reason


def _connect_on_one_gpu(rank: int) -> str:
    reducer, reason = connect_peers(dist.group.WORLD, torch.device("cuda", 0), limit_s=LIMIT_S, limits=ONE_SHOT)
    assert reducer is None
    return reason


def _wait_for_nobody(rank: int) -> str:
    reducer, reason = connect_peers(dist.group.WORLD, torch.device("cuda", rank), limit_s=0.5, limits=ONE_SHOT)
    assert reducer is not None, reason
    if rank == 1:
        return "absent"
    reducer(torch.ones(64, device="cuda"))
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return "RuntimeError"
    return "no error"


def _check_one_gpu(_: int, count: int, calls: int = 500) -> None:
    windows = [Window.allocate(0, 16 << 10) for _ in range(count)]
    addresses = torch.tensor([window.address for window in windows])
    streams = [torch.cuda.Stream() for _ in range(count)]
    chooser = random.Random(count)
    for call in range(calls):
        numel, two_shot = chooser.choice([8, 24, 1000, 1024, 4096, 8192]), chooser.random() < 0.5
        parts = [_pattern(rank, call, numel, torch.bfloat16) for rank in range(count)]
        expected = in_order(parts)
        torch.cuda.synchronize()
        for rank in chooser.sample(range(count), count):
            with torch.cuda.stream(streams[rank]):
                ops.peer_all_reduce(parts[rank], addresses, rank, 16 << 10, 10.0, two_shot=two_shot)
        torch.cuda.synchronize()
        for part in parts:
            assert torch.equal(part, expected), (call, numel, two_shot)
    for window in windows:
        window.free()


def _check_split_on_one_gpu(_: int, count: int, calls: int = 200) -> None:
    """Up to 20 blocks a rank: all of them have room at once."""
    windows = [Window.allocate(0, 512 << 10) for _ in range(count)]
    addresses = torch.tensor([window.address for window in windows])
    streams = [torch.cuda.Stream() for _ in range(count)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.empty(1 << 19, dtype=torch.uint8, device="cuda")  # While ranks wait, no memory may be asked for.
    chooser = random.Random(count)
    for call in range(calls):
        rows, hidden = chooser.choice([1, 2, 7, 24, 40]), chooser.choice([8, 64, 1024, 4096])
        parts = [_random(rank, call, rows * hidden, torch.bfloat16).view(rows, hidden) for rank in range(count)]
        before = _random(90, call, rows * hidden, torch.bfloat16).view(rows, hidden)
        residuals, weight = [before.clone() for _ in range(count)], _random(91, call, hidden, torch.bfloat16)
        expected = (in_order(parts).float() + before.float()).to(torch.bfloat16)
        outs: dict[int, Tensor] = {}
        torch.cuda.synchronize()
        for rank in chooser.sample(range(count), count):
            with torch.cuda.stream(streams[rank]):
                outs[rank] = ops.peer_split_add_rms_norm(
                    parts[rank], residuals[rank], weight, 1e-5, addresses, rank, 512 << 10, 10.0
                )
        torch.cuda.synchronize()
        norm = fallback.rms_norm(expected, weight, 1e-5)
        torch.testing.assert_close(outs[0].float(), norm.float(), atol=0.03, rtol=0.03)
        for rank in range(count):
            own = share(rows, rank, count)
            assert torch.equal(outs[rank], outs[0]), (call, rows, hidden)
            assert torch.equal(residuals[rank][own], expected[own]), (call, rows, hidden)
        torch.cuda.synchronize()
    for window in windows:
        window.free()
