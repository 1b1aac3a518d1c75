"""raylm::mask_logits and raylm::bias_logits: changed logits as the definition has them, all others to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raylm import ops
from raylm.ops import fallback
from tests.ops.op_reference import DTYPES

pytestmark = pytest.mark.operators("bias_logits", "mask_logits")

VOCABS = [1, 31, 32, 33, 8192, 50_001]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SENT = float("-inf")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu().contiguous().view(BITS[one.dtype]), other.cpu().contiguous().view(BITS[one.dtype]))


def some_logits(num_rows: int, vocab: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    logits = (torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 4).to(dtype)
    special = torch.tensor([-0.0, float("inf"), SENT, 0.0], dtype=dtype)
    logits[:, : min(vocab, 4)] = special[:vocab]
    return logits.to(device)


def mask_arguments(vocab: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[list, torch.Tensor]:
    """A call's arguments and which tokens of each row they allow; the surplus bits of the last word are both kinds."""
    allowed = np.random.default_rng(vocab).random((3, -(-vocab // 32) * 32)) < 0.5
    allowed[2] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    rows = torch.tensor([1, -1, 0, 0, 2])
    kept = torch.from_numpy(allowed[:, :vocab])[rows] | (rows < 0)[:, None]
    return [some_logits(5, vocab, dtype, device), torch.from_numpy(words).to(device), rows.to(device)], kept


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_mask(op, device, vocab, dtype):
    given, kept = mask_arguments(vocab, dtype, device)
    expected = torch.where(kept, given[0].cpu(), torch.tensor(SENT, dtype=dtype))
    assert op("mask_logits")(*given) is None
    assert same_bits(given[0], expected)


def test_mask_of_strided_rows(op, device):
    given, kept = mask_arguments(8193, torch.bfloat16, device)
    expected = torch.where(kept, given[0].cpu(), torch.tensor(SENT, dtype=torch.bfloat16))
    for start, room in ((0, 7), (1, 6), (8, 8)):
        wide = torch.full((5, start + 8193 + room), 9.0, dtype=torch.bfloat16, device=device)
        view = wide[:, start : start + 8193]
        view.copy_(given[0])
        words = torch.zeros(3, given[1].shape[1] + 3, dtype=torch.int32, device=device)[:, 1:-2]
        words.copy_(given[1])
        op("mask_logits")(view, words, given[2])
        assert same_bits(view, expected)
        assert (wide[:, :start] == 9).all() and (wide[:, start + 8193 :] == 9).all()


def test_mask_without_rows_or_masks(op, device):
    given, _ = mask_arguments(33, device=device)
    before = given[0].clone()
    op("mask_logits")(given[0][:0], given[1], given[2][:0])
    op("mask_logits")(given[0], given[1], torch.full_like(given[2], -1))
    op("mask_logits")(given[0], given[1][:0], torch.full_like(given[2], -1))
    assert same_bits(given[0], before)


ENTRIES, TABLE_ROWS = 5, 4


def bias_arguments(vocab: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list:
    """Of the rows of the table one has no entries and one has all; what is past a row's count is poison."""
    drawn = torch.Generator().manual_seed(vocab)
    ids = torch.stack([torch.randperm(max(vocab, ENTRIES), generator=drawn)[:ENTRIES] for _ in range(TABLE_ROWS)])
    ids[:, 1] = torch.tensor([-1, vocab, 2**31 - 1, -(2**31)])
    ids[:, 2][ids[:, 0] != 0] = 0
    ids[0, 3] = ids[3, 3] = max(vocab - 1, 5)
    values = torch.randn(TABLE_ROWS, ENTRIES, generator=drawn) * 10
    values[2, 0] = 0.0
    counts = torch.tensor([5, 0, 3, 1], dtype=torch.int32)
    tensors = (some_logits(6, vocab, dtype, device), torch.tensor([0, 2, -1, 1, 2, 3]), ids.int(), values, counts)
    return [x.to(device) for x in tensors]


def biased(logits, table_rows, ids, values, counts) -> torch.Tensor:
    out = logits.cpu().clone()
    most = torch.finfo(out.dtype).max
    for m, x in enumerate(table_rows.tolist()):
        entries = int(counts[x]) if x >= 0 else 0
        for token, value in zip(ids[x, :entries].tolist(), values[x, :entries].cpu(), strict=True):
            if 0 <= token < out.shape[1] and not out[m, token].isinf() and value != 0:
                out[m, token] = (out[m, token].float() + value).clamp(-most, most).to(out.dtype)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_bias(op, device, vocab, dtype):
    given = bias_arguments(vocab, dtype, device)
    expected = biased(*given)
    assert op("bias_logits")(*given) is None
    assert same_bits(given[0], expected)


def test_bias_of_many_entries(op, device):
    """More than a thread block has threads, in rows that are not contiguous."""
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randperm(5000, generator=drawn)[:3000].int()[None].to(device)
    values = torch.randn(1, 3000, generator=drawn).to(device)
    counts = torch.tensor([2999], dtype=torch.int32, device=device)
    wide = torch.zeros(4, 5009, device=device)
    logits = wide[:, 4:5004]
    given = [logits, torch.tensor([0, -1, 0, 0], device=device), ids, values, counts]
    expected = biased(*given)
    op("bias_logits")(*given)
    assert same_bits(logits, expected)
    assert not wide[:, :4].any() and not wide[:, 5004:].any() and not logits[1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_keeps_logits_finite(op, device, dtype):
    most = torch.finfo(dtype).max
    logits = torch.tensor([[most, -most, 1.0, 1.0, SENT, float("inf")]], dtype=dtype, device=device)
    ids = torch.arange(6, dtype=torch.int32, device=device)[None]
    values = torch.tensor([[3e38, -3e38, 3.4e38, float("-inf"), 5.0, -5.0]], device=device)
    zero, counts = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([6], dtype=torch.int32, device=device)
    op("bias_logits")(logits, zero, ids, values, counts)
    third = torch.tensor(min(3.4e38, most)).clamp(max=most).to(dtype).item()
    assert logits[0].tolist() == [most, -most, third, -most, SENT, float("inf")]


def test_bias_without_rows_or_entries(op, device):
    given = bias_arguments(33, device=device)
    before = given[0].clone()
    op("bias_logits")(given[0][:0], given[1][:0], *given[2:])
    op("bias_logits")(given[0], torch.full_like(given[1], -1), *given[2:])
    op("bias_logits")(*given[:2], given[2][:, :0], given[3][:, :0], torch.zeros_like(given[4]))
    op("bias_logits")(given[0], torch.full_like(given[1], -1), *(x[:0] for x in given[2:]))
    assert same_bits(given[0], before)


def test_opcheck():
    torch.library.opcheck(torch.ops.raylm.mask_logits.default, tuple(mask_arguments(70)[0]))
    torch.library.opcheck(torch.ops.raylm.bias_logits.default, tuple(bias_arguments(70)))


@pytest.mark.gpu
def test_replays_in_a_cuda_graph(needs_cuda_extension):
    """Masks, biases and rows are read when the graph runs."""
    masks, _ = mask_arguments(50_001, torch.bfloat16, "cuda")
    biases = bias_arguments(50_001, torch.bfloat16, "cuda")
    logits, given = biases[0], (masks, biases)
    before = logits.clone()
    rows = torch.tensor([2, 1, 0, -1, 1, 0], device="cuda")
    graph = torch.cuda.CUDAGraph()
    ops.bias_logits(*biases)
    ops.mask_logits(logits, masks[1], rows)
    with torch.cuda.graph(graph):
        ops.bias_logits(*biases)
        ops.mask_logits(logits, masks[1], rows)
    for tensor in (rows, given[1][1]):
        tensor.copy_(tensor.roll(1))
    masks[1].bitwise_not_()
    logits.copy_(before)
    graph.replay()
    expected = before.clone()
    fallback.bias_logits(expected, *biases[1:])
    fallback.mask_logits(expected, masks[1], rows)
    assert same_bits(logits, expected)


@pytest.mark.gpu
def test_rows_outside_the_tables_change_nothing(needs_cuda_extension):
    masks, _ = mask_arguments(1000, device="cuda")
    biases = bias_arguments(1000, device="cuda")
    before = masks[0].clone(), biases[0].clone()
    masks[2][:] = torch.tensor([3, -2, 2**60, -(2**60), 10**6])
    biases[1][:] = torch.tensor([TABLE_ROWS, -2, 2**60, -(2**60), 10**6, -7])
    ops.mask_logits(*masks)
    ops.bias_logits(*biases)
    assert same_bits(masks[0], before[0]) and same_bits(biases[0], before[1])
    biases[1][:] = 0
    biases[4][:] = torch.tensor([-5, 0, 0, 0])
    ops.bias_logits(*biases)
    assert same_bits(biases[0], before[1]), "a negative count"


@pytest.mark.gpu
def test_bad_arguments_are_named(needs_cuda_extension):
    masks = dict(zip(("logits", "bitmask", "mask_rows"), mask_arguments(64, device="cuda")[0], strict=True))
    names = ("logits", "table_rows", "ids", "values", "counts")
    biases = dict(zip(names, bias_arguments(64, device="cuda"), strict=True))

    def fails(op: str, given: dict, match: str, **changed: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=f"{op}: {match}"):
            getattr(torch.ops.raylm, op)(*(given | changed).values())

    mask, bias = ("mask_logits", masks), ("bias_logits", biases)
    fails(*mask, "logits has 1 dimensions, must have 2", logits=masks["logits"][0])
    fails(*mask, "logits is float64, must be float32 or", logits=masks["logits"].double())
    fails(*mask, "bitmask is int64, must be int32", bitmask=masks["bitmask"].long())
    fails(*mask, "bitmask has size 1 in dimension 1, must have 2", bitmask=masks["bitmask"][:, :1])
    fails(*mask, "mask_rows has size 2 in dimension 0, must have 5", mask_rows=masks["mask_rows"][:2])
    fails(*mask, "mask_rows is not on the CUDA device", mask_rows=masks["mask_rows"].cpu())
    fails(*bias, "logits has stride 6 in its last dimension", logits=biases["logits"].t().contiguous().t())
    fails(*bias, "table_rows is int32, must be int64", table_rows=biases["table_rows"].int())
    fails(*bias, "ids is int64, must be int32", ids=biases["ids"].long())
    fails(*bias, "values has size 4 in dimension 1, must have 5", values=biases["values"][:, :4])
    fails(*bias, "counts has size 3 in dimension 0, must have 4", counts=biases["counts"][:3])
