"""raylm::store_kv."""

from __future__ import annotations

import pytest
import torch

from raylm import ops
from tests.ops.op_reference import DTYPES

pytestmark = pytest.mark.operators("store_kv")

SLOTS = [5, 0, 13, 22, 7]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 5])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 64), (1, 80), (8, 128)])
def test_writes_its_slots_and_no_other(op, device, dtype, block_size, num_heads, head_dim):
    fused = torch.randn(5, 4 * num_heads * head_dim).to(device, dtype)
    k, v = (x.unflatten(-1, (num_heads, head_dim)) for x in fused.chunk(4, dim=-1)[1:3])
    num_blocks = -(-24 // block_size)
    k_cache = torch.full((num_blocks, block_size, num_heads, head_dim), -1.0, dtype=dtype, device=device)
    v_cache = k_cache.clone()
    assert op("store_kv")(k, v, k_cache, v_cache, torch.tensor(SLOTS, device=device)) is None
    for cache, source in ((k_cache, k), (v_cache, v)):
        expected = torch.full_like(cache, -1.0)
        for token, slot in enumerate(SLOTS):
            expected[slot // block_size, slot % block_size] = source[token]
        assert torch.equal(cache, expected)


def test_caches_may_be_interleaved(op, device):
    """Keys and values of one block next to each other: the caches are strided views of one tensor."""
    both = torch.zeros(4, 2, 4, 1, 16, device=device)
    k, v = torch.randn(5, 1, 16, device=device), torch.randn(5, 1, 16, device=device)
    slots = torch.tensor([1, 4, 6, 9, 15], device=device)
    op("store_kv")(k, v, both[:, 0], both[:, 1], slots)
    assert torch.equal(both[:, 0].flatten(0, 1)[slots], k)
    assert torch.equal(both[:, 1].flatten(0, 1)[slots], v)


def test_opcheck():
    k, v, cache = torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.zeros(4, 4, 2, 16)
    args = (k, v, cache, cache.clone(), torch.tensor([1, 5, 9]))
    torch.library.opcheck(torch.ops.raylm.store_kv.default, args)


def test_bad_arguments_are_named(needs_extension):
    k, cache = torch.randn(3, 2, 16), torch.zeros(4, 4, 2, 16)
    slots = torch.tensor([1, 5, 9])
    with pytest.raises(RuntimeError, match=r"store_kv: slot_mapping\[1\] is 16, must be at least 0 and below 16"):
        ops.store_kv(k, k, cache, cache.clone(), torch.tensor([1, 16, 9]))
    with pytest.raises(RuntimeError, match=r"store_kv: slot_mapping\[0\] is -1, must be at least 0"):
        ops.store_kv(k, k, cache, cache.clone(), torch.tensor([-1, 5, 9]))
    with pytest.raises(RuntimeError, match="store_kv: k_cache is bfloat16, must be float32"):
        ops.store_kv(k, k, cache.bfloat16(), cache, slots)
    with pytest.raises(RuntimeError, match="store_kv: k_cache is float8_e4m3fn, must be float32"):
        torch.ops.raylm.store_kv(k, k, cache.to(ops.CODES), cache.to(ops.CODES), slots)
    with pytest.raises(RuntimeError, match="store_kv: v_cache is float8_e4m3fn, must be float32"):
        ops.store_kv(k, k, cache, cache.to(ops.CODES), slots)
    with pytest.raises(RuntimeError, match="store_kv: v_scale is 0.5, must be 1: the cache is float32"):
        ops.store_kv(k, k, cache, cache.clone(), slots, v_scale=0.5)
    with pytest.raises(RuntimeError, match="store_kv: k_cache has size 2 in dimension 2, must have 1"):
        ops.store_kv(k[:, :1], k[:, :1], cache, cache.clone(), slots)
    with pytest.raises(RuntimeError, match="store_kv: v has size 2 in dimension 0, must have 3"):
        ops.store_kv(k, k[:2], cache, cache.clone(), slots)
