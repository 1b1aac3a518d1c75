"""raylm::linear."""

from __future__ import annotations

import pytest
import torch
from op_reference import DTYPES, close

from raylm import ops


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


def test_strided_rows_and_leading_dimensions(op, device):
    x, weight = _random(6, 200)[:, 40:104].to(device), _random(40, 80)[:, 8:72].to(device)
    close(op("linear")(x, weight, None), x.double() @ weight.double().t(), scale=8)
    x = _random(2, 3, 64).to(device)
    out = op("linear")(x, weight, None)
    assert out.shape == (2, 3, 40)
    close(out, x.double() @ weight.double().t(), scale=8)


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
    with pytest.raises(RuntimeError, match="linear: weight is float16, must be float32"):
        ops.linear(x, weight.half())
    with pytest.raises(RuntimeError, match="linear: bias has size 7 in dimension 0, must have 8"):
        ops.linear(x, weight, _random(7))
