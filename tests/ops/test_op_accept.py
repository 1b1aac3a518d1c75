"""raylm::accept: drafts verified and counts advanced, one token at a time."""

from __future__ import annotations

import pytest
import torch

from raylm import ops

pytestmark = pytest.mark.operators("accept")

NAMES = ("token_ids", "num_known", "num_computed", "rows", "query_start", "sample_start", "sampled")
WIDTH = 40

CASES = {
    "no drafts": [(1, 1, 0), (1, 1, 0)],
    "a chunk of a prompt": [(9, 0, 0), (1, 1, 0)],
    "only chunks": [(9, 0, 0), (4, 0, 0)],
    "drafts": [(4, 4, 0), (4, 4, 1), (4, 4, 2), (4, 4, 3), (6, 4, 3), (3, 3, 2)],
    "a chunk before, between and after": [(9, 0, 0), (5, 5, 2), (2, 0, 0), (3, 0, 0), (3, 3, 2), (7, 0, 0)],
    "one long": [(40, 40, 37)],
}
"""Of each sequence: tokens computed, tokens sampled, drafts that equal their tokens before the first that does not."""


def arguments(case: list[tuple[int, int, int]], *, device: str = "cpu", padding: int = 0, width: int = 0) -> list:
    """The tables have a row more than the case and the padding row, in no order; `padding` sequences follow, which have
    drafts too."""
    drawn = torch.Generator().manual_seed(len(case))
    num_rows = len(case) + 2
    width = width or WIDTH + max(m for _, m, _ in case)
    known = torch.randint(10, WIDTH, (num_rows,), generator=drawn)
    computed = torch.randint(0, 10, (num_rows,), generator=drawn)
    token_ids = torch.randint(1000, (num_rows, width), generator=drawn, dtype=torch.int32)
    rows = torch.randperm(num_rows - 1, generator=drawn)[: len(case)].tolist() + [num_rows - 1] * padding
    case = case + [(3, 3, 1)] * padding
    sampled = []
    for row, (_, count, same) in zip(rows, case, strict=True):
        tokens = (token_ids[row, known[row] : known[row] + count] + 1).tolist()
        tokens += [5] * (count - len(tokens))  # What a narrow table has no cells for.
        # After the first that differs some are the same again, and so does the one that has no draft.
        tokens = [t - 1 if j < same or j > same + 1 or j == count - 1 else t for j, t in enumerate(tokens)]
        sampled += tokens
    starts = [torch.tensor([0, *(c[i] for c in case)]).cumsum(0).int() for i in (0, 1)]
    tensors = [token_ids, known, computed, torch.tensor(rows), *starts, torch.tensor(sampled, dtype=torch.int64)]
    return [x.to(device) for x in tensors]


def reference(token_ids, num_known, num_computed, rows, query_start, sample_start, sampled):
    """What the three tables hold afterwards, and the counts."""
    token_ids, num_known, num_computed = token_ids.clone(), num_known.clone(), num_computed.clone()
    counts = []
    for s, row in enumerate(rows.tolist()):
        tokens = sampled[int(sample_start[s]) : int(sample_start[s + 1])].tolist()
        if row == len(token_ids) - 1:
            counts.append(min(len(tokens), 1))
            continue
        known = int(num_known[row])
        count = 0
        for j, token in enumerate(tokens):
            cell = known + j
            draft = int(token_ids[row, cell]) if j < len(tokens) - 1 and cell < token_ids.shape[1] else None
            if cell < token_ids.shape[1]:
                token_ids[row, cell] = token
            count += 1
            if draft != token:
                break
        counts.append(count)
        num_known[row] += count
        num_computed[row] += int(query_start[s + 1] - query_start[s]) - (len(tokens) - count)
    return token_ids, num_known, num_computed, torch.tensor(counts, dtype=torch.int64)


def check(kernel, given: list) -> list[int]:
    expected = reference(*(x.cpu() for x in given))
    counts = kernel(*given)
    for actual, wanted in zip((*given[:3], counts), expected, strict=True):
        assert actual.dtype == wanted.dtype and torch.equal(actual.cpu(), wanted)
    return counts.tolist()


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_follows_the_definition(op, device, case, padding):
    given = arguments(case, device=device, padding=padding)
    counts = check(op("accept"), given)
    assert counts == [same + 1 if m else 0 for _, m, same in case] + [1] * padding


def test_many_sequences(op, device):
    drawn = torch.Generator().manual_seed(0)
    case = []
    for _ in range(700):
        m = int(torch.randint(0, 6, (1,), generator=drawn))
        case.append((m or 3, m, int(torch.randint(0, max(m, 1), (1,), generator=drawn))))
    check(op("accept"), arguments(case, device=device, padding=5))


def test_again_and_again(op, device):
    """The counts of one call are where the next one begins."""
    given = arguments(CASES["drafts"], device=device, padding=1, width=WIDTH + 50)
    for _ in range(4):
        check(op("accept"), given)


def test_nothing_past_the_table(op, device):
    """A row whose drafts, or whose next token, have no cells: what is there is kept as far as it goes."""
    given = arguments(CASES["drafts"], device=device, padding=2, width=WIDTH + 4)
    for room in range(4):
        given[1][:-1] = WIDTH + 4 - room
        wide = torch.full((given[0].shape[0], WIDTH + 14), -5, dtype=torch.int32, device=device)
        wide[:, : WIDTH + 4] = given[0]
        counts = check(op("accept"), [wide[:, : WIDTH + 4], *given[1:]])
        assert max(counts) <= room + 1 and (wide[:, WIDTH + 4 :] == -5).all()


def test_no_sequences(op, device):
    given = arguments([(3, 3, 1)], device=device)
    before = [x.clone() for x in given]
    start = torch.zeros(1, dtype=torch.int32, device=device)
    assert op("accept")(*given[:3], given[3][:0], start, start, given[6][:0]).shape == (0,)
    assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))


def test_surplus_samples_belong_to_none(op, device):
    given = arguments(CASES["drafts"], device=device)
    check(op("accept"), [*given[:6], torch.cat([given[6], given[6]])])


def test_opcheck():
    torch.library.opcheck(torch.ops.raylm.accept.default, tuple(arguments(CASES["drafts"])))


@pytest.mark.gpu
def test_replays_in_a_cuda_graph(implementation, op, device):
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    given = arguments(CASES["drafts"], device=device, padding=1, width=WIDTH + 50)
    kernel = op("accept")
    kernel(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counts = kernel(*given)
    given[6].copy_(given[6].roll(1))
    for _ in range(2):
        expected = reference(*(x.cpu() for x in given))
        graph.replay()
        for actual, wanted in zip((*given[:3], counts), expected, strict=True):
            assert torch.equal(actual.cpu(), wanted)


@pytest.mark.gpu
def test_rows_outside_the_table_are_padding(needs_cuda_extension):
    given = arguments(CASES["drafts"], device="cuda")
    given[3][:] = torch.tensor([-1, len(given[0]), 2**60, -(2**60), 10**6, -7])
    before = [x.clone() for x in given]
    assert ops.accept(*given).tolist() == [1] * 6
    assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))


@pytest.mark.gpu
def test_bad_arguments_are_named(needs_cuda_extension):
    given = dict(zip(NAMES, arguments(CASES["drafts"], device="cuda"), strict=True))

    def fails(match: str, **changed) -> None:
        with pytest.raises(RuntimeError, match=match):
            torch.ops.raylm.accept(*(given | changed).values())

    fails("accept: token_ids is int64, must be int32", token_ids=given["token_ids"].long())
    fails("accept: num_known has size 3 in dimension 0, must have 8", num_known=given["num_known"][:3])
    fails("accept: num_computed is not on the CUDA device", num_computed=given["num_computed"].cpu())
    fails("accept: rows is int32, must be int64", rows=given["rows"].int())
    fails("accept: query_start has size 3 in dimension 0, must have 7", query_start=given["query_start"][:3])
    fails("accept: sample_start is int64, must be int32", sample_start=given["sample_start"].long())
    fails("accept: sampled has 2 dimensions, must have 1", sampled=given["sampled"][None])
