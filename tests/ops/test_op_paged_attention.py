"""raylm::paged_attention: prefill, chunks of it and decode over a paged cache whose unused slots hold NaN."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from raylm import ops
from raylm.layers.alibi import alibi_slopes
from tests.ops.devices import ON_CUDA
from tests.ops.op_reference import DTYPES, attention, close

pytestmark = pytest.mark.operators("paged_attention")

HALVES = (torch.bfloat16, torch.float16)

MIXED = [(1, 1), (5, 5), (1, 40), (7, 29), (1, 70), (0, 12)]
"""(queries, sequence length): a first token, a prefill, decode, a chunk of a prefill, decode, a sequence that waits."""


@dataclass
class Case:
    """One call and, for the reference, each sequence's keys and values in order."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    query_lens: list[int]

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def slopes(self) -> torch.Tensor:
        """Another bias for every head, one of them the other way round."""
        slopes = alibi_slopes(self.q.shape[1])
        slopes[-1] = -0.01
        return slopes.to(self.q.device)

    def sinks(self) -> torch.Tensor:
        """One far below the scores, one far above, the others among them."""
        sinks = torch.linspace(-2, 3, self.q.shape[1])
        sinks[0] = -90
        sinks[-1] = 6
        return sinks.to(self.q.device)

    def arguments(
        self,
        window: int = 0,
        soft_cap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[object, ...]:
        tensors = (self.q, self.k_cache, self.v_cache, self.block_table, self.query_start, self.seq_lens)
        lengths = (max(self.query_lens), int(self.seq_lens.max()))
        last = () if sinks is None else (None, sinks)  # behind the counters
        return *tensors, *lengths, self.scale, window, soft_cap, alibi_slopes, *last

    def expected(
        self,
        window: int = 0,
        soft_cap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        options = {"scale": self.scale, "window": window, "soft_cap": soft_cap, "alibi_slopes": alibi_slopes}
        return attention(self.q, self.keys, self.values, self.query_lens, sinks=sinks, **options)


def make_case(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """Random sequences in shuffled blocks. q is a view of a fused projection; slots without a token hold NaN."""
    random = torch.Generator().manual_seed(len(lengths) + head_dim)
    query_lens, seq_lens = [list(column) for column in zip(*lengths, strict=True)]
    num_blocks = [-(-length // block_size) for length in seq_lens]
    order = torch.randperm(sum(num_blocks) + 3, generator=random)
    shape = (len(order), block_size, num_kv_heads, head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    # Entries of the table past a sequence's blocks are never looked at, so they may name no block at all.
    table = torch.full((len(lengths), max(num_blocks) + 1), -7, dtype=torch.int32)
    contents: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    taken = 0
    for s, (length, count) in enumerate(zip(seq_lens, num_blocks, strict=True)):
        blocks = order[taken : taken + count]
        taken += count
        table[s, :count] = blocks
        slots = torch.arange(length)
        for cache, content in zip(caches, contents, strict=True):
            rows = torch.randn(length, num_kv_heads, head_dim, generator=random).to(dtype)
            cache[blocks[slots // block_size], slots % block_size] = rows
            content.append(rows.to(device))
    fused = torch.randn(sum(query_lens), (num_heads + 2 * num_kv_heads) * head_dim, generator=random)
    return Case(
        q=fused.to(device, dtype)[:, : num_heads * head_dim].unflatten(-1, (num_heads, head_dim)),
        k_cache=caches[0].to(device),
        v_cache=caches[1].to(device),
        block_table=table.to(device),
        query_start=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        keys=contents[0],
        values=contents[1],
        query_lens=query_lens,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_mixed_batch(op, device, dtype, head_dim):
    case = make_case(MIXED, head_dim=head_dim, dtype=dtype, device=device)
    out = op("paged_attention")(*case.arguments())
    assert out.dtype == dtype and out.shape == case.q.shape and out.is_contiguous()
    close(out, case.expected())


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("block_size", [1, 12, 32])
def test_groups_and_block_sizes(op, device, heads, block_size):
    case = make_case(MIXED, num_heads=heads[0], num_kv_heads=heads[1], block_size=block_size, device=device)
    close(op("paged_attention")(*case.arguments()), case.expected())


def test_many_heads_share_one_kv_head(op, device):
    case = make_case([(3, 20), (1, 33)], num_heads=64, num_kv_heads=1, device=device)
    close(op("paged_attention")(*case.arguments()), case.expected())


@pytest.mark.parametrize("lengths", [[(1, 1)], [(1, 30), (1, 3), (1, 65)], [(1, 600), (1, 1300)]], ids=str)
@pytest.mark.parametrize("window", [0, 1, 20, 700])
def test_decode(op, device, lengths, window):
    case = make_case(lengths, device=device)
    close(op("paged_attention")(*case.arguments(window)), case.expected(window))


@pytest.mark.parametrize("window", [0, 1, 16, 70])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("lengths", [MIXED, [(150, 150)], [(90, 213), (3, 140)]], ids=str)
def test_window_and_soft_cap(op, device, lengths, window, soft_cap):
    case = make_case(lengths, num_heads=3, num_kv_heads=1, device=device)
    close(op("paged_attention")(*case.arguments(window, soft_cap)), case.expected(window, soft_cap))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (70, 2.0)])
@pytest.mark.parametrize(
    "lengths", [MIXED, [(1, 600), (1, 1300), (1, 2)], [(150, 150), (90, 213), (16, 140), (3, 700)]], ids=str
)
def test_linear_biases(op, device, lengths, window, soft_cap, dtype):
    case = make_case(lengths, dtype=dtype, device=device)
    options = {"window": window, "soft_cap": soft_cap, "alibi_slopes": case.slopes()}
    out = op("paged_attention")(*case.arguments(**options))
    close(out, case.expected(**options))
    assert (out - op("paged_attention")(*case.arguments(window, soft_cap))).abs().max() > 0.1


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (71, 1)], ids=str)
def test_linear_biases_of_groups(op, device, heads):
    lengths = [(1, 70), (7, 29), (16, 90), (40, 40)]
    case = make_case(lengths, num_heads=heads[0], num_kv_heads=heads[1], head_dim=32, device=device)
    slopes = case.slopes()
    close(op("paged_attention")(*case.arguments(alibi_slopes=slopes)), case.expected(alibi_slopes=slopes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (70, 0.0), (128, 2.0)])
@pytest.mark.parametrize(
    "lengths",
    [MIXED, [(1, 1), (1, 70)], [(1, 1300), (1, 2)], [(150, 150), (90, 213), (16, 140), (3, 700)]],
    ids=["mixed", "decode", "split", "chunks"],
)
def test_sinks(op, device, lengths, window, soft_cap, head_dim, dtype):
    case = make_case(lengths, num_heads=8, num_kv_heads=2, head_dim=head_dim, dtype=dtype, device=device)
    options = {"window": window, "soft_cap": soft_cap, "sinks": case.sinks()}
    out, without = op("paged_attention")(*case.arguments(**options)), op("paged_attention")(*case.arguments())
    close(out, case.expected(**options))
    assert (out - without).abs().max() > 0.1


def test_sinks_beside_linear_biases(op, device):
    case = make_case([(1, 600), (40, 90)], num_heads=9, num_kv_heads=3, device=device)
    options = {"alibi_slopes": case.slopes(), "sinks": case.sinks()}
    close(op("paged_attention")(*case.arguments(**options)), case.expected(**options))


@ON_CUDA
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [0, 128])
def test_sinks_of_cut_and_long_sequences(op, device, window, head_dim, dtype):
    lengths = [(1, 5000), (1, 40), (4, 1300), (16, 290), (257, 511), (128, 1000), (64, 64)]
    case = make_case(lengths, num_heads=64, num_kv_heads=8, head_dim=head_dim, dtype=dtype, device=device)
    options = {"window": window, "sinks": case.sinks()}
    close(op("paged_attention")(*case.arguments(**options)), case.expected(**options))


def test_few_queries_over_a_long_context(op, device):
    case = make_case([(3, 1100), (2, 513)], num_heads=2, num_kv_heads=1, head_dim=16, device=device)
    close(op("paged_attention")(*case.arguments()), case.expected())
    close(op("paged_attention")(*case.arguments(window=600)), case.expected(window=600))


@ON_CUDA
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "lengths", [[(1, 37), (1, 1), (1, 210)], [(1, 900), (16, 300), (0, 5), (5, 64), (3, 3)]], ids=str
)
def test_few_queries_of_every_head_size(op, device, lengths, head_dim, dtype):
    case = make_case(lengths, head_dim=head_dim, dtype=dtype, device=device)
    close(op("paged_attention")(*case.arguments()), case.expected())


@ON_CUDA
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (4, 1), (8, 1), (40, 2), (71, 1)], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 48, 20])
def test_one_to_sixteen_queries(op, device, heads, block_size):
    lengths = [(n, 15 * n + 40) for n in range(1, 17)]
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "block_size": block_size}
    case = make_case(lengths, **shape, dtype=torch.bfloat16, device=device)
    close(op("paged_attention")(*case.arguments()), case.expected())


@ON_CUDA
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1), (40, 2), (71, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_linear_biases_of_one_to_sixteen_queries(op, device, head_dim, heads, dtype):
    lengths = [(n, 15 * n + 40) for n in range(1, 17)] + [(1, 3000), (0, 5)]
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    case = make_case(lengths, **shape, dtype=dtype, device=device)
    slopes = case.slopes()
    close(op("paged_attention")(*case.arguments(alibi_slopes=slopes)), case.expected(alibi_slopes=slopes))
    bounds = {"window": 50, "soft_cap": 2.0, "alibi_slopes": slopes}
    close(op("paged_attention")(*case.arguments(**bounds)), case.expected(**bounds))


@ON_CUDA
@pytest.mark.parametrize(
    "lengths", [[(1, 5000)], [(2, 70), (16, 1100), (1, 3000), (7, 640)], [(33, 700), (4, 800)]], ids=str
)
@pytest.mark.parametrize("window", [0, 1, 16, 50, 1000])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_window_and_soft_cap_of_few_queries(op, device, lengths, window, soft_cap):
    case = make_case(lengths, num_heads=4, num_kv_heads=2, dtype=torch.float16, device=device)
    close(op("paged_attention")(*case.arguments(window, soft_cap)), case.expected(window, soft_cap))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (8, 1), (40, 2), (71, 1)], ids=str)
def test_prefill_beside_decode(op, device, heads, dtype):
    """Decode's kernel takes fewer queries of a sequence the more heads share a KV head; prefill's takes the others."""
    lengths = [(1, 500), (17, 17), (16, 16), (100, 300), (1, 1), (0, 9), (4, 1200), (64, 64), (2, 90), (8, 70), (9, 9)]
    case = make_case(lengths, num_heads=heads[0], num_kv_heads=heads[1], dtype=dtype, device=device)
    close(op("paged_attention")(*case.arguments()), case.expected())


@ON_CUDA
@pytest.mark.parametrize("num_seqs", [130, 400])
@pytest.mark.parametrize("longest", [120, 700])
def test_many_sequences(op, device, num_seqs, longest):
    lengths = [(s % 3, 3 + s * 37 % longest) for s in range(num_seqs)]
    case = make_case(lengths, num_heads=4, num_kv_heads=2, dtype=torch.float16, device=device)
    close(op("paged_attention")(*case.arguments()), case.expected())


@ON_CUDA
@pytest.mark.parametrize("odd_one", [(1, 350), (0, 60), (40, 170)], ids=["none", "empty", "prefill"])
@pytest.mark.parametrize(("num_seqs", "length"), [(80, 350), (300, 200)])
def test_sequences_that_are_alike(op, device, num_seqs, length, odd_one):
    """Blocks take whole sequences, one or some each; where one differs, its own block has less to do."""
    lengths = [(1 + s % 2, length + s % 20) for s in range(num_seqs)]
    lengths[num_seqs // 2] = odd_one
    case = make_case(lengths, num_heads=4, num_kv_heads=2, dtype=torch.float16, device=device)
    close(op("paged_attention")(*case.arguments()), case.expected())


@ON_CUDA
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_seqs", [14, 30])
@pytest.mark.parametrize("longest", [90, 1500])
def test_about_as_many_sequences_as_blocks(op, device, longest, num_seqs, head_dim):
    """Where fewer blocks still have a slot for each, they ask for more keys at a time: on 132 multiprocessors, of heads
    of 128 for both numbers of sequences, of 64 for the larger, of 256 for the smaller."""
    lengths = [(1 + s % 2, longest - s * 53 % (longest // 2)) for s in range(num_seqs)]
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": head_dim}
    case = make_case(lengths, **shape, dtype=torch.bfloat16, device=device)
    close(op("paged_attention")(*case.arguments()), case.expected())


def test_blocks_below_the_window_are_not_read(op, device):
    case = make_case([(1, 700), (3, 333)], dtype=torch.float16, device=device)
    expected = case.expected(window=40)
    for s, (queries, length) in enumerate([(1, 700), (3, 333)]):
        below = (length - queries - 40 + 1) // 16
        for cache in (case.k_cache, case.v_cache):
            cache[case.block_table[s, :below].long()] = float("nan")
    close(op("paged_attention")(*case.arguments(window=40)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
def test_a_graph_of_long_sequences_replays_short_ones(needs_cuda_extension, biased):
    case = make_case([(1, 70), (2, 9), (0, 5), (1, 600)], dtype=torch.float16, device="cuda")
    slopes = case.slopes() if biased else None
    arguments = list(case.arguments(alibi_slopes=slopes))
    arguments[6:8] = 16, 100_000
    starts, lens = case.query_start.clone(), case.seq_lens.clone()
    case.query_start.copy_(torch.tensor([0, 1, 2, 3, 4]))
    case.seq_lens.copy_(torch.tensor([70, 9, 5, 30]))
    torch.ops.raylm.paged_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.raylm.paged_attention(*arguments)
    case.query_start.copy_(starts)
    case.seq_lens.copy_(lens)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        close(out, case.expected(alibi_slopes=slopes))


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [2, 8, 64])
def test_counters_of_cut_sequences_are_left_at_zero(needs_cuda_extension, num_heads):
    """Sequences are cut where they are long; the blocks that join them are others each time, the bits are not."""
    lengths = [(1, 5000), (1, 40), (4, 1300), (1, 290), (2, 17), (1, 2600)]
    case = make_case(lengths, num_heads=num_heads, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    arrivals = torch.zeros(ops.MAX_ARRIVALS, dtype=torch.int32, device="cuda")
    expected = ops.paged_attention(*case.arguments())
    close(expected, case.expected())
    for _ in range(50):
        assert torch.equal(ops.paged_attention(*case.arguments(), arrivals), expected)
    assert not arrivals.any()
    # Too few of them are not used.
    assert torch.equal(ops.paged_attention(*case.arguments(), arrivals[:1]), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_counters_of_steps_with_prefill_are_left_at_zero(needs_cuda_extension, head_dim):
    """Prefill's tiles go to whichever block asks next; the counters serve call after call, whatever the sequences."""
    steps = [[(1, 5000), (400, 900), (5, 70)], [(40, 40)], [(1, 30), (17, 2600), (700, 700), (0, 9)]]
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": head_dim, "dtype": torch.bfloat16, "device": "cuda"}
    cases = [make_case(lengths, **shape) for lengths in steps]
    arrivals = torch.zeros(ops.MAX_ARRIVALS, dtype=torch.int32, device="cuda")
    expected = [ops.paged_attention(*case.arguments()) for case in cases]
    for case, result in zip(cases, expected, strict=True):
        close(result, case.expected())
    for _ in range(20):
        for case, result in zip(cases, expected, strict=True):
            assert torch.equal(ops.paged_attention(*case.arguments(), arrivals), result)
    assert not arrivals.any()
    # Prefill's two are enough for it; with one, both kernels make their own.
    for few in (2, 1):
        assert torch.equal(ops.paged_attention(*cases[0].arguments(), arrivals[:few]), expected[0])


@pytest.mark.gpu
def test_bad_counters_are_named(needs_cuda_extension):
    case = make_case([(3, 5), (1, 7)], dtype=torch.float16, device="cuda")
    with pytest.raises(RuntimeError, match="paged_attention: arrivals is int64, must be int32"):
        ops.paged_attention(*case.arguments(), torch.zeros(9, dtype=torch.int64, device="cuda"))
    with pytest.raises(RuntimeError, match="paged_attention: arrivals is not on the CUDA device"):
        ops.paged_attention(*case.arguments(), torch.zeros(9, dtype=torch.int32))


@pytest.mark.parametrize("biased", [False, True])
def test_chunks_give_what_the_whole_prefill_gives(op, device, biased):
    whole = make_case([(60, 60)], device=device)
    slopes = whole.slopes() if biased else None
    expected = op("paged_attention")(*whole.arguments(alibi_slopes=slopes))
    for start, end in ((0, 7), (7, 48), (48, 60)):
        lens = torch.tensor([end], dtype=torch.int32, device=device)
        starts = torch.tensor([0, end - start], dtype=torch.int32, device=device)
        caches = (whole.k_cache, whole.v_cache, whole.block_table)
        args = (whole.q[start:end], *caches, starts, lens, end - start, end, whole.scale, 0, 0.0, slopes)
        close(op("paged_attention")(*args), expected[start:end])


def test_rows_past_the_last_sequence_are_zero(op, device):
    case = make_case([(2, 9), (1, 4)], device=device)
    expected = case.expected()
    case.q = torch.cat([case.q, torch.full_like(case.q[:2], float("nan"))])
    out = op("paged_attention")(*case.arguments())
    close(out[:3], expected)
    assert not out[3:].any()


def test_large_scores_do_not_overflow(op, device):
    case = make_case([(4, 40), (1, 70)], device=device)
    case.q = case.q * 300
    close(op("paged_attention")(*case.arguments()), case.expected(), scale=10)


def test_result_does_not_depend_on_the_batch(needs_extension):
    case = make_case([(1, 700), (9, 30), (1, 20)])
    together = ops.paged_attention(*case.arguments())
    tables = (case.k_cache, case.v_cache, case.block_table[:1])
    one = torch.tensor([0, 1], dtype=torch.int32)
    alone = ops.paged_attention(case.q[:1], *tables, one, case.seq_lens[:1], 1, 700, case.scale)
    assert torch.equal(together[:1], alone)


def test_opcheck():
    case = make_case([(3, 5), (1, 7)], head_dim=16)
    # NaN in unused slots would only show that the comparison of outputs copes with it; here they are plain zeros.
    case.k_cache.nan_to_num_()
    case.v_cache.nan_to_num_()
    for options in ({}, {"alibi_slopes": case.slopes()}, {"sinks": case.sinks()}):
        torch.library.opcheck(torch.ops.raylm.paged_attention.default, case.arguments(**options))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seq_lens", torch.tensor([5, 500], dtype=torch.int32), r"seq_lens\[1\] is 500, max_seq_len is 7"),
        ("seq_lens", torch.tensor([2, 7], dtype=torch.int32), r"sequence 0 has 3 queries but seq_lens\[0\] is 2"),
        ("seq_lens", torch.tensor([5, 7]), "seq_lens is int64, must be int32"),
        ("query_start", torch.tensor([0, 3, 5], dtype=torch.int32), r"query_start\[2\] is 5, must be between 3 and"),
        ("query_start", torch.tensor([0, 3], dtype=torch.int32), "query_start has size 2 in dimension 0, must have 3"),
        ("block_table", torch.full((2, 2), 99, dtype=torch.int32), r"block_table\[0\]\[0\] is 99, must be at least 0"),
        ("block_table", torch.empty((2, 0), dtype=torch.int32), "needs 1 blocks, block_table has 0"),
        ("q", torch.randn(4, 5, 64), "q has 5 heads, must be a multiple of the 2 heads of k_cache"),
        ("q", torch.randn(4, 6, 32), "k_cache has size 64 in dimension 3, must have 32"),
        ("v_cache", torch.randn(5, 16, 2, 32), "v_cache has size 32 in dimension 3, must have 64"),
    ],
)
def test_bad_arguments_are_named(needs_extension, name, value, message):
    case = make_case([(3, 5), (1, 7)])
    arguments = list(case.arguments())
    arguments[["q", "k_cache", "v_cache", "block_table", "query_start", "seq_lens"].index(name)] = value
    with pytest.raises(RuntimeError, match="paged_attention: .*" + message):
        torch.ops.raylm.paged_attention(*arguments)


@pytest.mark.parametrize(
    ("slopes", "message"),
    [
        (torch.ones(6, dtype=torch.float64), "alibi_slopes is float64, must be float32"),
        (torch.ones(2), r"alibi_slopes has size 2 in dimension 0, must have 6 \(the heads of q\)"),
        (torch.ones(1, 6), "alibi_slopes has 2 dimensions, must have 1"),
        (torch.ones(12)[::2], "alibi_slopes must be contiguous"),
    ],
)
def test_bad_slopes_are_named(needs_extension, slopes, message):
    case = make_case([(3, 5), (1, 7)])
    with pytest.raises(RuntimeError, match="paged_attention: " + message):
        ops.paged_attention(*case.arguments(alibi_slopes=slopes))


def test_bad_sinks_are_named(needs_extension):
    case = make_case([(3, 5), (1, 7)])
    with pytest.raises(RuntimeError, match="paged_attention: sinks is bfloat16, must be float32"):
        ops.paged_attention(*case.arguments(sinks=torch.ones(6, dtype=torch.bfloat16)))
    with pytest.raises(RuntimeError, match=r"paged_attention: sinks has size 2 in dimension 0, must have 6"):
        ops.paged_attention(*case.arguments(sinks=torch.ones(2)))


@pytest.mark.gpu
def test_slopes_of_another_device_are_refused(needs_cuda_extension):
    case = make_case([(3, 5), (1, 7)], device="cuda")
    with pytest.raises(RuntimeError, match="paged_attention: alibi_slopes is not on the CUDA device of the first"):
        ops.paged_attention(*case.arguments(alibi_slopes=case.slopes().cpu()))


def test_negative_window_and_soft_cap_are_refused(needs_extension):
    case = make_case([(1, 5)])
    with pytest.raises(RuntimeError, match="window is -1, must be 0"):
        ops.paged_attention(*case.arguments(window=-1))
    with pytest.raises(RuntimeError, match="soft_cap is -2, must be 0"):
        ops.paged_attention(*case.arguments(soft_cap=-2.0))
