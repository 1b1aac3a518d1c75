"""raylm::place: a step's tokens, positions, slots, lengths and block tables, one cell at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raylm import ops

pytestmark = pytest.mark.operators("place")

NAMES = ("num_computed", "token_ids", "block_table", "token_rows", "offsets", "rows", "query_start", "block_size")
ROWS, WIDTH, BLOCK_SIZE, COLUMNS, GROUPS = 6, 50, 16, 4, 3


def arguments(device: str = "cpu", query_lens: tuple[int, ...] = (1, 7, 3, 1, 1)) -> list:
    """Sequences of rows that are not in order, the padding row twice at the end."""
    drawn = torch.Generator().manual_seed(len(query_lens) + sum(query_lens))
    num_computed = torch.tensor([13, 0, 47, 31, 16, 0])
    token_ids = torch.randint(50_000, (ROWS, WIDTH), generator=drawn, dtype=torch.int32)
    block_table = torch.randint(1000, (GROUPS, ROWS, COLUMNS), generator=drawn, dtype=torch.int32)
    rows = torch.tensor([3, 0, 2, 5, 5])[: len(query_lens)]
    lens = torch.tensor(query_lens, dtype=torch.int64)
    query_start = torch.zeros(len(lens) + 1, dtype=torch.int32)
    query_start[1:] = lens.cumsum(0)
    offsets = torch.cat([torch.arange(n) for n in query_lens]) if len(lens) else lens
    tensors = (num_computed, token_ids, block_table, rows.repeat_interleave(lens), offsets, rows, query_start)
    return [*(x.to(device) for x in tensors), BLOCK_SIZE]


def reference(num_computed, token_ids, block_table, token_rows, offsets, rows, query_start, block_size):
    ids, positions, slots = [], [], [[] for _ in block_table]
    for row, offset in zip(token_rows.tolist(), offsets.tolist(), strict=True):
        position = min(max(int(num_computed[row]) + offset, 0), token_ids.shape[1] - 1)
        ids.append(int(token_ids[row, position]))
        positions.append(position)
        column = min(position // block_size, block_table.shape[2] - 1)
        for group, of_group in zip(block_table, slots, strict=True):
            of_group.append(int(group[row, column]) * block_size + position % block_size)
    starts = query_start.tolist()
    lens = [
        min(int(num_computed[row]) + end - start, token_ids.shape[1])
        for row, start, end in zip(rows.tolist(), starts[:-1], starts[1:], strict=True)
    ]
    following = [position + 1 for position in positions]
    tables = [[group[row].tolist() for row in rows.tolist()] for group in block_table]
    num_groups, _, columns = block_table.shape
    return ops.Placed(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(following, dtype=torch.int64),
        torch.tensor(slots, dtype=torch.int64),
        torch.tensor(lens, dtype=torch.int32),
        torch.tensor(tables, dtype=torch.int32).view(num_groups, len(rows), columns),
    )


def check(given: list, placed: tuple) -> None:
    expected = reference(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in given))
    for actual, wanted in zip(placed, expected, strict=True):
        assert actual.dtype == wanted.dtype and actual.is_contiguous()
        assert actual.shape == wanted.shape and torch.equal(actual.cpu(), wanted)


@pytest.mark.parametrize("query_lens", [(1,), (1, 1, 1, 1, 1), (1, 7, 3, 1, 1), (5, 0, 2)], ids=str)
def test_follows_the_definition(op, device, query_lens):
    given = arguments(device, query_lens)
    check(given, op("place")(*given))


def test_many_tokens_and_sequences(op, device):
    given = arguments(device)
    lens = torch.arange(700) % 4
    rows = torch.arange(700) % ROWS
    given[3] = rows.repeat_interleave(lens).to(device)
    given[4] = torch.cat([torch.arange(n) for n in lens.tolist()]).to(device)
    given[5] = rows.to(device)
    given[6] = torch.cat([torch.zeros(1), lens.cumsum(0)]).int().to(device)
    check(given, op("place")(*given))


@st.composite
def steps(draw: st.DrawFn) -> list:
    """Any step of any tables: rows that verify drafts, prompts, padding, and columns that fill no block of a GPU."""
    drawn = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    num_groups, num_rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 70))
    columns = draw(st.sampled_from([1, 2, 5, 255, 256, 257, 1023, 1024, 1025, 2500]))
    block_size = draw(st.sampled_from([1, 3, 16]))
    num_computed = torch.randint(-2, width + 3, (num_rows,), generator=drawn)
    token_ids = torch.randint(50_000, (num_rows, width), generator=drawn, dtype=torch.int32)
    block_table = torch.randint(2**31 - 1, (num_groups, num_rows, columns), generator=drawn, dtype=torch.int32)
    query_lens = draw(st.lists(st.integers(0, 6), max_size=12))
    rows = torch.tensor([draw(st.integers(0, num_rows - 1)) for _ in query_lens], dtype=torch.int64)
    lens = torch.tensor(query_lens, dtype=torch.int64)
    # Tokens behind those of the sequences are nobody's: a graph's padding.
    surplus = draw(st.integers(0, 3))
    token_rows = torch.cat([rows.repeat_interleave(lens), torch.full((surplus,), num_rows - 1)])
    offsets = torch.cat([*(torch.arange(n) for n in query_lens), torch.zeros(surplus, dtype=torch.int64)])
    query_start = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]).int()
    return [num_computed, token_ids, block_table, token_rows, offsets, rows, query_start, block_size]


@given(step=steps())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_step(op, device, step):
    step = [x.to(device) if isinstance(x, torch.Tensor) else x for x in step]
    check(step, op("place")(*step))


def test_block_tables_of_many_rows_and_columns(op, device):
    """More pieces than there are blocks of tokens, from tables cut to the columns that the step needs."""
    given = arguments(device)
    wide = torch.arange(GROUPS * ROWS * 5000, dtype=torch.int32, device=device).view(GROUPS, ROWS, 5000)
    given[2] = wide[:, :, :3001]
    rows = torch.arange(300) % ROWS
    given[3], given[4] = rows.to(device), torch.zeros(300, dtype=torch.int64, device=device)
    given[5], given[6] = rows.to(device), torch.arange(301, dtype=torch.int32, device=device)
    check(given, op("place")(*given))


def test_positions_stay_in_the_tables(op, device):
    """Past the last token, before the first, and where the block table is shorter than the row."""
    given = arguments(device)
    given[0] += torch.tensor([0, 0, 40, 10**12, 0, -3], device=device)
    check(given, op("place")(*given))
    given[2] = given[2][:, :, :2]
    check(given, op("place")(*given))


def test_tables_may_be_strided(op, device):
    given = arguments(device)
    expected = op("place")(*given)
    wide = torch.full((ROWS, WIDTH + 9), -5, dtype=torch.int32, device=device)
    wide[:, 3 : 3 + WIDTH] = given[1]
    blocks = torch.full((GROUPS, ROWS + 2, COLUMNS + 3), -5, dtype=torch.int32, device=device)
    blocks[:, 1:-1, 2:-1] = given[2]
    placed = op("place")(given[0], wide[:, 3 : 3 + WIDTH], blocks[:, 1:-1, 2:-1], *given[3:])
    assert all(torch.equal(one, other) for one, other in zip(placed, expected, strict=True))


def test_no_tokens(op, device):
    ids, positions, following, slots, lens, blocks = op("place")(*arguments(device, ()))
    assert ids.shape == positions.shape == following.shape == lens.shape == (0,)
    assert slots.shape == (GROUPS, 0) and blocks.shape == (GROUPS, 0, COLUMNS)


def test_opcheck():
    torch.library.opcheck(torch.ops.raylm.place.default, tuple(arguments()))


@pytest.mark.gpu
def test_replays_in_a_cuda_graph(implementation, op, device):
    """Counts, tables and rows are read when the graph runs."""
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    given = arguments(device)
    kernel = op("place")
    kernel(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        placed = kernel(*given)
    given[0].add_(2)
    given[1].add_(1)
    given[2].add_(3)
    graph.replay()
    check(given, placed)


@pytest.mark.gpu
def test_rows_outside_the_tables_are_the_last(needs_cuda_extension):
    given = arguments("cuda")
    given[3][:2] = torch.tensor([-1, 2**60])
    given[5][:2] = torch.tensor([ROWS, -(2**60)])
    placed = ops.place(*given)
    given[3][:2] = ROWS - 1
    given[5][:2] = ROWS - 1
    check(given, placed)


@pytest.mark.gpu
def test_bad_arguments_are_named(needs_cuda_extension):
    given = dict(zip(NAMES, arguments("cuda"), strict=True))

    def fails(match: str, **changed) -> None:
        with pytest.raises(RuntimeError, match=match):
            torch.ops.raylm.place(*(given | changed).values())

    fails("place: num_computed is int32, must be int64", num_computed=given["num_computed"].int())
    fails("place: num_computed has size 6 in dimension 0, must have 5", token_ids=given["token_ids"][:5])
    fails("place: token_ids has no columns", token_ids=given["token_ids"][:, :0])
    fails("place: block_table is int64, must be int32", block_table=given["block_table"].long())
    fails("place: block_table has 2 dimensions, must have 3", block_table=given["block_table"][0])
    fails("place: block_table has no columns", block_table=given["block_table"][:, :, :0])
    fails("place: offsets has size 3 in dimension 0, must have 13", offsets=given["offsets"][:3])
    fails("place: rows is not on the CUDA device of the first argument", rows=given["rows"].cpu())
    fails("place: query_start has size 5 in dimension 0, must have 6", query_start=given["query_start"][:5])
    fails("place: block_size is 0, must be at least 1", block_size=0)
