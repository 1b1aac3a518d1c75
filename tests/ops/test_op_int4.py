"""Products with weights of 4-bit integers in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from raylm import ops
from tests.ops.devices import ON_CUDA

pytestmark = pytest.mark.operators("int4_linear")

Pick = Callable[[str], Callable[..., Any]]
HALVES = [torch.bfloat16, torch.float16]
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


def _numbers(n: int, k: int, group: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points as checkpoints have them."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    codes = torch.randint(0, 16, (n, k), generator=generator).to(torch.uint8)
    scales = (torch.rand(n, groups, generator=generator) * 0.02 + 0.001).half().float()
    return codes, scales, torch.randint(0, 17, (n, groups), generator=generator).float()


def _weight(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """The same as float64 numbers."""
    k = codes.shape[1]
    wide = [grid.double().repeat_interleave(group, 1)[:, :k] for grid in (scales, zeros)]
    return (codes.double() - wide[1]) * wide[0]


def _rows(rows: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("group", ops.INT4_GROUPS)
@pytest.mark.parametrize("k", [512, 1024, 896, 32, 5120])
def test_packed_numbers_are_read_back(k: int, group: int) -> None:
    codes, scales, zeros = _numbers(48, k, group)
    packed = ops.pack_int4(codes, scales, zeros, group)
    assert packed.shape == (3, -(-k // 512) * ops.patch_bytes(group)) and packed.dtype == torch.uint8
    assert torch.equal(ops.unpack_int4(packed, group, k).double(), _weight(codes, scales, zeros, group))


def test_scales_keep_sixteen_bits_of_their_mantissa() -> None:
    codes, scales, zeros = _numbers(16, 128, 32)
    wide = scales * (1 + 0.3 * 2.0**-16)  # as float32 scales are
    found = ops.unpack_int4(ops.pack_int4(codes, wide, zeros, 32), 32, 128)
    assert torch.equal(found, ops.unpack_int4(ops.pack_int4(codes, scales, zeros, 32), 32, 128))
    negative = ops.pack_int4(codes, -scales, zeros, 32)
    assert torch.equal(ops.unpack_int4(negative, 32, 128).double(), _weight(codes, -scales, zeros, 32))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("group", ops.INT4_GROUPS)
@pytest.mark.parametrize(("n", "k"), [(16, 576), (48, 1024)])
def test_products_are_those_of_the_numbers(
    op: Pick, device: str, n: int, k: int, group: int, dtype: torch.dtype
) -> None:
    check_products(op, device, n, k, group, dtype, (1, 5, 9))


LARGE = [(128, 512), (256, 1024), (144, 896), (1024, 4096), (384, 2560), (4096, 1536), (16, 3072), (528, 14336)]


@ON_CUDA
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("group", ops.INT4_GROUPS)
@pytest.mark.parametrize(("n", "k"), LARGE)
def test_every_kernel_has_its_share(op: Pick, device: str, n: int, k: int, group: int, dtype: torch.dtype) -> None:
    rows = (1, 5, 8, 13, 16, 31, 32, 40, 64, 130, 300, 1500) if n * k < 1 << 20 else (1, 9, 33, 200)
    check_products(op, device, n, k, group, dtype, rows)


def check_products(
    op: Pick, device: str, n: int, k: int, group: int, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    codes, scales, zeros = _numbers(n, k, group)
    packed, weight = ops.pack_int4(codes, scales, zeros, group).to(device), _weight(codes, scales, zeros, group)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    for rows in sizes:
        x = _rows(rows, k, dtype)
        expected = x.double() @ weight.t()
        # Of more rows, the weight is rounded too.
        most = EPSILON[dtype] * (x.double().abs() @ weight.abs().t() * (1 if rows > 32 else 1e-2) + expected.abs())
        found = op("int4_linear")(x.to(device), packed, group, None)
        assert found.dtype == dtype and found.shape == (rows, n)
        assert ((found.cpu().double() - expected).abs() <= most).all(), rows
        biased = op("int4_linear")(x.to(device), packed, group, bias)
        most += EPSILON[dtype] * bias.cpu().double().abs()
        assert ((biased.cpu().double() - expected - bias.cpu().double()).abs() <= 2 * most).all(), rows


@pytest.mark.parametrize("group", ops.INT4_GROUPS)
def test_small_integers_are_exact(op: Pick, device: str, group: int) -> None:
    """Each number of x meets its own number of the weight."""
    n, k = 128, 1536
    codes, _, zeros = _numbers(n, k, group)
    scales = torch.full_like(zeros, 0.5)
    packed, weight = ops.pack_int4(codes, scales, zeros, group).to(device), _weight(codes, scales, zeros, group)
    for rows in (1, 12, 64):
        x = torch.zeros(rows, k, dtype=torch.bfloat16)
        columns = torch.randint(0, k, (rows, 3), generator=torch.Generator().manual_seed(rows))
        x.scatter_(1, columns, torch.tensor([1.0, 2.0, -4.0], dtype=torch.bfloat16).expand(rows, 3))
        found = op("int4_linear")(x.to(device), packed, group, None)
        assert torch.equal(found.cpu().double(), (x.double() @ weight.t()).bfloat16().double())


def test_a_row_is_the_same_beside_other_rows(op: Pick, device: str) -> None:
    codes, scales, zeros = _numbers(256, 4096, 128)
    packed = ops.pack_int4(codes, scales, zeros, 128).to(device)
    x = _rows(40, 4096, torch.bfloat16).to(device)
    found = op("int4_linear")(x, packed, 128, None)
    x[:7], x[8:] = 1.0, -2.0
    assert torch.equal(op("int4_linear")(x, packed, 128, None)[7], found[7])


def test_rows_may_be_strided_and_none(op: Pick, device: str) -> None:
    codes, scales, zeros = _numbers(128, 512, 64)
    packed = ops.pack_int4(codes, scales, zeros, 64).to(device)
    x = _rows(6, 1024, torch.bfloat16).to(device)
    torch.testing.assert_close(
        op("int4_linear")(x[:, :512], packed, 64, None), op("int4_linear")(x[:, :512].contiguous(), packed, 64, None)
    )
    assert op("int4_linear")(x[:0, :512], packed, 64, None).shape == (0, 128)


@ON_CUDA
def test_a_wrong_weight_is_refused(op: Pick, device: str) -> None:
    codes, scales, zeros = _numbers(128, 512, 64)
    packed = ops.pack_int4(codes, scales, zeros, 64).to(device)
    x = _rows(2, 512, torch.bfloat16).to(device)
    with pytest.raises(RuntimeError, match="group is 48, must be 32, 64 or 128"):
        op("int4_linear")(x, packed, 48, None)
    with pytest.raises(RuntimeError, match="weight has size 4608 in dimension 1, must have 4352"):
        op("int4_linear")(x, packed, 128, None)
    with pytest.raises(RuntimeError, match="x is float32, must be bfloat16 or float16"):
        op("int4_linear")(x.float(), packed, 64, None)
