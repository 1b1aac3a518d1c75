"""Copies of whole blocks, by what is in them."""

from __future__ import annotations

import random

import pytest
import torch

from raylm.core.step import Copies
from raylm.models.cache_spec import BlockPart, CacheSpec
from raylm.ops import CODES
from raylm.worker import kv_store
from raylm.worker.cache_groups import CacheGroups
from raylm.worker.kv_store import KVStore


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return request.param


def attention(num_kv_heads: int, head_dim: int) -> CacheSpec:
    return CacheSpec.of_attention(
        window=0, block_size=4, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16
    )


def make_store(*, num_blocks: int, num_host_blocks: int, device: str = "cpu") -> KVStore:
    """Every element of block b, key or value of layer i, is 8 * b + 2 * i (+ 1 for values)."""
    groups = CacheGroups.choose([attention(2, 8)] * 3, block_size=4, max_len=64)
    store = KVStore(groups, num_blocks=num_blocks, num_host_blocks=num_host_blocks, device=torch.device(device))
    assert len(store.layers) == 3 and not store.drafts
    for layer, pair in enumerate(store.layers):
        for part, cache in enumerate(pair):
            assert cache.shape == (num_blocks, 4, 2, 8)
            for block in range(num_blocks):
                cache[block] = contents(block, layer, part)
    return store


def contents(block: int, layer: int, part: int) -> int:
    return 8 * block + 2 * layer + part


def blocks_in(store: KVStore) -> list[int]:
    """Which block's contents each block has."""
    found = []
    for place in range(store.layers[0][0].shape[0]):
        values = [cache[place].unique().tolist() for pair in store.layers for cache in pair]
        block = int(values[0][0]) // 8
        assert values == [[contents(block, layer, part)] for layer in range(3) for part in range(2)]
        found.append(block)
    return found


def test_bytes_of_a_block_count_all_its_tensors() -> None:
    assert make_store(num_blocks=5, num_host_blocks=0).block_bytes == 2 * 3 * 4 * 2 * 8 * 2


def test_out_before_forked_before_in(device: str) -> None:
    store = make_store(num_blocks=4, num_host_blocks=1, device=device)
    store.copy(Copies(swap_out=[(1, 0)], forked=[(2, 1)], swap_in=[(0, 2)]))
    assert blocks_in(store) == [0, 2, 1, 3]


def test_pairs_of_one_list_are_copied_at_once(device: str) -> None:
    store = make_store(num_blocks=5, num_host_blocks=0, device=device)
    store.copy(Copies([], [(1, 2), (2, 3), (3, 1)], []))
    assert blocks_in(store) == [0, 3, 1, 2, 4]


def test_any_blocks_come_back_from_any_host_blocks(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    generator = random.Random(1)
    monkeypatch.setattr(kv_store, "_CHUNK_BYTES", 3 * 768)
    for _ in range(20):
        store = make_store(num_blocks=12, num_host_blocks=9, device=device)
        count = generator.randint(1, 9)
        out = list(zip(generator.sample(range(1, 12), count), generator.sample(range(9), count), strict=True))
        store.copy(Copies(out, [], []))
        for pair in store.layers:
            for cache in pair:
                cache[1:] = torch.nan
        back = list(zip([host for _, host in out], generator.sample(range(1, 12), count), strict=True))
        generator.shuffle(back)
        store.copy(Copies([], [], back))
        came_from = {host: block for block, host in out}
        for host, place in back:
            for layer, pair in enumerate(store.layers):
                for part, cache in enumerate(pair):
                    assert cache[place].unique().tolist() == [contents(came_from[host], layer, part)]


@pytest.mark.gpu
def test_host_memory_is_pinned_as_long_as_it_is_needed() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    for _ in range(3):
        store = make_store(num_blocks=2, num_host_blocks=9, device="cuda")
        assert store._tensors[0]._host_blocks.is_pinned()
        del store
    # The same memory can be pinned again only when it has been given back.


def test_codes_move_as_they_are(device: str) -> None:
    """Every code, NaN among them, out to the host and back, and from block to block."""
    spec = CacheSpec.of_attention(window=0, block_size=4, num_kv_heads=8, head_dim=8, dtype=CODES)
    groups = CacheGroups.choose([spec] * 2, block_size=4, max_len=64)
    store = KVStore(groups, num_blocks=5, num_host_blocks=2, device=torch.device(device))
    assert store.block_bytes == groups.block_bytes == 2 * 2 * 4 * 8 * 8
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(4, 8, 8)
    tensors = [cache for pair in store.layers for cache in pair]
    assert all(cache.dtype == CODES and not cache[0].float().any() for cache in tensors)
    for number, cache in enumerate(tensors):
        cache.view(torch.uint8)[1] = codes + number
    store.copy(Copies(swap_out=[(1, 1)], forked=[(1, 2)], swap_in=[(1, 4)]))
    for number, cache in enumerate(tensors):
        for block in (1, 2, 4):
            assert torch.equal(cache.view(torch.uint8)[block], codes + number)


def test_runs_cover_every_place_once() -> None:
    assert list(kv_store._runs([4, 5, 6, 9, 8, 7, 8])) == [(0, 4, 3), (3, 9, 1), (4, 8, 1), (5, 7, 2)]


@pytest.mark.parametrize("draft", [attention(1, 16), attention(2, 8)], ids=["other heads", "equal heads"])
def test_layers_that_draft_are_copied_with_the_blocks(draft: CacheSpec, device: str) -> None:
    groups = CacheGroups.choose([attention(2, 8)], block_size=4, max_len=64)._replace(drafts=[draft] * 2)
    store = KVStore(groups, num_blocks=4, num_host_blocks=1, device=torch.device(device))
    assert store.block_bytes == (2 * 1 * 2 * 8 + 2 * 2 * 1 * 16) * 4 * 2
    assert 2 * draft.block_bytes == 2 * 2 * 1 * 16 * 4 * 2
    tensors = [cache for pair in (*store.layers, *store.drafts) for cache in pair]
    assert [cache.shape for cache in tensors] == [(4, 4, 2, 8)] * 2 + [(4, *draft.parts[0].shape)] * 4
    copied_and_whole(store, tensors)


def test_blocks_of_any_parts_are_copied_whole(device: str) -> None:
    """Numbers of eight bits with their scales, one tensor a layer, a part without tokens: each layer has its own."""
    eight = BlockPart((4, 2, 8), torch.int8), BlockPart((4, 2), torch.float32)
    latent, state = BlockPart((4, 24), torch.bfloat16), BlockPart((3, 16), torch.float32)
    specs = [CacheSpec(0, (*eight, *eight)), CacheSpec(0, (latent,)), CacheSpec(0, (state,)), CacheSpec(0, (latent,))]
    groups = CacheGroups.choose(specs, block_size=4, max_len=64)
    assert sorted(groups.layers) == [[0], [1], [2], [3]]
    store = KVStore(groups, num_blocks=4, num_host_blocks=1, device=torch.device(device))
    assert [tuple(map(len, (cache, cache[0]))) for cache in (*store.layers[0], *store.layers[1])] == [(4, 4)] * 5
    # Groups share what they have in common: a block is of one of them at a time.
    assert store.layers[1][0].data_ptr() == store.layers[3][0].data_ptr()
    assert store.block_bytes == groups.block_bytes == 2 * (4 * 2 * 8 + 4 * 2 * 4) + 4 * 24 * 2 + 3 * 16 * 4
    copied_and_whole(store, [cache for caches in store.layers[:3] for cache in caches])


def copied_and_whole(store: KVStore, tensors: list[torch.Tensor]) -> None:
    """All copies that there are carry all tensors, each of which is memory of its own."""
    for place, cache in enumerate(tensors):
        for block in range(4):
            cache[block] = 10 * block + place
    store.copy(Copies(swap_out=[(1, 0)], forked=[(2, 1)], swap_in=[(0, 3)]))
    for place, cache in enumerate(tensors):
        assert [cache[block].unique().tolist() for block in range(4)] == [
            [place],
            [20 + place],
            [20 + place],
            [10 + place],
        ]
