"""raylm::shared_prefixes, and raylm::paged_attention that reads prefixes once for all who share them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raylm import ops
from tests.ops.devices import ON_CUDA
from tests.ops.op_reference import close
from tests.ops.test_op_codes_cache import K_SCALE, V_SCALE, coded
from tests.ops.test_op_paged_attention import HALVES, Case, make_case

pytestmark = pytest.mark.operators("shared_prefixes")

BLOCK = 64
LEAST = ops.SHARED_DEPTHS[0] // BLOCK


def prefixes_of(
    tables: list[list[int]], lengths: list[int], queries: list[int] | None = None, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Arguments of shared_prefixes, with blocks of BLOCK keys. What a table lacks is no block."""
    width = max(map(len, tables))
    table = torch.tensor([[*cells, *[-7] * (width - len(cells))] for cells in tables], dtype=torch.int32)
    starts = torch.tensor([0, *(queries or [1] * len(tables))], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return table.to(device), starts.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), BLOCK


def check(tables: list[list[int]], lengths: list[int], queries: list[int], found: torch.Tensor) -> None:
    """That the prefixes are prefixes, as long as their members agree, and that there are some where sequences share."""
    members, counts, shared = found.tolist()
    assert sorted(members) == list(range(len(tables)))
    can = [max(length - 1, 0) // BLOCK if count == 1 else 0 for length, count in zip(lengths, queries, strict=True)]
    begins = {s: tuple(tables[s][:LEAST]) for s in range(len(tables)) if can[s] >= LEAST}
    alone = set(range(len(tables)))
    for first, count in enumerate(counts):
        if not count:
            continue
        group = members[first : first + count]
        assert 2 <= count <= ops.MOST_SHARERS and len({shared[s] for s in group}) == 1
        same = 0
        while same < min(can[s] for s in group) and len({tables[s][same] for s in group}) == 1:
            same += 1
        assert shared[group[0]] == same * BLOCK >= ops.SHARED_DEPTHS[0]
        assert alone.issuperset(group)
        alone -= set(group)
    assert all(shared[s] == 0 for s in alone)
    assert any(counts) or len(begins) == len(set(begins.values()))


def test_who_shares_what(op, device):
    a, b = list(range(20, 28)), list(range(40, 48))
    tables = [a, b, [*a[:6], 3, 4], [*b[:4], 5, 6, 7, 8], a, [*a[:3], 9, 9, 9, 9, 9], list(range(8))]
    lengths = [8 * BLOCK, 5 * BLOCK, 8 * BLOCK, 4 * BLOCK + 1, 7 * BLOCK + 1, 8 * BLOCK, 8 * BLOCK]
    found = op("shared_prefixes")(*prefixes_of(tables, lengths, device=device))
    assert found.dtype == torch.int32
    members, counts, shared = found.tolist()
    # By their fourth blocks, 23 and 43, and then those whose fourth nobody else has.
    assert members == [0, 2, 4, 1, 3, 5, 6]
    assert counts == [3, 0, 0, 2, 0, 0, 0]
    assert shared == [6 * BLOCK, 4 * BLOCK, 6 * BLOCK, 4 * BLOCK, 6 * BLOCK, 0, 0]


def test_sequences_are_beside_those_with_whom_they_share_most(op, device):
    """Two documents behind the same instructions, in turns, and one that has these alone."""
    first, second = ([*range(LEAST + 1), *range(start, start + 3 * LEAST)] for start in (1000, 2000))
    tables = [*[first, second] * 3, [*range(LEAST + 1), *range(3000, 3009)]]
    found = op("shared_prefixes")(*prefixes_of(tables, [4 * LEAST * BLOCK + 1] * 7, device=device))
    assert found.tolist() == [[6, 0, 2, 4, 1, 3, 5], [0, 3, 0, 0, 3, 0, 0], [4 * LEAST * BLOCK] * 6 + [0]]


def test_the_last_key_and_sequences_of_several_queries_are_not_shared(op, device):
    tables = [list(range(1, 9))] * 5
    lengths = [LEAST * BLOCK, 6 * BLOCK, LEAST * BLOCK + 1, 7 * BLOCK, 0]
    found = op("shared_prefixes")(*prefixes_of(tables, lengths, [1, 1, 1, 2, 1], device))
    assert found.tolist() == [[1, 2, 0, 3, 4], [2, 0, 0, 0, 0], [0, LEAST * BLOCK, LEAST * BLOCK, 0, 0]]


@pytest.mark.parametrize("sharers", [2, 16, 17, 33, 100])
def test_many_sharers_are_prefixes_of_about_as_many_each(op, device, sharers):
    found = op("shared_prefixes")(*prefixes_of([[*range(9)]] * sharers, [8 * BLOCK + 5] * sharers, device=device))
    counts = [count for count in found[1].tolist() if count]
    assert sum(counts) == sharers and len(counts) == -(-sharers // ops.MOST_SHARERS)
    assert max(counts) - min(counts) <= len(counts) and found[2].tolist() == [8 * BLOCK] * sharers


@ON_CUDA
@pytest.mark.parametrize("num_seqs", [3, 100, 1024])
def test_many_sequences(op, device, num_seqs):
    random = torch.Generator().manual_seed(num_seqs)
    roots = torch.randint(1 << 20, (num_seqs // 7 + 1, 300), generator=random).tolist()
    picks, same = (torch.randint(most, (num_seqs,), generator=random).tolist() for most in (len(roots), 301))
    tables = [
        [*roots[root][:keep], *range(s, s + 300 - keep)] for s, (root, keep) in enumerate(zip(picks, same, strict=True))
    ]
    lengths = torch.randint(300 * BLOCK + 1, (num_seqs,), generator=random).tolist()
    queries = torch.randint(1, 4, (num_seqs,), generator=random).clamp(max=2).sub(1).tolist()
    arguments = prefixes_of(tables, lengths, queries, device)
    found = op("shared_prefixes")(*arguments)
    assert torch.equal(found.cpu(), ops.shared_prefixes(*(x.cpu() for x in arguments[:3]), BLOCK))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tables(op, device, data):
    num_seqs = data.draw(st.integers(1, 40), label="sequences")
    columns = 9
    tables = []
    for s in range(num_seqs):
        root, keep = data.draw(st.integers(0, 2)), data.draw(st.integers(0, columns))
        # As a cache does: a block of a prefix is nobody else's, nor at another place.
        tables.append([1000 * root + at if at < keep else 10_000 + 100 * s + at for at in range(columns)])
    lengths = [data.draw(st.integers(0, columns * BLOCK)) for _ in range(num_seqs)]
    queries = [min(data.draw(st.sampled_from([1, 1, 1, 0, 2])), length) for length in lengths]
    found = op("shared_prefixes")(*prefixes_of(tables, lengths, queries, device))
    check(tables, lengths, queries, found)


def test_no_sequences(op, device):
    empty = torch.empty(0, 4, dtype=torch.int32, device=device)
    starts, lens = torch.zeros(1, dtype=torch.int32, device=device), empty[:, 0]
    assert op("shared_prefixes")(empty, starts, lens, 16).shape == (3, 0)


def test_opcheck():
    torch.library.opcheck(torch.ops.raylm.shared_prefixes.default, prefixes_of([[*range(9)]] * 3, [500] * 3))


@pytest.mark.gpu
def test_bad_arguments_are_named(needs_cuda_extension):
    table, starts, lens, _ = prefixes_of([[*range(9)]] * 3, [500] * 3, device="cuda")
    with pytest.raises(RuntimeError, match="shared_prefixes: seq_lens has size 2 in dimension 0, must have 3"):
        ops.shared_prefixes(table, starts, lens[:2], BLOCK)
    with pytest.raises(RuntimeError, match="shared_prefixes: block_size is 0, must be at least 1"):
        ops.shared_prefixes(table, starts, lens, 0)
    with pytest.raises(RuntimeError, match="shared_prefixes: block_table has 1025 rows, must have at most 1024"):
        many = torch.zeros(1025, 9, dtype=torch.int32, device="cuda")
        ops.shared_prefixes(many, torch.zeros(1026, dtype=torch.int32, device="cuda"), many[:, 0].contiguous(), BLOCK)
    case = make_case([(1, 300)] * 2, dtype=torch.float16, device="cuda")
    for wrong, message in ((torch.zeros(2, 2), "prefixes is float32"), (lens.view(1, 3), "prefixes has size 1")):
        with pytest.raises(RuntimeError, match="paged_attention: " + message):
            ops.paged_attention(*case.arguments(), prefixes=wrong.to("cuda"))


def shared(case: Case, groups: list[tuple[list[int], int]]) -> Case:
    """The case with sequences that begin alike: those of a group with so many keys of its first one, whole blocks."""
    keys, values, table = [*case.keys], [*case.values], case.block_table.clone()
    block_size = case.k_cache.shape[1]
    for members, count in groups:
        first = members[0]
        for s in members[1:]:
            table[s, : count // block_size] = table[first, : count // block_size]
            keys[s] = torch.cat([keys[first][:count], keys[s][count:]])
            values[s] = torch.cat([values[first][:count], values[s][count:]])
    return replace(case, keys=keys, values=values, block_table=table)


def attend(op, case: Case, scales: tuple[float, float] = (1.0, 1.0), *, once: bool = True, **options) -> torch.Tensor:
    """`once`: of a prefix's members but the first the kernel must not read it, and finds NaN where it does."""
    block_size = case.k_cache.shape[1]
    prefixes = ops.shared_prefixes(case.block_table, case.query_start, case.seq_lens, block_size)
    members, counts, lengths = prefixes.tolist()
    assert any(counts)
    table = case.block_table.clone()
    nobodys = int(case.k_cache.float().isnan().flatten(1).all(1).nonzero()[0])
    for s in set(members) - {s for s, count in zip(members, counts, strict=True) if count} if once else ():
        table[s, : lengths[s] // block_size] = nobodys
    sinks = options.pop("sinks", None)
    arguments = replace(case, block_table=table).arguments(**options)
    k_scale, v_scale = scales
    last = {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "prefixes": prefixes}
    return op("paged_attention")(*arguments, **last)


INTERLEAVED = ([(1, 700 + 30 * s) for s in range(12)], [([0, 2, 4, 6, 8, 10], 512), ([1, 3, 11], 272)])
"""Lengths, and who shares; others are by themselves."""
MANY = ([(1, 1200 + s % 40) for s in range(50)], [([*range(40)], 1184), ([45, 41, 43], 304)])
MIXED = (
    [(1, 900), (40, 700), (1, 620), (1, 1), (3, 800), (0, 600), (1, 615), (16, 620)],
    [([0, 1, 2, 4, 5, 6, 7], 576)],
)
"""Prefill and short verification beside those that share; they share too, and read for themselves."""


@ON_CUDA
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("what", [INTERLEAVED, MANY, MIXED], ids=["interleaved", "many", "mixed"])
def test_attention_of_every_head_size(op, device, what, head_dim, dtype):
    lengths, groups = what
    case = shared(make_case(lengths, num_heads=8, head_dim=head_dim, dtype=dtype, device=device), groups)
    close(attend(op, case, once=head_dim <= ops.PREFIX_HEAD_DIM), case.expected())


@ON_CUDA
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (4, 1), (8, 1), (40, 2), (71, 1), (32, 32)], ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 48, 20])
def test_attention_of_groups_and_block_sizes(op, device, heads, block_size):
    lengths = [(1, 1000 + 20 * s) for s in range(18)]
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "block_size": block_size}
    case = make_case(lengths, **shape, dtype=torch.bfloat16, device=device)
    case = shared(case, [([*range(1, 18)], 960)])
    close(attend(op, case, once=block_size % 16 == 0), case.expected())


@ON_CUDA
@pytest.mark.parametrize("heads", [(2, 2), (32, 4), (16, 2), (71, 1)], ids=str)
@pytest.mark.parametrize(
    "prefixes", [[(2, 800)], [(17, 8000)], [(2, 1600), (16, 4000)], [(9, 528), (3, 6400), (5, 272)]], ids=str
)
def test_attention_of_prefixes_of_many_rows(op, device, prefixes, heads):
    """More rows than a block takes: each chunk of them is cut in its own way. Prefixes are (members, keys)."""
    lengths = [(1, keys + 1 + 5 * s) for count, keys in prefixes for s in range(count)]
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 128}
    case = make_case(lengths, **sizes, dtype=torch.bfloat16, device=device)
    everybody = iter(range(len(lengths)))
    case = shared(case, [([next(everybody) for _ in range(count)], keys) for count, keys in prefixes])
    close(attend(op, case), case.expected())


@ON_CUDA
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("what", [INTERLEAVED, MANY], ids=["interleaved", "many"])
def test_attention_with_sinks_caps_and_windows(op, device, what, with_sinks, soft_cap, window):
    lengths, groups = what
    case = shared(make_case(lengths, num_heads=8, head_dim=128, dtype=torch.bfloat16, device=device), groups)
    options = {"window": window, "soft_cap": soft_cap, "sinks": case.sinks() if with_sinks else None}
    close(attend(op, case, once=not window, **options), case.expected(**options))


@ON_CUDA
def test_attention_with_biases(op, device):
    lengths, groups = INTERLEAVED
    case = shared(make_case(lengths, num_heads=8, dtype=torch.bfloat16, device=device), groups)
    options = {"alibi_slopes": case.slopes()}
    close(attend(op, case, once=False, **options), case.expected(**options))


@ON_CUDA
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_over_codes(op, device, head_dim, dtype):
    lengths, groups = MANY
    plain = make_case(lengths, num_heads=8, head_dim=head_dim, dtype=dtype, device=device)
    case = shared(coded(plain), groups)
    out = attend(op, case, (K_SCALE, V_SCALE), once=head_dim <= ops.PREFIX_HEAD_DIM, sinks=case.sinks())
    close(out, case.expected(sinks=case.sinks()), scale=2)


@ON_CUDA
@pytest.mark.parametrize(("sharers", "keys"), [(2, 20_000), (16, 6000), (130, 320), (300, 272)])
def test_attention_to_long_and_to_short_prefixes(op, device, sharers, keys):
    lengths = [(1, keys + 1 + s * 7 % 300) for s in range(sharers)]
    case = make_case(lengths, num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.float16, device=device)
    case = shared(case, [([*range(sharers)], keys)])
    close(attend(op, case), case.expected())


@ON_CUDA
def test_rows_past_the_last_sequence_are_zero(op, device):
    lengths, groups = INTERLEAVED
    case = shared(make_case(lengths, num_heads=8, dtype=torch.bfloat16, device=device), groups)
    expected = case.expected()
    case.q = torch.cat([case.q, torch.full_like(case.q[:2], float("nan"))])
    out = attend(op, case)
    close(out[:-2], expected)
    assert not out[-2:].any()


def test_elsewhere_prefixes_change_nothing(op, device):
    case = shared(make_case([(1, 300), (1, 280)], device=device), [([0, 1], 272)])
    assert torch.equal(attend(op, case, once=False), op("paged_attention")(*case.arguments()))


@pytest.mark.gpu
def test_a_graph_follows_who_shares(needs_cuda_extension):
    """Captured where nobody shares; the tables then change under it. The counters are left as they were found."""
    lengths = [(1, 900 + 10 * s) for s in range(20)]
    alone = make_case(lengths, num_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")
    table, arrivals = alone.block_table.clone(), torch.zeros(ops.MAX_ARRIVALS, dtype=torch.int32, device="cuda")
    arguments = replace(alone, block_table=table).arguments()

    def attend() -> torch.Tensor:
        prefixes = ops.shared_prefixes(table, alone.query_start, alone.seq_lens, 16)
        return ops.paged_attention(*arguments, arrivals, prefixes=prefixes)

    close(attend(), alone.expected())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for groups in ([([*range(20)], 880)], [([0, 5, 7], 512), ([19, 1], 256)], []):
        case = shared(alone, groups)
        table.copy_(case.block_table)
        found = []
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            found.append(out.clone())
        close(out, case.expected())
        assert all(torch.equal(one, out) for one in found)
    assert not arrivals.any()
