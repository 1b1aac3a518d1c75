"""raylm::silu_mul and raylm::gelu_tanh_mul."""

from __future__ import annotations

import pytest
import torch

from raylm import ops
from tests.ops.op_reference import DTYPES, close, gated

pytestmark = pytest.mark.operators("silu_mul", "gelu_tanh_mul")


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3072), (33, 200), (5, 2), (4, 46), (0, 64)])
def test_matches_reference(op, device, activation, dtype, shape):
    x = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(2))).to(device, dtype)
    out = op(f"{activation}_mul")(x)
    assert out.shape == (shape[0], shape[1] // 2) and out.dtype == dtype and out.is_contiguous()
    close(out, gated(x, activation))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_extremes_and_strides(op, device, activation):
    gate = torch.tensor([-1e4, -200.0, -88.0, -1e-7, 0.0, 1e-7, 20.0, 200.0, 1e4, 3.0], device=device)
    wide = torch.stack([gate, torch.ones_like(gate), torch.zeros_like(gate)], dim=0).flatten().repeat(2, 1)
    x = wide[:, :20]
    close(op(f"{activation}_mul")(x), gated(x, activation))


def test_opcheck():
    torch.library.opcheck(torch.ops.raylm.silu_mul.default, (torch.randn(4, 64),))
    torch.library.opcheck(torch.ops.raylm.gelu_tanh_mul.default, (torch.randn(4, 64),))


def test_bad_arguments_are_named(needs_extension):
    with pytest.raises(RuntimeError, match="silu_mul: x has 63 columns, must be an even number"):
        ops.silu_mul(torch.randn(4, 63))
    with pytest.raises(RuntimeError, match="gelu_tanh_mul: x has 1 dimensions, must have 2"):
        ops.gelu_tanh_mul(torch.randn(64))
