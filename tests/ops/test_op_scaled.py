"""Products of rows and weights in 8-bit floats, and what quantises rows on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from raylm.ops.scaled import CODES

pytestmark = pytest.mark.operators(
    "scale_rows", "scaled_linear", "scaled_gated", "scaled_gated_linear", "scaled_rms_norm"
)

Pick = Callable[[str], Callable[..., Any]]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SPACING = 2.0**-3
"""Between neighbouring codes, of the lower one."""


def _rows(rows: int, size: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-3, 3, rows).unsqueeze(1)
    return (torch.randn(rows, size, generator=generator) * spread).to(device, dtype)


def _read(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.double() * scales.double().unsqueeze(-1)


def _nearest(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Each number is read back as the code nearest to it, or one as near up to the last bits of x / scale."""
    wide = x.double()
    assert codes.dtype == CODES and scales.dtype == torch.float32
    torch.testing.assert_close(scales.double(), wide.abs().amax(-1) / 448, rtol=1e-6, atol=1e-37)
    error = (_read(codes, scales) - wide).abs()
    half_step = torch.maximum(wide.abs() * SPACING / 2, scales.double().unsqueeze(-1) * 2.0**-10)
    assert (error <= half_step * 1.0001).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (3, 576), (64, 4096), (2, 100), (5, 14336)])
def test_rows_are_rounded_to_the_nearest_codes(op: Pick, device: str, rows: int, size: int, dtype: torch.dtype) -> None:
    x = _rows(rows, size, device, dtype)
    _nearest(x, *op("scale_rows")(x))


def test_a_row_of_zeros_stays_zeros(op: Pick, device: str) -> None:
    x = torch.zeros(2, 64, device=device, dtype=torch.bfloat16)
    x[1] = 1.0
    codes, scales = op("scale_rows")(x)
    assert torch.equal(_read(codes, scales)[0].cpu(), torch.zeros(64, dtype=torch.float64))
    torch.testing.assert_close(_read(codes, scales)[1].cpu(), torch.ones(64, dtype=torch.float64))


def test_rows_may_be_strided(op: Pick, device: str) -> None:
    x = _rows(6, 96, device, torch.bfloat16)
    codes, scales = op("scale_rows")(x[:, :64])
    expected = op("scale_rows")(x[:, :64].contiguous())
    assert torch.equal(codes.float(), expected[0].float()) and torch.equal(scales, expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1024), (9, 4096), (70, 576), (2000, 512), (3, 100)])
def test_a_norm_and_its_rounding_are_those_of_two_operators(
    op: Pick, device: str, rows: int, size: int, dtype: torch.dtype
) -> None:
    x, weight = _rows(rows, size, device, dtype), torch.rand(size).to(device, dtype)
    for residual in (None, _rows(rows, size, device, dtype, seed=1)):
        if residual is None:
            normed = op("rms_norm")(x, weight, 1e-5)
            codes, scales = op("scaled_rms_norm")(x, None, weight, 1e-5)
        else:
            kept = residual.clone()
            normed = op("add_rms_norm")(x, kept, weight, 1e-5)
            codes, scales = op("scaled_rms_norm")(x, residual, weight, 1e-5)
            assert torch.equal(residual, kept)
        expected = op("scale_rows")(normed)
        assert torch.equal(codes.float(), expected[0].float()) and torch.equal(scales, expected[1])


@pytest.mark.parametrize("gelu_tanh", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 14336), (9, 3072), (70, 1536), (2000, 256), (3, 100)])
def test_a_gated_activation_and_its_rounding_are_those_of_two_operators(
    op: Pick, device: str, rows: int, size: int, dtype: torch.dtype, gelu_tanh: bool
) -> None:
    x = _rows(rows, 2 * size, device, dtype) / 30  # or products would pass float16's range
    codes, scales = op("scaled_gated")(x, gelu_tanh)
    expected = op("scale_rows")(op("gelu_tanh_mul" if gelu_tanh else "silu_mul")(x))
    assert torch.equal(codes.float(), expected[0].float()) and torch.equal(scales, expected[1])


ROWS = [1, 2, 5, 8, 9, 16, 33, 64, 65, 128, 200, 250, 300, 600]
SHAPES = [(64, 64), (4096, 1024), (6144, 4096), (1024, 3072), (48, 16), (560, 272), (4096, 14336), (8208, 1040)]


def _size(n: int, k: int, device: str) -> tuple[int, int]:
    """On a CPU, where torch's own product is looked at, a part of it is enough."""
    return (n, k) if device == "cuda" else (min(n, 512), min(k, 512))


def _weight(n: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    codes = (torch.randn(n, k, generator=generator) * 100).clamp(-448, 448).to(CODES)
    return codes.to(device), (torch.rand(n, generator=generator) / 100 + 1e-4).to(device)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_scaled_linear_is_the_product_of_what_is_stored(
    op: Pick, device: str, n: int, k: int, dtype: torch.dtype, biased: bool
) -> None:
    n, k = _size(n, k, device)
    weight, scales = _weight(n, k, device)
    bias = torch.randn(n).to(device, dtype) if biased else None
    for rows in ROWS if device == "cuda" else ROWS[:6]:
        codes, x_scales = op("scale_rows")(_rows(rows, k, device, torch.float32) / 1000)
        got = op("scaled_linear")(codes, x_scales, weight, scales, bias, dtype)
        x, w = _read(codes, x_scales), _read(weight, scales)
        expected = x @ w.t() + (0 if bias is None else bias.double())
        assert got.dtype == dtype and got.shape == (rows, n)
        # The tensor cores' sums of 8-bit numbers keep 14 bits of the largest sum on the way.
        size = x.abs() @ w.abs().t()
        error = (got.double() - expected).abs()
        # Of more than 64 rows the sum and the bias are of bfloat16 on the way to float16.
        rounding = (expected.abs() + (0 if bias is None else bias.double().abs())) * 2.0**-8
        assert (error <= rounding + size * 2.0**-11 + 1e-7).all(), (rows, n, k)


@pytest.mark.parametrize("gelu_tanh", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "k"), [(128, 64), (6144, 1024), (28672, 4096), (512, 256), (96, 48), (16416, 1040)])
def test_scaled_gated_linear_is_the_activation_of_the_product(
    op: Pick, device: str, n: int, k: int, biased: bool, gelu_tanh: bool
) -> None:
    n, k = _size(n, k, device)
    weight, scales = _weight(n, k, device)
    bias = torch.randn(n).to(device, torch.bfloat16) if biased else None
    for rows in [*ROWS, 192, 512, 1024, 1100] if device == "cuda" else ROWS[:6]:
        codes, x_scales = op("scale_rows")(torch.randn(rows, k).to(device) / k**0.5)
        made = op("scaled_gated_linear")(codes, x_scales, weight, scales, bias, torch.bfloat16, gelu_tanh)
        both = _read(codes, x_scales) @ _read(weight, scales).t() + (0 if bias is None else bias.double())
        gate, up = both.chunk(2, dim=-1)
        act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu_tanh else torch.nn.functional.silu(gate)
        expected = act * up
        assert made[0].shape == (rows, n // 2)
        # A code's half step, gate's and up's bfloat16, and the sums' 14 bits.
        size = (_read(codes, x_scales).abs() @ _read(weight, scales).abs().t()).chunk(2, dim=-1)
        rounding = expected.abs() * 2.0**-3.9 + expected.abs().amax(-1, keepdim=True) * 2.0**-18
        sums = (size[0] * up.abs() + size[1] * gate.abs() + size[0] * size[1] * 2.0**-9) * 2.0**-9
        assert ((_read(*made) - expected).abs() <= rounding + sums + 1e-6).all(), (rows, n, k)


@pytest.mark.parametrize(("n", "k"), [(64, 64), (2064, 1040), (8208, 1040), (4096, 14336)])
def test_no_element_is_left_out(op: Pick, device: str, n: int, k: int) -> None:
    """Sums of small integers are exact, in 14 bits too."""
    n, k = _size(n, k, device)
    weight = torch.randint(-1, 2, (n, k)).to(device, torch.float32)
    ones = torch.ones(n, device=device)
    for rows in ROWS if device == "cuda" else ROWS[:9]:
        x = torch.randint(-1, 2, (rows, k)).to(device, torch.float32)
        codes, x_scales = x.to(CODES), torch.ones(rows, device=device)
        got = op("scaled_linear")(codes, x_scales, weight.to(CODES), ones, None, torch.bfloat16, True)
        assert torch.equal(got, (x.double() @ weight.double().t()).to(torch.bfloat16)), rows


@pytest.mark.parametrize(("n", "first"), [(512, 0), (8192, 16), (6144, 100), (4096, 200)])
def test_a_rows_result_does_not_depend_on_the_rows_beside_it(op: Pick, device: str, n: int, first: int) -> None:
    """Within the rows that one kernel takes: the one for few rows, and those of tiles."""
    weight, scales = _weight(n, 1024, device)
    codes, x_scales = op("scale_rows")(_rows(first + 8, 1024, device, torch.float32))
    together = op("scaled_linear")(codes, x_scales, weight, scales, None, torch.bfloat16)
    for row in range(8):
        part = slice(row, row + first + 1)
        alone = op("scaled_linear")(codes[part], x_scales[part], weight, scales, None, torch.bfloat16)
        if device == "cuda":
            assert torch.equal(together[row], alone[0])
        else:  # torch's products of float32 are not those of raylm
            torch.testing.assert_close(together[row], alone[0], rtol=1e-2, atol=1e-2)


def test_a_row_with_a_nan_or_an_infinity_is_nan_and_the_others_are_not(op: Pick, device: str) -> None:
    x = _rows(4, 64, device, torch.bfloat16)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    weight, scales = _weight(32, 64, device)
    codes, x_scales = op("scale_rows")(x)
    got = op("scaled_linear")(codes, x_scales, weight, scales, None, torch.bfloat16)
    assert got[1].isnan().all() and got[2].isnan().all()
    assert got[0].isfinite().all() and got[3].isfinite().all()
