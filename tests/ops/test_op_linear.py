"""raylm::linear."""

from __future__ import annotations

import pytest
import torch

from raylm import ops
from tests.ops.devices import ON_CUDA
from tests.ops.op_reference import DTYPES, close

pytestmark = pytest.mark.operators("linear")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_size", [1, 30, 64])
@pytest.mark.parametrize(("rows", "in_size"), [(0, 64), (1, 576), (5, 100), (16, 64), (150, 33), (300, 16)])
def test_matches_reference(op, device, dtype, bias, out_size, rows, in_size):
    x, weight = _random(rows, in_size).to(device, dtype), _random(out_size, in_size).to(device, dtype)
    b = _random(out_size).to(device, dtype) if bias else None
    expected = x.double() @ weight.double().t() + (b.double() if b is not None else 0)
    close(op("linear")(x, weight, b), expected, scale=in_size**0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "in_size"), [(0, 64), (1, 576), (5, 100), (6, 40), (7, 72), (150, 33)])
def test_weights_of_16_bits_for_float32(rows, in_size, dtype, op, device):
    if device != "cpu":
        pytest.skip("on a CPU alone")
    x, weight, bias = _random(rows, in_size), _random(30, in_size).to(dtype), _random(30)
    exact = x.double() @ weight.double().t() + bias.double()
    out = op("linear")(x, weight, bias)
    assert out.dtype == torch.float32
    close(out, exact, scale=in_size**0.5)
    assert torch.equal(out, op("linear")(x, weight.float(), bias))
    gated = ops.gated_linear(x, weight, "silu", bias)
    close(gated, torch.nn.functional.silu(exact[:, :15]) * exact[:, 15:], scale=in_size**0.5)
    assert torch.equal(gated, ops.gated_linear(x, weight.float(), "silu", bias))


def test_strided_rows_and_leading_dimensions(op, device):
    x, weight = _random(6, 200)[:, 40:104].to(device), _random(40, 80)[:, 8:72].to(device)
    close(op("linear")(x, weight, None), x.double() @ weight.double().t(), scale=8)
    x = _random(2, 3, 64).to(device)
    out = op("linear")(x, weight, None)
    assert out.shape == (2, 3, 40)
    close(out, x.double() @ weight.double().t(), scale=8)


FEW_ROWS = [1, 3, 8, 9, 16, 17, 32, 33, 64, 65]
SIZES = [(13, 8), (40, 72), (1000, 520), (256, 1024), (4096, 1024), (130, 2048), (1024, 3072), (530, 4104), (24, 14336)]


# x of 16 bits goes to torch on a CPU, whatever its instructions.
@pytest.mark.operators("linear", one_isa=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "sizes"), [*zip(FEW_ROWS, [*SIZES, SIZES[0]], strict=True)])
def test_few_rows(op, device, dtype, rows, sizes):
    _few_rows(op, device, dtype, rows, *sizes)


@ON_CUDA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", FEW_ROWS)
@pytest.mark.parametrize(("out_size", "in_size"), SIZES)
def test_few_rows_of_every_size(op, device, dtype, rows, out_size, in_size):
    _few_rows(op, device, dtype, rows, out_size, in_size)


def _few_rows(op, device, dtype, rows, out_size, in_size):
    x, weight = _random(rows, in_size).to(device, dtype), _random(out_size, in_size).to(device, dtype)
    bias = _random(out_size).to(device, dtype)
    out, expected = op("linear")(x, weight, bias), x.double() @ weight.double().t() + bias.double()
    close(out, expected, scale=in_size**0.5)
    # Closer than element by element: what rounding the result to its dtype leaves over.
    assert (out.double() - expected).norm() / expected.norm() < torch.finfo(dtype).eps


@pytest.mark.parametrize("rows", [4, 40])
def test_few_rows_strided_and_unaligned(op, device, rows):
    wide, weight = _random(rows, 400).to(device, torch.bfloat16), _random(96, 136).to(device, torch.bfloat16)
    for start, first in ((0, 0), (8, 8), (3, 0), (0, 5)):
        x, w = wide[:, start : start + 128], weight[:, first : first + 128]
        close(op("linear")(x, w, None), x.double() @ w.double().t(), scale=128**0.5)


@pytest.mark.parametrize("rows", [5, 33])
@pytest.mark.parametrize(
    ("dtype", "in_size"), [(torch.bfloat16, 264), (torch.bfloat16, 288), (torch.float32, 264)], ids=str
)
def test_a_bad_row_stays_where_it_is(op, device, rows, dtype, in_size):
    library = device == "cpu" and dtype == torch.bfloat16
    if library and rows == 33 and in_size == 264 and torch.cpu._is_amx_tile_supported():
        pytest.skip("with AMX, torch's library multiplies the next row by zero where a row ends within 64 bytes")
    x, weight = _random(rows, in_size).to(device, dtype), _random(48, in_size).to(device, dtype)
    x[2], weight[7] = float("nan"), float("inf")
    out = op("linear")(x, weight, None)
    fine = torch.ones(rows, 48, dtype=torch.bool, device=device)
    fine[2], fine[:, 7] = False, False
    assert torch.isfinite(out[fine]).all() and not torch.isfinite(out[~fine]).any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fewest", "most", "out_size", "in_size"),
    [
        (1, 16, 4096, 1024),
        (1, 16, 1024, 3072),
        (1, 16, 333, 2048),
        (1, 16, 70000, 512),
        (1, 8, 4096, 4096),
        (1, 4, 4096, 14336),
        (1, 2, 520, 14336),
        (9, 32, 6144, 4096),
        (9, 32, 28680, 4096),
        (17, 32, 1360, 14336),
        (17, 64, 20008, 1024),
        (17, 32, 1000, 520),
        (33, 64, 1024, 4096),
        (33, 64, 1024, 3072),
        (33, 64, 4096, 14336),
    ],
)
def test_a_row_does_not_depend_on_the_rows_beside_it_on_cuda(needs_cuda_extension, fewest, most, out_size, in_size):
    """Among the rows that one of the extension's own kernels takes; torch's library takes more."""
    x, weight = _random(most, in_size).to("cuda", torch.bfloat16), _random(out_size, in_size).to("cuda", torch.bfloat16)
    together = ops.linear(x, weight)
    close(together, x.double() @ weight.double().t(), scale=in_size**0.5)
    for rows in {fewest, fewest + 1, (fewest + most) // 2, (fewest + most) // 2 + 1, most - 1}:
        assert torch.equal(ops.linear(x[-rows:], weight), together[-rows:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [9, 17, 32, 33, 64, 65, 127, 128, 129, 256, 300, 700])
@pytest.mark.parametrize(
    ("out_size", "in_size"),
    [(6144, 4096), (4096, 4104), (28680, 128), (4096, 14336), (4096, 1024), (65544, 520), (70000, 64), (8200, 2184)],
)
def test_more_rows(needs_cuda_extension, dtype, rows, out_size, in_size):
    """Tiles of all shapes, whole and cut off at their edges; over 64 rows it is the library."""
    x, weight = _random(rows, in_size).to("cuda", dtype), _random(out_size, in_size).to("cuda", dtype)
    bias = _random(out_size).to("cuda", dtype)
    out, expected = ops.linear(x, weight, bias), x.double() @ weight.double().t() + bias.double()
    close(out, expected, scale=in_size**0.5)
    assert (out.double() - expected).norm() / expected.norm() < torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "out_size", "in_size"), [(20, 4096, 1024), (100, 4096, 4096), (200, 65536, 256)])
def test_a_bad_row_stays_where_it_is_on_cuda(needs_cuda_extension, rows, out_size, in_size):
    x, weight = _random(rows, in_size).to("cuda", torch.bfloat16), _random(out_size, in_size).to("cuda", torch.bfloat16)
    x[2], weight[7] = float("nan"), float("inf")
    out = ops.linear(x, weight)
    fine = torch.ones(rows, out_size, dtype=torch.bool, device="cuda")
    fine[2], fine[:, 7] = False, False
    assert torch.isfinite(out[fine]).all() and not torch.isfinite(out[~fine]).any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 30, 120])
def test_products_in_a_captured_graph(needs_cuda_extension, rows):
    """Each product's weights are read while the kernel before still runs, its rows are not."""
    sizes = [1024, 4096, 1024, 3072, 1024, 256, 2048, 8]
    weights = [_random(n, k).to("cuda", torch.bfloat16) / k**0.5 for k, n in zip(sizes, sizes[1:], strict=False)]
    static = torch.zeros(rows, 1024, dtype=torch.bfloat16, device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = ops.linear(x, weight, frozen=True)
        return x

    step(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(static)
    for seed in range(50):
        static.copy_(torch.randn(rows, 1024, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(out, step(static))


def test_a_row_does_not_depend_on_the_rows_beside_it(needs_extension):
    x, weight = _random(200, 576), _random(100, 576)
    together = ops.linear(x, weight)
    for rows in (1, 2, 7, 64):
        assert torch.equal(ops.linear(x[:rows], weight), together[:rows])


def test_opcheck():
    torch.library.opcheck(torch.ops.raylm.linear.default, (_random(3, 16), _random(8, 16), _random(8)))
    torch.library.opcheck(torch.ops.raylm.linear.default, (_random(3, 16), _random(8, 16), None))


def test_bad_arguments_are_named(needs_extension):
    x, weight = _random(3, 16), _random(8, 16)
    with pytest.raises(RuntimeError, match="linear: weight has size 15 in dimension 1, must have 16"):
        ops.linear(x, _random(8, 15))
    with pytest.raises(RuntimeError, match="linear: weight is float32, must be float16"):
        ops.linear(x.half(), weight)
    with pytest.raises(RuntimeError, match="linear: bias has size 7 in dimension 0, must have 8"):
        ops.linear(x, weight, _random(7))
