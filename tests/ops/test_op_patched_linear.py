"""Products with weights of linear layers that are codes in patches."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from raylm import ops
from raylm.ops.patches import NUMBERS, rounds_rows
from tests.ops.devices import ON_CUDA
from tests.ops.in_patches import KINDS, ROUNDED, dtypes, in_patches, rounded
from tests.ops.op_reference import gated

pytestmark = pytest.mark.operators("patched_linear", "patched_gated_linear")

Pick = Callable[[str], Callable[..., Any]]
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
CASES = [(*kind, dtype) for kind in KINDS for dtype in dtypes(kind[0])]


def _rows(rows: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("numbers", "group"), KINDS)
@pytest.mark.parametrize("columns", [128, 256, 72, 200, 896])
def test_patches_hold_their_numbers(numbers: ops.Numbers, group: int, columns: int) -> None:
    patches, expected = in_patches(numbers, group, 48, columns, seed=1)
    assert patches.shape == (3, -(-columns // 128) * ops.patch_bytes(numbers, group)) and patches.dtype == torch.uint8
    assert torch.equal(ops.unpack(patches, numbers, group, columns), expected)


def test_numbers_become_the_nearest_codes() -> None:
    values = _rows(32, 200, torch.float32, seed=3)
    values[3] = 0
    found = ops.unpack(ops.quantise_fp8(values), "fp8", 128, 200)
    assert torch.all((found - values).abs() <= values.abs() / 16 + 1e-3)
    assert torch.equal(found[3], values[3])


def test_numbers_of_nf4_are_those_of_a_normal_distribution() -> None:
    """bitsandbytes takes seven quantiles below 0, eight above, and 0 itself."""
    quantile, most = NormalDist().inv_cdf, 0.9677083
    above, below = ([quantile(most + (0.5 - most) * i / count) for i in range(count)] for count in (8, 7))
    found = sorted([*above, 0.0, *(-number for number in below)])
    assert pytest.approx([number / above[0] for number in found], abs=1e-6) == ops.NF4


def test_scales_keep_sixteen_bits_of_their_mantissa() -> None:
    codes = torch.randint(0, 16, (16, 128), dtype=torch.uint8)
    scales, zeros = torch.rand(16, 4).bfloat16().float(), torch.randint(0, 17, (16, 4))
    wide = scales * (1 + 0.3 * 2.0**-16)  # as float32 scales are
    found = [ops.unpack(ops.pack_integers("int4", codes, each, zeros, 32), "int4", 32, 128) for each in (wide, scales)]
    assert torch.equal(*found)
    negative = ops.unpack(ops.pack_integers("int4", codes, -scales, zeros, 32), "int4", 32, 128)
    assert torch.equal(negative, -found[1])


@pytest.mark.parametrize(("numbers", "group", "dtype"), CASES)
@pytest.mark.parametrize(("n", "k"), [(16, 576), (48, 1024)])
def test_products_are_those_of_the_numbers(
    op: Pick, device: str, n: int, k: int, numbers: ops.Numbers, group: int, dtype: torch.dtype
) -> None:
    check_products(op, device, n, k, numbers, group, dtype, (1, 5, 9))


LARGE = [(128, 512), (256, 1024), (144, 896), (1024, 4096), (384, 2560), (4096, 1536), (16, 3072), (528, 14336)]
WIDEST = [("int4", 128, torch.bfloat16), ("int4", 32, torch.float16), ("int8", 16, torch.bfloat16)]
WIDEST += [
    (numbers, group, torch.bfloat16)
    for numbers, group in (("fp8", 128), ("mxfp4", 32), ("nf4", 64), ("int8_rows", 128), ("fp8_rows", 128))
]


@ON_CUDA
@pytest.mark.parametrize(("numbers", "group", "dtype"), CASES)
@pytest.mark.parametrize(("n", "k"), LARGE)
def test_every_kernel_has_its_share(
    op: Pick, device: str, n: int, k: int, numbers: ops.Numbers, group: int, dtype: torch.dtype
) -> None:
    rows = (1, 5, 8, 13, 16, 31, 32, 40, 64, 130, 300, 1500) if n * k < 1 << 20 else (1, 9, 33, 200)
    check_products(op, device, n, k, numbers, group, dtype, rows)


@ON_CUDA
@pytest.mark.parametrize(("numbers", "group", "dtype"), WIDEST)
def test_the_widest_tiles(op: Pick, device: str, numbers: ops.Numbers, group: int, dtype: torch.dtype) -> None:
    """They are for weights of more rows than all multiprocessors take at a time. The last tile has a sixteenth of its
    rows, and the last stage half a patch of columns."""
    check_products(op, device, 28688, 320, numbers, group, dtype, (24, 48, 100, 200, 257))


def check_products(
    op: Pick, device: str, n: int, k: int, numbers: ops.Numbers, group: int, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    packed, weight = in_patches(numbers, group, n, k, seed=0)
    packed, bias = packed.to(device), _bias(n, dtype).to(device)
    for rows in sizes:
        x = _rows(rows, k, dtype)
        expected, most = expected_products(x, weight.double(), numbers)
        found = op("patched_linear")(x.to(device), packed, None, NUMBERS.index(numbers), group)
        assert found.dtype == dtype and found.shape == (rows, n)
        assert ((found.cpu().double() - expected).abs() <= most).all(), rows
        biased = op("patched_linear")(x.to(device), packed, bias, NUMBERS.index(numbers), group)
        most += EPSILON[dtype] * bias.cpu().double().abs()
        assert ((biased.cpu().double() - expected - bias.cpu().double()).abs() <= 2 * most).all(), rows


def _bias(n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(2)).to(dtype)


def expected_products(x: Tensor, weight: Tensor, numbers: ops.Numbers) -> tuple[Tensor, Tensor]:
    """And how far a result may be from them."""
    rounds_x = rounds_rows(numbers, len(x))
    expected = (rounded(x, numbers) if rounds_x else x.double()) @ weight.t()
    # Of more rows, the weight is rounded too, where x is not, and always that of codes with offsets. Sums of floats of
    # 8 bits have fewer bits than others.
    rounds_weight = numbers.startswith("affine") or (len(x) > 16 and not rounds_x)
    share = 1 if rounds_weight else 0.1 if rounds_x and numbers == "fp8_rows" else 0.01
    return expected, EPSILON[x.dtype] * (x.double().abs() @ weight.abs().t() * share + expected.abs())


@pytest.mark.parametrize(("numbers", "group", "dtype"), CASES)
@pytest.mark.parametrize(("n", "k", "sizes"), [(96, 576, (1, 5, 9, 20)), (32, 1024, (3, 80)), (128, 128, (0,))])
def test_gated_products(
    op: Pick,
    device: str,
    n: int,
    k: int,
    sizes: tuple[int, ...],
    numbers: ops.Numbers,
    group: int,
    dtype: torch.dtype,
) -> None:
    check_gated(op, device, n, k, numbers, group, dtype, sizes)


@ON_CUDA
@pytest.mark.parametrize(("numbers", "group", "dtype"), CASES)
@pytest.mark.parametrize(("n", "k"), [(96, 576), (96, 2560), (128, 4096), (1568, 1024), (28704, 320)])
def test_every_kernel_has_an_activation(
    op: Pick, device: str, n: int, k: int, numbers: ops.Numbers, group: int, dtype: torch.dtype
) -> None:
    """The last tile of each weight but that of 128 rows is not whole. With more than 1,024 rows, numbers that do not
    round x are decoded before the product."""
    sizes = (1, 5, 13, 24, 31, 48, 100, 200, 300, 1100, 1500) if n * k < 1 << 19 else (4, 16, 24, 48, 100, 257)
    check_gated(op, device, n, k, numbers, group, dtype, sizes)


def check_gated(
    op: Pick,
    device: str,
    n: int,
    k: int,
    numbers: ops.Numbers,
    group: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
) -> None:
    """Products are of the size in which an activation bends."""
    packed, weight = in_patches(numbers, group, n, k, seed=0)
    packed, bias, usual = packed.to(device), _bias(n, dtype), math.log2(float(weight.float().std()) * k**0.5)
    for i, rows in enumerate(sizes):
        x, added = _rows(rows, k, dtype) * 2.0 ** round(1 - usual), None if i % 2 else bias
        activation = ("gelu_tanh", "silu")[(i + i // 2) % 2]  # each with a bias and without
        product, most = expected_products(x, weight.double(), numbers)
        if added is not None:
            product, most = product + added.double(), 2 * most + EPSILON[dtype] * added.double().abs()
        expected, (gate, up), (of_gate, of_up) = gated(product, activation), *(t.chunk(2, 1) for t in (product, most))
        act = gated(torch.cat([gate, torch.ones_like(gate)], dim=1), activation)
        bound = 1.2 * of_gate * (up.abs() + of_up) + act.abs() * of_up + EPSILON[dtype] * expected.abs() + 1e-6
        found = op("patched_gated_linear")(
            x.to(device),
            packed,
            None if added is None else added.to(device),
            activation == "gelu_tanh",
            NUMBERS.index(numbers),
            group,
        )
        assert found.dtype == dtype and found.shape == (rows, n // 2)
        assert ((found.cpu().double() - expected).abs() <= 1.1 * bound).all(), rows


@pytest.mark.parametrize("group", ops.GROUPS["int4"])
def test_small_integers_are_exact(op: Pick, device: str, group: int) -> None:
    """Each number of x meets its own number of the weight."""
    n, k = 128, 1536
    codes, zeros = torch.randint(0, 16, (n, k), dtype=torch.uint8), torch.randint(0, 17, (n, k // group))
    packed = ops.pack_integers("int4", codes, torch.full(zeros.shape, 0.5), zeros, group)
    weight = ops.unpack(packed, "int4", group, k).double()
    for rows in (1, 12, 64):
        x = torch.zeros(rows, k, dtype=torch.bfloat16)
        columns = torch.randint(0, k, (rows, 3), generator=torch.Generator().manual_seed(rows))
        x.scatter_(1, columns, torch.tensor([1.0, 2.0, -4.0], dtype=torch.bfloat16).expand(rows, 3))
        found = op("patched_linear")(x.to(device), packed.to(device), None, NUMBERS.index("int4"), group)
        assert torch.equal(found.cpu().double(), (x.double() @ weight.t()).bfloat16().double())


@pytest.mark.parametrize(
    ("numbers", "group", "rows"),
    [("int4", 128, 40), ("fp8", 128, 40), ("int8", 32, 40), ("int8_rows", 128, 200), ("fp8_rows", 128, 200)],
)
def test_a_row_is_the_same_beside_other_rows(
    op: Pick, device: str, numbers: ops.Numbers, group: int, rows: int
) -> None:
    packed = in_patches(numbers, group, 256, 4096, seed=4)[0].to(device)
    x = _rows(rows, 4096, torch.bfloat16).to(device)
    found = op("patched_linear")(x, packed, None, NUMBERS.index(numbers), group)
    x[:7], x[8:] = 1.0, -2.0
    assert torch.equal(op("patched_linear")(x, packed, None, NUMBERS.index(numbers), group)[7], found[7])


@pytest.mark.parametrize("numbers", ROUNDED)
@pytest.mark.parametrize("k", [576, 4096, 20480])
def test_rounded_rows_of_zeros_and_of_no_numbers(op: Pick, device: str, k: int, numbers: str) -> None:
    """Rows of more than 16,384 columns are read twice."""
    packed, weight = in_patches(numbers, 128, 32, k, seed=6)
    x = _rows(80, k, torch.bfloat16)
    x[3], x[5, 7], x[6, 9], x[7] = 0, torch.nan, torch.inf, x[7] * 2.0**-100
    found = op("patched_linear")(x.to(device), packed.to(device), None, NUMBERS.index(numbers), 128).cpu()
    assert torch.equal(found[3], torch.zeros(32)) and found[5:7].isnan().all()
    others = [row for row in range(80) if row not in (5, 6)]
    expected = (rounded(x[others], numbers).nan_to_num() @ weight.double().t()).float()
    atol = 1e-3 if numbers == "int8_rows" else 0.1  # sums of floats of 8 bits have fewer bits than others
    torch.testing.assert_close(found[others].float(), expected, atol=atol, rtol=2.0**-7)
    assert found[7].any()


def test_rows_may_be_strided_and_none(op: Pick, device: str) -> None:
    packed, int4 = in_patches("int4", 64, 128, 512, seed=5)[0].to(device), NUMBERS.index("int4")
    x = _rows(6, 1024, torch.bfloat16).to(device)
    strided = op("patched_linear")(x[:, :512], packed, None, int4, 64)
    torch.testing.assert_close(strided, op("patched_linear")(x[:, :512].contiguous(), packed, None, int4, 64))
    assert op("patched_linear")(x[:0, :512], packed, None, int4, 64).shape == (0, 128)


@ON_CUDA
def test_a_wrong_weight_is_refused(op: Pick, device: str) -> None:
    packed, int4 = in_patches("int4", 64, 128, 512, seed=5)[0].to(device), NUMBERS.index("int4")
    x = _rows(2, 512, torch.bfloat16).to(device)
    with pytest.raises(RuntimeError, match="group is 48, must be a power of two from 32 to 128"):
        op("patched_linear")(x, packed, None, int4, 48)
    with pytest.raises(RuntimeError, match="weight has size 4608 in dimension 1, must have 4352"):
        op("patched_linear")(x, packed, None, int4, 128)
    with pytest.raises(RuntimeError, match="x is float32, must be bfloat16 or float16"):
        op("patched_linear")(x.float(), packed, None, int4, 64)
    with pytest.raises(RuntimeError, match="x is float16, must be bfloat16 with such numbers"):
        op("patched_linear")(x.half(), packed, None, NUMBERS.index("fp8"), 128)
    with pytest.raises(RuntimeError, match=f"numbers is {len(NUMBERS)}, must be from 0 to {len(NUMBERS) - 1}"):
        op("patched_linear")(x, packed, None, len(NUMBERS), 64)
    with pytest.raises(RuntimeError, match="patched_gated_linear: weight has 112 rows, must have a multiple of 32"):
        op("patched_gated_linear")(x, packed[:7], None, False, int4, 64)
