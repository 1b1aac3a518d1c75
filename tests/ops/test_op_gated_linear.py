"""raylm::gated_linear."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raylm import ops
from tests.ops.op_reference import DTYPES, close, gated

pytestmark = pytest.mark.operators("gated_linear")

ACTIVATIONS = ["silu", "gelu_tanh"]


def _random(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(sum(shape) + seed), device=device)


def _inputs(rows: int, in_size: int, width: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """x and a weight whose products are about 1."""
    x, weight = _random(rows, in_size, device=device), _random(2 * width, in_size, device=device) / in_size**0.5
    return x.to(dtype), weight.to(dtype)


def _expected(x: Tensor, weight: Tensor, activation: str, bias: Tensor | None = None) -> Tensor:
    product = x.double() @ weight.double().t()
    return gated(product if bias is None else product + bias.double(), activation)


def _apart(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """The product, and then the activation: what gated_linear does where it has no kernel of its own."""
    product = ops.linear(x, weight)
    return ops.silu_mul(product) if activation == "silu" else ops.gelu_tanh_mul(product)


def _error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "in_size", "width", "bias"),
    [(0, 64, 128, False), (1, 576, 384, False), (17, 40, 23, True), (520, 576, 384, False), (520, 64, 128, True)],
)
def test_matches_reference(op, device, activation, dtype, rows, in_size, width, bias):
    x, weight = (tensor.to(device) for tensor in _inputs(rows, in_size, width, dtype))
    b = _random(2 * width).to(device, dtype) if bias else None
    out = op("gated_linear")(x, weight, b, activation == "gelu_tanh")
    assert out.shape == (rows, width) and out.dtype == dtype and out.is_contiguous()
    close(out, _expected(x, weight, activation, b), scale=2)


@pytest.mark.parametrize("start", [8, 3])
def test_strided_and_unaligned(op, device, start):
    wide, weights = (tensor.to(device) for tensor in _inputs(600, 400, 128, torch.bfloat16))
    x, weight = wide[:, start : start + 320], weights[:, start : start + 320]
    close(op("gated_linear")(x, weight, None, False), _expected(x, weight, "silu"))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1024, 1025, 1500, 2053])
@pytest.mark.parametrize(
    ("in_size", "width"), [(64, 128), (576, 384), (4096, 1408), (4096, 1400), (4096, 14336), (72, 256)]
)
def test_many_rows(needs_cuda_extension, activation, dtype, rows, in_size, width):
    """The kernel for many rows rounds once, so it is closer to the reference than two operators are; where it is not
    for a shape, the two operators give the result."""
    x, weight = _inputs(rows, in_size, width, dtype, "cuda")
    out, apart = ops.gated_linear(x, weight, activation), _apart(x, weight, activation)
    expected = _expected(x, weight, activation)
    close(out, expected, scale=2)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    if hopper and in_size % 64 == 0 and width % 128 == 0:
        assert _error(out, expected) < 0.8 * _error(apart, expected)
    else:
        assert torch.equal(out, apart)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(
    ("in_size", "width", "bias"),
    [(64, 128, False), (576, 384, True), (1024, 3072, False), (4096, 1403, True), (4096, 14336, False), (72, 1, True)],
)
def test_few_rows(needs_cuda_extension, activation, dtype, rows, in_size, width, bias):
    """To the bit what product and activation give, in one kernel or not."""
    x, weight = _inputs(rows, in_size, width, dtype, "cuda")
    b = _random(2 * width, device="cuda").to(dtype) if bias else None
    out = ops.gated_linear(x, weight, activation, b)
    product = ops.linear(x, weight, b)
    assert torch.equal(out, ops.silu_mul(product) if activation == "silu" else ops.gelu_tanh_mul(product))
    close(out, _expected(x, weight, activation, b), scale=2)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [9, 20, 32, 33, 64, 65, 140, 192, 256, 257, 300, 500, 570, 768, 1023])
@pytest.mark.parametrize(
    ("in_size", "width"), [(1024, 3072), (4096, 14336), (4104, 7160), (128, 9000), (2048, 5632), (576, 384)]
)
def test_more_rows(needs_cuda_extension, activation, dtype, rows, in_size, width):
    """The kernel rounds once, so it is closer to the reference than two operators are. It takes up to 64 rows if the
    width fills the device, and more if the weight is large and the rows nearly fill tiles of 192 or 256; else two
    operators give the result."""
    x, weight = _inputs(rows, in_size, width, dtype, "cuda")
    out, apart = ops.gated_linear(x, weight, activation), _apart(x, weight, activation)
    expected = _expected(x, weight, activation)
    close(out, expected, scale=2)
    takes = width > 384 if rows <= 64 else rows not in (65, 140, 257) and 4 * width * in_size >= 32 << 20
    if takes and torch.cuda.get_device_capability() == (9, 0):
        assert _error(out, expected) < 0.8 * _error(apart, expected)
    else:
        assert torch.equal(out, apart)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("in_size", "width", "several"), [(4096, 14336, (9, 40, 64, 200, 256, 570, 1023)), (1024, 3072, (9, 20, 40, 64))]
)
def test_a_row_does_not_depend_on_the_rows_beside_it(needs_cuda_extension, in_size, width, several):
    """Among the rows of one kernel: all its tiles sum in the same order."""
    x, weight = _inputs(several[-1], in_size, width, torch.bfloat16, "cuda")
    together = ops.gated_linear(x, weight, "silu")
    for rows in several:
        assert torch.equal(ops.gated_linear(x[-rows:], weight, "silu"), together[-rows:])


@pytest.mark.gpu
def test_strides_of_many_rows(needs_cuda_extension):
    """Rows of x and of the weight may lie apart; the kernel does not depend on it."""
    wide, weights = _inputs(1100, 1024, 256, torch.bfloat16, "cuda")
    x, weight = wide[:, 128:640], weights[:, 8:520]
    out = ops.gated_linear(x, weight, "silu")
    assert torch.equal(out, ops.gated_linear(x.contiguous(), weight.contiguous(), "silu"))
    close(out, _expected(x, weight, "silu"))


@pytest.mark.gpu
def test_the_same_bits_every_time(needs_cuda_extension):
    """And a row's do not depend on the rows around it."""
    x, weight = _inputs(3001, 1536, 2304, torch.bfloat16, "cuda")
    first = ops.gated_linear(x, weight, "silu")
    for _ in range(50):
        assert torch.equal(ops.gated_linear(x, weight, "silu"), first)
    for rows in (1024, 1281, 2048, 2999):
        assert torch.equal(ops.gated_linear(x[-rows:], weight, "silu"), first[-rows:])


@pytest.mark.gpu
def test_a_bad_row_stays_where_it_is(needs_cuda_extension):
    x, weight = _inputs(1200, 320, 256, torch.bfloat16, "cuda")
    x[130], weight[7], weight[256 + 200] = float("nan"), float("inf"), float("nan")
    out = ops.gated_linear(x, weight, "silu")
    fine = torch.ones(1200, 256, dtype=torch.bool, device="cuda")
    fine[130], fine[:, 7], fine[:, 200] = False, False, False
    assert torch.isfinite(out[fine]).all() and torch.isnan(out[130]).all() and torch.isnan(out[:, 200]).all()


@pytest.mark.gpu
def test_extremes_of_many_rows(needs_cuda_extension):
    """Gates from -1e4 to 1e4, ups of 1 and of 1e3."""
    gates = torch.tensor([-1e4, -200.0, -88.0, -1.0, 0.0, 1e-3, 20.0, 1e4], device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(1024, 64, device="cuda", dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = gates.repeat(128), 1
    weight = torch.zeros(256, 64, device="cuda", dtype=torch.bfloat16)
    weight[:128, 0], weight[128:, 1] = 1, torch.tensor([1.0, 1e3], device="cuda").repeat(64).bfloat16()
    for activation in ACTIVATIONS:
        close(ops.gated_linear(x, weight, activation), _expected(x, weight, activation))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [40, 200, 1100])
def test_in_a_captured_graph(needs_cuda_extension, rows):
    static, weight = _inputs(rows, 512, 4096, torch.bfloat16, "cuda")
    ops.gated_linear(static, weight, "silu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.gated_linear(static, weight, "silu")
    for seed in range(5):
        static.copy_(_random(rows, 512, seed=seed, device="cuda"))
        graph.replay()
        assert torch.equal(out, ops.gated_linear(static, weight, "silu"))


def test_opcheck():
    x, weight = _inputs(3, 16, 8, torch.float32)
    torch.library.opcheck(torch.ops.raylm.gated_linear.default, (x, weight, None, False))
    torch.library.opcheck(torch.ops.raylm.gated_linear.default, (x, weight, _random(16), True))


def test_bad_arguments_are_named(needs_extension):
    x, weight = _inputs(3, 16, 8, torch.float32)
    with pytest.raises(RuntimeError, match="linear: weight has size 15 in dimension 1, must have 16"):
        ops.gated_linear(x, _random(16, 15), "silu")
    with pytest.raises(RuntimeError, match="linear: weight is float32, must be float16"):
        ops.gated_linear(x.half(), weight, "silu")
    with pytest.raises(RuntimeError, match="linear: bias has size 7 in dimension 0, must have 16"):
        ops.gated_linear(x, weight, "silu", _random(7))
    with pytest.raises(RuntimeError, match="x has 15 columns, must be an even number"):
        ops.gated_linear(x, _random(15, 16), "silu")


@pytest.mark.gpu
def test_bad_arguments_are_named_on_cuda(needs_cuda_extension):
    x, weight = _inputs(600, 64, 128, torch.bfloat16, "cuda")
    with pytest.raises(RuntimeError, match="gated_linear: weight has size 32 in dimension 1, must have 64"):
        ops.gated_linear(x, weight[:, :32], "silu")
    with pytest.raises(RuntimeError, match="gated_linear: weight is float16, must be bfloat16"):
        ops.gated_linear(x, weight.half(), "silu")
    with pytest.raises(RuntimeError, match="gated_linear: weight has 255 rows, must have an even number"):
        ops.gated_linear(x, weight[:255], "silu")
    with pytest.raises(RuntimeError, match="gated_linear: x has 3 dimensions, must have 2"):
        ops.gated_linear(x.view(2, 300, 64), weight, "silu")
    with pytest.raises(RuntimeError, match="gated_linear: weight is not on the CUDA device of the first argument"):
        ops.gated_linear(x, weight.cpu(), "silu")
