"""raylm::paged_attention's kernels for many queries: lengths around the borders of their tiles, on a CUDA host."""

from __future__ import annotations

import pytest
import torch

from raylm import ops
from tests.ops.op_reference import close
from tests.ops.test_op_paged_attention import Case, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("needs_extension"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

BORDERS = [(length, length) for length in (17, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 193, 257)]
"""Whole prefills around the tiles of 64 to 192 queries and the steps of 64, 96 and 128 keys."""
CHUNKS = [(100, 300), (128, 256), (130, 1000), (33, 34), (64, 1024), (257, 511), (1, 40), (16, 500), (17, 200), (0, 7)]
"""(queries, sequence length) of chunks that start past position 0, beside decode and a sequence that waits."""
HEAD_DIMS = [64, 80, 96, 128, 192, 256]
HALVES = [torch.bfloat16, torch.float16]


def cuda_case(lengths: list[tuple[int, int]], *, dtype: torch.dtype = torch.bfloat16, **options: int) -> Case:
    return make_case(lengths, dtype=dtype, device="cuda", **options)


def check(case: Case, window: int = 0, soft_cap: float = 0.0) -> None:
    close(ops.paged_attention(*case.arguments(window, soft_cap)), case.expected(window, soft_cap))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("lengths", [BORDERS, CHUNKS], ids=["borders", "chunks"])
def test_lengths(lengths, head_dim, dtype):
    check(cuda_case(lengths, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (3, 1), (8, 1), (7, 1), (10, 2), (9, 3), (32, 8)], ids=str)
def test_groups(heads, head_dim):
    lengths = [(70, 70), (130, 290)]
    check(cuda_case(lengths, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("block_size", [1, 12, 16, 32, 48, 64, 128, 256])
def test_block_sizes(block_size, head_dim):
    lengths = [(70, 70), (130, 290), (200, 513)]
    check(cuda_case(lengths, block_size=block_size, head_dim=head_dim, num_heads=2, num_kv_heads=1))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0, 30.0])
@pytest.mark.parametrize("window", [0, 1, 16, 100, 128, 700])
def test_window_and_soft_cap(window, soft_cap, head_dim):
    lengths = [(150, 150), (300, 300), *CHUNKS]
    check(cuda_case(lengths, head_dim=head_dim, num_heads=2, num_kv_heads=1), window, soft_cap)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (100, 0.0), (0, 2.0), (100, 2.0)])
def test_linear_biases(window, soft_cap, head_dim, dtype):
    case = cuda_case([*BORDERS, *CHUNKS], head_dim=head_dim, num_heads=3, num_kv_heads=1, dtype=dtype)
    options = {"window": window, "soft_cap": soft_cap, "alibi_slopes": case.slopes()}
    close(ops.paged_attention(*case.arguments(**options)), case.expected(**options))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_below_the_window_may_be_given_away(head_dim):
    case = cuda_case([(40, 700), (200, 900)], head_dim=head_dim)
    expected = case.expected(window=150)
    unused = (set(range(len(case.k_cache))) - set(case.block_table.flatten().tolist())).pop()
    for s, first in enumerate((700 - 40 - 149, 900 - 200 - 149)):
        case.block_table[s, : first // 16] = unused  # it holds NaN
    close(ops.paged_attention(*case.arguments(window=150)), expected)


@pytest.mark.parametrize("block_size", [16, 12])
def test_many_sequences_and_rows_past_the_last(block_size):
    lengths = [(20 + s % 50, 20 + s % 50 + s) for s in range(70)]
    case = cuda_case(lengths, head_dim=128, num_heads=2, num_kv_heads=1, block_size=block_size)
    expected = case.expected()
    case.q = torch.cat([case.q, torch.full_like(case.q[:300], float("nan"))])
    out = ops.paged_attention(*case.arguments())
    close(out[: len(expected)], expected)
    assert not out[len(expected) :].any()


def test_large_scores_do_not_overflow():
    case = cuda_case([(40, 40), (130, 300)], head_dim=128)
    case.q = case.q * 100
    close(ops.paged_attention(*case.arguments()), case.expected(), scale=10)


def test_replayed_in_a_graph_with_other_lengths():
    long, short = cuda_case([(200, 400), (100, 100)], head_dim=128), cuda_case([(150, 310), (30, 90)], head_dim=128)
    blocks = torch.cat([long.block_table, torch.zeros_like(long.block_table)], dim=1)
    q, lens, starts = torch.zeros_like(long.q).contiguous(), long.seq_lens.clone(), long.query_start.clone()
    k_cache, v_cache = torch.cat([long.k_cache, short.k_cache]), torch.cat([long.v_cache, short.v_cache])

    def step() -> torch.Tensor:
        return ops.paged_attention(q, k_cache, v_cache, blocks, starts, lens, 200, 400, long.scale)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for case, offset in ((long, 0), (short, len(long.k_cache)), (long, 0)):
        count = sum(case.query_lens)
        q[:count], lens[:], starts[:] = case.q, case.seq_lens, case.query_start
        blocks[:, : case.block_table.shape[1]] = case.block_table + offset
        graph.replay()
        close(out[:count], case.expected())
        assert not out[count:].any()
