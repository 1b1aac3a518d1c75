"""raylm::token_logprobs and raylm::gather_logprobs: log probabilities, ranks and the likeliest, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from raylm import ops
from raylm.ops import fallback
from tests.ops.op_reference import DTYPES

pytestmark = pytest.mark.operators("token_logprobs", "gather_logprobs")

VOCABS = [1, 31, 1000, 8193, 151_936]
SENT = float("-inf")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Arithmetic is in float32 whatever the logits are."""
    torch.testing.assert_close(actual.double().cpu(), expected, atol=3e-5, rtol=3e-6)


def arguments(num_rows: int, vocab: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list:
    """Logits with ties, in 16 bits many, and masked tokens; the rows' tokens are likely, unlikely and masked ones."""
    drawn = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(num_rows, vocab, generator=drawn) * 4).to(dtype)
    logits[:, vocab // 3 :: 7] = SENT
    logits[:, vocab // 2] = logits[:, 0]
    logits[1::2, -1] = 0.0
    logits[1::2, vocab // 4] = -0.0
    token_ids = torch.randint(vocab, (num_rows,), generator=drawn)
    token_ids[::4] = logits[::4].argmax(-1)
    token_ids[1::4] = vocab // 3
    return [logits.to(device), token_ids.to(device)]


def reference(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int):
    values, ranks, top_ids, top_values = [], [], [], []
    for row, token in zip(logits.double().cpu(), token_ids.tolist(), strict=True):
        total = row.logsumexp(0)
        logprob = torch.where(row == SENT, row, row - total)
        own = row[token] if 0 <= token < len(row) else torch.tensor(SENT)
        values.append(logprob[token] if 0 <= token < len(row) else torch.tensor(SENT).double())
        ranks.append(1 + int((row > own).sum()))
        order = row.sort(descending=True, stable=True).indices[:num_top]
        top_ids.append(order)
        top_values.append(logprob[order])
    return torch.stack(values), torch.tensor(ranks), torch.stack(top_ids), torch.stack(top_values)


def check(given: list, num_top: int, out: tuple) -> None:
    values, ranks, top_ids, top_values = out
    wanted = reference(*given, num_top)
    assert [x.dtype for x in out] == [torch.float32, torch.int64, torch.int64, torch.float32]
    assert top_ids.is_contiguous() and top_values.is_contiguous()
    assert torch.equal(ranks.cpu(), wanted[1])
    assert torch.equal(top_ids.cpu(), wanted[2])
    close(values, wanted[0])
    close(top_values, wanted[3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_follows_the_definition(op, device, vocab, dtype):
    given = arguments(5, vocab, dtype=dtype, device=device)
    for num_top in (0, 1, 5, 20, 64):
        check(given, min(num_top, vocab), op("token_logprobs")(*given, min(num_top, vocab)))


@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_any_number_of_rows(op, device, num_rows):
    given = arguments(max(num_rows, 1), 700, dtype=torch.bfloat16, device=device)
    given = [x[:num_rows] for x in given]
    out = op("token_logprobs")(*given, 3)
    assert [tuple(x.shape) for x in out] == [(num_rows,), (num_rows,), (num_rows, 3), (num_rows, 3)]
    if num_rows:
        check(given, 3, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_come_in_the_order_of_the_vocabulary(op, device, dtype):
    """All equal, two different ones, a single one above: the last that fit are the first of their equals."""
    logits = torch.zeros(4, 20_000, dtype=dtype, device=device)
    logits[1, 1::2] = 1.0
    logits[2, 19_999] = 3.0
    logits[3, ::2] = -0.0
    given = [logits, torch.tensor([5, 0, 7, 19_999], device=device)]
    for num_top in (1, 2, 33, 64):
        check(given, num_top, op("token_logprobs")(*given, num_top))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_rows(op, device, dtype):
    """Fewer allowed tokens than are asked for, one, and none."""
    logits = torch.full((3, 9000), SENT, dtype=dtype, device=device)
    logits[0, [17, 8500, 44]] = torch.tensor([1.0, 2.0, 1.0], dtype=dtype, device=device)
    logits[1, 8999] = -5.0
    given = [logits, torch.tensor([44, 8999, 2], device=device)]
    values, ranks, top_ids, top_values = out = op("token_logprobs")(*given, 5)
    assert ranks.tolist() == [2, 1, 1]
    assert top_ids.tolist() == [[8500, 17, 44, 0, 1], [8999, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert values[1] == 0 and values[2] == SENT and (top_values[2] == SENT).all()
    assert (top_values[0, 3:] == SENT).all() and (top_values[1, 1:] == SENT).all()
    check([x[:2] for x in given], 5, tuple(x[:2] for x in out))


def test_large_logits_do_not_overflow(op, device):
    logits = torch.tensor([[3e38, 3e38, -3e38, 0.0], [-3e38, -3e38, SENT, -3.2e38]], device=device)
    given = [logits, torch.tensor([1, 0], device=device)]
    values, ranks, _, top_values = op("token_logprobs")(*given, 2)
    assert values.tolist() == pytest.approx([-math.log(2)] * 2, abs=1e-6) and ranks.tolist() == [1, 1]
    assert top_values.flatten().tolist() == pytest.approx([-math.log(2)] * 4, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_be_strided_and_unaligned(op, device, dtype):
    given = arguments(3, 8195, dtype=dtype, device=device)
    expected = op("token_logprobs")(*given, 4)
    for start, room in ((0, 5), (1, 7), (8, 13)):
        wide = torch.full((3, start + 8195 + room), 99.0, dtype=dtype, device=device)
        view = wide[:, start : start + 8195]
        view.copy_(given[0])
        out = op("token_logprobs")(view, given[1], 4)
        check(given, 4, out)
        assert torch.equal(out[2], expected[2])


def test_what_is_no_token_is_masked(op, device):
    logits, token_ids = arguments(4, 100, device=device)
    token_ids[:] = torch.tensor([-1, 100, 2**60, -(2**60)])
    check([logits, token_ids], 2, op("token_logprobs")(logits, token_ids, 2))
    assert (op("gather_logprobs")(logits, token_ids[:, None].expand(4, 3).contiguous()) == SENT).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 700])
def test_gather(op, device, count, dtype):
    logits, _ = arguments(5, 8193, dtype=dtype, device=device)
    drawn = torch.Generator().manual_seed(count)
    token_ids = torch.randint(8193, (5, count), generator=drawn)
    rows = logits.double().cpu()
    expected = (rows - rows.logsumexp(-1, keepdim=True)).gather(1, token_ids)
    out = op("gather_logprobs")(logits, token_ids.to(device))
    assert out.dtype == torch.float32 and out.shape == (5, count) and out.is_contiguous()
    close(out, expected)
    assert op("gather_logprobs")(logits[:0], token_ids[:0].to(device)).shape == (0, count)


def test_more_than_the_kernel_gives(device):
    given = arguments(2, 5000, device=device)
    check(given, 200, ops.token_logprobs(*given, 200))


def test_opcheck():
    given = arguments(3, 64)
    torch.library.opcheck(torch.ops.raylm.token_logprobs.default, (*given, 4))
    torch.library.opcheck(torch.ops.raylm.gather_logprobs.default, (given[0], given[1][:, None]))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 3, 40, 256])
def test_many_rows_of_a_large_vocabulary(needs_cuda_extension, num_rows):
    given = arguments(num_rows, 151_936, dtype=torch.bfloat16, device="cuda")
    out = ops.token_logprobs(*given, 5)
    for actual, wanted in zip(out, fallback.token_logprobs(*given, 5), strict=True):
        torch.testing.assert_close(actual, wanted, atol=3e-5, rtol=3e-6)


@pytest.mark.gpu
def test_replays_in_a_cuda_graph(needs_cuda_extension):
    given = arguments(4, 20_000, dtype=torch.bfloat16, device="cuda")
    ops.token_logprobs(*given, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.token_logprobs(*given, 5)
        gathered = ops.gather_logprobs(given[0], out[2])
    for _ in range(2):
        given[0].copy_(given[0].roll(7, 1))
        given[1].add_(1)
        graph.replay()
        check(given, 5, out)
        torch.testing.assert_close(gathered, out[3], atol=1e-6, rtol=0)


@pytest.mark.gpu
def test_bad_arguments_are_named(needs_cuda_extension):
    logits, token_ids = arguments(3, 64, device="cuda")

    def fails(match: str, *given) -> None:
        name = "token_logprobs" if len(given) == 3 else "gather_logprobs"
        with pytest.raises(RuntimeError, match=f"{name}: {match}"):
            getattr(torch.ops.raylm, name)(*given)

    fails("logits has 1 dimensions, must have 2", logits[0], token_ids, 1)
    fails("logits is float64, must be float32 or", logits.double(), token_ids, 1)
    fails("logits has no columns", logits[:, :0], token_ids, 0)
    fails("token_ids is int32, must be int64", logits, token_ids.int(), 1)
    fails("token_ids has size 2 in dimension 0, must have 3", logits, token_ids[:2], 1)
    fails("token_ids is not on the CUDA device of the first argument", logits, token_ids.cpu(), 1)
    fails("num_top is -1, must be from 0 to 64", logits, token_ids, -1)
    fails("num_top is 65, must be from 0 to 64", logits, token_ids, 65)
    fails("num_top is 9, must be at most the 8 columns of logits", logits[:, :8], token_ids, 9)
    fails("token_ids has 1 dimensions, must have 2", logits, token_ids)
