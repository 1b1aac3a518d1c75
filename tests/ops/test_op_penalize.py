"""raylm::penalize: every logit as the definition has it, and those that nothing is said of the same to the bit."""

from __future__ import annotations

import pytest
import torch

from raylm import ops
from raylm.ops import fallback
from tests.ops.op_reference import DTYPES, close, penalized

pytestmark = pytest.mark.operators("penalize")

VOCABS = [1, 31, 8192, 8193, 50_000]
SETTINGS = [
    (1.0, 0.0, 0.0),
    (1.7, 0.0, 0.0),
    (0.4, 0.0, 0.0),
    (1.0, 0.6, 0.0),
    (1.0, 0.0, -1.5),
    (1.0, -0.3, 1.1),
    (1.3, 0.25, 0.5),
]
"""repetition, frequency, presence of each row."""
TABLE_ROWS, WIDTH = 5, 90
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def arguments(vocab: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.Tensor]:
    """A call's arguments: a row of logits for each of SETTINGS, some of one row of the table; tokens repeat, some are
    of no vocabulary, and what is past a row's length is poison of both kinds."""
    drawn = torch.Generator().manual_seed(vocab)
    count = len(SETTINGS)
    logits = (torch.randn(count, vocab, generator=drawn) * 4).to(dtype)
    # Few different ones, on both sides of every 8192.
    pool = torch.tensor([0, vocab - 1, vocab // 2, 8191, 8192, 16_384, 7, 8190]).clamp(max=vocab - 1).int()
    token_ids = pool[torch.randint(len(pool), (TABLE_ROWS, WIDTH), generator=drawn)]
    token_ids[:, ::9] = torch.tensor([-1, vocab, 2**31 - 2, -(2**31), 2**31 - 1], dtype=torch.int32)[:, None]
    rows = torch.tensor([3, 0, 3, 1, 4, 3, 1])
    prompt_lens = torch.tensor([20, 33, 1, 40, 0, 17, 64])
    seq_lens = torch.tensor([60, 80, 2, 90, 70, 55, 64])
    penalties = torch.tensor(SETTINGS).T
    return [x.to(device) for x in (logits, token_ids, rows, prompt_lens, seq_lens, *penalties.contiguous())]


def reference(logits, token_ids, rows, prompt_lens, seq_lens, *penalties) -> torch.Tensor:
    tokens = [token_ids[row, :length].tolist() for row, length in zip(rows.tolist(), seq_lens.tolist(), strict=True)]
    settings = [values.tolist() for values in (prompt_lens, *penalties)]
    return torch.stack([penalized(*one) for one in zip(logits, tokens, *settings, strict=True)])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(BITS[one.dtype]), other.contiguous().view(BITS[other.dtype]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_follows_the_definition(op, device, vocab, dtype):
    given = arguments(vocab, dtype=dtype, device=device)
    before = given[0].clone()
    out = op("penalize")(*given)
    assert out.dtype == dtype and out.shape == before.shape and out.is_contiguous()
    assert same_bits(given[0], before), "it is a copy that is changed"
    expected = reference(*given)
    close(out, expected)
    untouched = (expected == before.double().cpu()).to(device)
    assert same_bits(out[untouched], before[untouched])
    assert untouched[0].all() and not untouched[1:].all(dim=1).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_pay_nothing_keep_every_bit(op, device, dtype):
    given = arguments(8193, dtype=dtype, device=device)
    logits = given[0]
    logits[:, :5] = torch.tensor([-0.0, float("nan"), float("inf"), float("-inf"), 0.0], dtype=dtype, device=device)
    logits[0].view(BITS[dtype])[5] = -3  # A NaN of another kind.
    out = op("penalize")(*given)
    assert same_bits(out[0], logits[0])
    neutral = [torch.full_like(given[5], value) for value in (1, 0, 0)]
    assert same_bits(op("penalize")(*given[:5], *neutral), logits)


def test_only_what_a_row_has_counts(op, device):
    given = arguments(1000, device=device)
    expected = op("penalize")(*given)
    positions = torch.arange(WIDTH, device=device)
    for row in range(TABLE_ROWS):
        longest = max([0, *(n for r, n in zip(given[2].tolist(), given[4].tolist(), strict=True) if r == row)])
        given[1][row, positions >= longest] = 5
    assert same_bits(op("penalize")(*given), expected)


@pytest.mark.parametrize("prompt_len", [0, 11, 10_000])
def test_counts_are_exact(op, device, prompt_len):
    """One token again and again, its neighbours once."""
    tokens = torch.full((1, 10_000), 40, dtype=torch.int32, device=device)
    tokens[0, 10] = 39
    tokens[0, -1] = 41
    logits = torch.zeros(1, 50, device=device)
    lens = [torch.tensor([n], device=device) for n in (0, prompt_len, 10_000)]
    penalties = [torch.tensor([x], device=device) for x in (1.0, 0.5, 2.0)]
    out = op("penalize")(logits, tokens, *lens, *penalties)[0].tolist()
    expected = [0.0] * 50
    for token in (39, 40, 41):
        if count := tokens[0, prompt_len:].tolist().count(token):
            expected[token] = -(0.5 * count + 2.0)
    assert out == expected


@pytest.mark.parametrize("vocab", [8192, 8193, 20_007])
def test_rows_may_be_strided_and_unaligned(op, device, vocab):
    for dtype in (torch.float32, torch.bfloat16):
        given = arguments(vocab, dtype=dtype, device=device)
        expected = op("penalize")(*given)
        for start, room in ((0, 8), (1, 7), (8, 8)):
            wide = torch.full((len(SETTINGS), start + vocab + room), 9.0, dtype=dtype, device=device)
            view = wide[:, start : start + vocab]
            view.copy_(given[0])
            table = torch.full((TABLE_ROWS, WIDTH + start + 2), 3, dtype=torch.int32, device=device)
            table = table[:, start : start + WIDTH]
            table.copy_(given[1])
            assert same_bits(op("penalize")(view, table, *given[2:]), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_would_be_infinite_is_the_largest_number(op, device, dtype):
    logits = torch.tensor([[3.0, -2.0, 5.0, 0.0, float("-inf")]], dtype=dtype, device=device)
    tokens = torch.arange(5, dtype=torch.int32, device=device)[None]
    lens = [torch.tensor([n], device=device) for n in (0, 5, 5)]
    penalties = [torch.tensor([x], device=device) for x in (1e-39, 0.0, 0.0)]
    out = op("penalize")(logits, tokens, *lens, *penalties)[0]
    most = torch.finfo(dtype).max
    assert out[:4].tolist() == pytest.approx([most, 0.0, most, 0.0], abs=1e-30) and out[4] == float("-inf")


def test_no_rows_and_no_tokens(op, device):
    given = arguments(31, device=device)
    assert op("penalize")(given[0][:0], given[1], *(x[:0] for x in given[2:])).shape == (0, 31)
    nothing = torch.zeros_like(given[4])
    assert same_bits(op("penalize")(*given[:3], nothing, nothing, *given[5:]), given[0])


def test_opcheck():
    torch.library.opcheck(torch.ops.raylm.penalize.default, tuple(arguments(64)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_rounds_as_torch_does(needs_cuda_extension, dtype):
    given = arguments(50_000, dtype=dtype, device="cuda")
    assert same_bits(ops.penalize(*given).cpu(), fallback.penalize(*(x.cpu() for x in given)))


@pytest.mark.gpu
def test_replays_in_a_cuda_graph(needs_cuda_extension):
    """Tokens and settings are read when the graph runs."""
    given = arguments(20_000, dtype=torch.bfloat16, device="cuda")
    ops.penalize(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.penalize(*given)
    given[1].copy_(given[1].roll(7, 1))
    given[4].sub_(2)
    given[5].add_(0.1)
    graph.replay()
    assert same_bits(out, ops.penalize(*given))


@pytest.mark.gpu
def test_rows_outside_the_table_have_no_tokens(needs_cuda_extension):
    given = arguments(1000, device="cuda")
    given[2][:] = torch.tensor([-1, TABLE_ROWS, 2**60, -(2**60), TABLE_ROWS, 10**6, -7])
    assert same_bits(ops.penalize(*given), given[0])


@pytest.mark.gpu
def test_bad_arguments_are_named(needs_cuda_extension):
    names = ("logits", "token_ids", "rows", "prompt_lens", "seq_lens", "repetition", "frequency", "presence")
    given = dict(zip(names, arguments(64, device="cuda"), strict=True))

    def fails(match: str, **changed: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=match):
            torch.ops.raylm.penalize(*(given | changed).values())

    fails("penalize: logits has 1 dimensions, must have 2", logits=given["logits"][0])
    fails("penalize: logits is float64, must be float32 or", logits=given["logits"].double())
    fails("penalize: logits has stride 7 in its last dimension", logits=given["logits"].t().contiguous().t())
    fails("penalize: token_ids is int64, must be int32", token_ids=given["token_ids"].long())
    fails("penalize: token_ids is not on the CUDA device of the first argument", token_ids=given["token_ids"].cpu())
    fails("penalize: rows is int32, must be int64", rows=given["rows"].int())
    fails("penalize: seq_lens has size 3 in dimension 0, must have 7", seq_lens=given["seq_lens"][:3])
    fails("penalize: frequency is int64, must be float32", frequency=given["rows"])
    fails("penalize: presence is not on the CUDA device of the first argument", presence=given["presence"].cpu())
