"""raylm::rms_norm, raylm::add_rms_norm and raylm::add_halves_rms_norm."""

from __future__ import annotations

import pytest
import torch

from raylm import ops
from tests.ops.op_reference import DTYPES, close, rms_norm

pytestmark = pytest.mark.operators("rms_norm", "add_rms_norm")


def _random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(576,), (1, 576), (37, 100), (5, 3, 64), (2, 3, 4, 17)])
def test_rms_norm_matches_reference(op, device, dtype, shape):
    x, weight = _random(*shape, dtype=dtype, device=device), _random(shape[-1], dtype=dtype, device=device)
    out = op("rms_norm")(x, weight, 1e-5)
    assert out.dtype == dtype and out.shape == x.shape and out.is_contiguous()
    close(out, rms_norm(x, weight, 1e-5), scale=2)


def test_rms_norm_reads_heads_of_a_fused_projection(op, device):
    qkv = _random(7, 5 * 64, device=device)
    q = qkv[:, 64:256].view(7, 3, 64)
    weight = _random(64, device=device)
    close(op("rms_norm")(q, weight, 1e-6), rms_norm(q, weight, 1e-6))


def test_rms_norm_of_no_rows(op, device):
    assert op("rms_norm")(torch.empty(0, 64, device=device), torch.ones(64, device=device), 1e-6).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [64, 576, 99])
def test_add_rms_norm_matches_reference(op, device, dtype, hidden):
    x = _random(9, 2 * hidden, dtype=dtype, device=device)[:, :hidden]
    residual, weight = _random(9, hidden, dtype=dtype, device=device), _random(hidden, dtype=dtype, device=device)
    expected = (x.float() + residual.float()).to(dtype)
    out = op("add_rms_norm")(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    close(out, rms_norm(expected, weight, 1e-5), scale=2)


@pytest.mark.parametrize(("rows", "hidden"), [(1030, 8192), (515, 1024), (3, 40_000)])
def test_add_rms_norm_of_many_and_of_long_rows(op, device, rows, hidden):
    x, residual = _random(rows, hidden, device=device), _random(rows, hidden, device=device).flip(0)
    weight, expected = _random(hidden, device=device), x + residual
    out = op("add_rms_norm")(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    close(out, rms_norm(expected, weight, 1e-5), scale=2)


@pytest.mark.operators("add_halves_rms_norm")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "hidden"), [(9, 64), (256, 4096), (5, 99), (3, 40_000)])
def test_the_halves_of_a_sum_are_added_before_it_is_rounded(op, device, dtype, rows, hidden):
    halves = _random(2, rows, 2 * hidden, dtype=dtype, device=device)[:, :, :hidden]
    residual, weight = _random(rows, hidden, dtype=dtype, device=device), _random(hidden, dtype=dtype, device=device)
    expected = (halves[0].float() + halves[1].float() + residual.float()).to(dtype)
    out = op("add_halves_rms_norm")(halves, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    close(out, rms_norm(expected, weight, 1e-5), scale=2)


def test_nan_is_not_hidden(op, device):
    x = torch.ones(2, 64, device=device)
    x[1, 3] = float("nan")
    out = op("rms_norm")(x, torch.ones(64, device=device), 1e-6)
    assert out[0].isfinite().all() and out[1].isnan().all()


def test_opcheck():
    x, weight = _random(4, 64), _random(64)
    torch.library.opcheck(torch.ops.raylm.rms_norm.default, (x, weight, 1e-6))
    torch.library.opcheck(torch.ops.raylm.add_rms_norm.default, (x, _random(4, 64), weight, 1e-6))
    torch.library.opcheck(
        torch.ops.raylm.add_halves_rms_norm.default, (_random(2, 4, 64), _random(4, 64), weight, 1e-6)
    )


def test_bad_arguments_are_named(needs_extension):
    x = _random(4, 64)
    with pytest.raises(RuntimeError, match="rms_norm: weight has size 63 in dimension 0, must have 64"):
        ops.rms_norm(x, _random(63), 1e-6)
    with pytest.raises(RuntimeError, match="rms_norm: weight is bfloat16, must be float32"):
        ops.rms_norm(x, _random(64, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(RuntimeError, match="rms_norm: x is float64, must be float32 or bfloat16 or float16"):
        ops.rms_norm(x.double(), _random(64), 1e-6)
    with pytest.raises(RuntimeError, match="rms_norm: x has stride 4 in its last dimension, must be 1"):
        ops.rms_norm(_random(64, 4).t(), _random(64), 1e-6)
    with pytest.raises(RuntimeError, match="add_rms_norm: residual has size 3 in dimension 0, must have 4"):
        ops.add_rms_norm(x, _random(3, 64), _random(64), 1e-6)
    with pytest.raises(RuntimeError, match="add_rms_norm: x has 3 dimensions, must have 2"):
        ops.add_rms_norm(_random(2, 2, 64), x, _random(64), 1e-6)
