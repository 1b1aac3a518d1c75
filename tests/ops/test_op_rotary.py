"""raylm::rotary."""

from __future__ import annotations

import pytest
import torch

from raylm import ops
from tests.ops.op_reference import DTYPES, close, rotary

pytestmark = pytest.mark.operators("rotary")


def _table(max_position: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.arange(max_position)[:, None] / 100 ** (torch.arange(rotary_dim // 2) / rotary_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _fused(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=torch.Generator().manual_seed(1))
    q, k, v = qkv.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], dim=-1)
    return tuple(x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (80, 20), (128, 64), (256, 256)])
def test_matches_reference_on_strided_views(op, device, dtype, head_dim, rotary_dim):
    q, k, v = (x.to(device, dtype) for x in _fused(6, 3, 1, head_dim))
    fused = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
    before = fused.clone()
    q, k = fused[:, : 3 * head_dim].unflatten(-1, (3, -1)), fused[:, 3 * head_dim : 4 * head_dim].unflatten(-1, (1, -1))
    positions = torch.tensor([0, 1, 31, 7, 7, 15], device=device)
    table = _table(32, rotary_dim).to(device)
    expected_q, expected_k = rotary(q, positions, table), rotary(k, positions, table)
    assert op("rotary")(q, k, positions, table) is None
    close(q, expected_q)
    close(k, expected_k)
    assert torch.equal(q[..., rotary_dim:], before[:, : 3 * head_dim].unflatten(-1, (3, -1))[..., rotary_dim:])
    assert torch.equal(fused[:, 4 * head_dim :], before[:, 4 * head_dim :])


def test_no_tokens(op, device):
    q, k = torch.empty(0, 3, 64, device=device), torch.empty(0, 1, 64, device=device)
    op("rotary")(q, k, torch.empty(0, dtype=torch.int64, device=device), _table(4, 64).to(device))


def test_opcheck():
    q, k = torch.randn(4, 3, 64), torch.randn(4, 1, 64)
    torch.library.opcheck(torch.ops.raylm.rotary.default, (q, k, torch.arange(4), _table(8, 64)))


def test_bad_arguments_are_named(needs_extension):
    q, k, _ = _fused(4, 3, 1, 64)
    positions, table = torch.arange(4), _table(8, 64)
    with pytest.raises(RuntimeError, match=r"rotary: positions\[3\] is 8, must be at least 0 and below 8"):
        ops.rotary(q, k, torch.tensor([0, 1, 2, 8]), table)
    with pytest.raises(RuntimeError, match="rotary: positions is int32, must be int64"):
        ops.rotary(q, k, positions.int(), table)
    with pytest.raises(RuntimeError, match="rotary: cos_sin has 66 columns, must be an even number of at most"):
        ops.rotary(q, k, positions, _table(8, 66))
    with pytest.raises(RuntimeError, match="rotary: k has size 3 in dimension 0, must have 4"):
        ops.rotary(q, k[:3], positions, table)
