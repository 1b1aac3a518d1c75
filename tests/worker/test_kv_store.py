"""Copies of whole blocks, by what is in them."""

from __future__ import annotations

import random

import pytest
import torch

from raylm.core.step import Copies
from raylm.worker import kv_store
from raylm.worker.kv_store import KVStore, LayerShape


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return request.param


def make_store(*, num_blocks: int, num_host_blocks: int, device: str = "cpu") -> KVStore:
    """Every element of block b, key or value of layer i, is 8 * b + 2 * i (+ 1 for values)."""
    store = KVStore(
        group_size=3,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        block_shape=(4, 2, 8),
        dtype=torch.bfloat16,
        device=torch.device(device),
    )
    for layer, pair in enumerate(store.pairs):
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
    for place in range(store.pairs[0][0].shape[0]):
        values = [cache[place].unique().tolist() for pair in store.pairs for cache in pair]
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
        for pair in store.pairs:
            for cache in pair:
                cache[1:] = torch.nan
        back = list(zip([host for _, host in out], generator.sample(range(1, 12), count), strict=True))
        generator.shuffle(back)
        store.copy(Copies([], [], back))
        came_from = {host: block for block, host in out}
        for host, place in back:
            for layer, pair in enumerate(store.pairs):
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


def test_runs_cover_every_place_once() -> None:
    assert list(kv_store._runs([4, 5, 6, 9, 8, 7, 8])) == [(0, 4, 3), (3, 9, 1), (4, 8, 1), (5, 7, 2)]


def test_layers_that_draft_are_copied_with_the_blocks(device: str) -> None:
    store = KVStore(
        group_size=1,
        num_blocks=4,
        num_host_blocks=1,
        block_shape=(4, 2, 8),
        dtype=torch.bfloat16,
        device=torch.device(device),
        draft=LayerShape(num_layers=2, num_kv_heads=1, head_dim=16),
    )
    assert store.block_bytes == (2 * 1 * 2 * 8 + 2 * 2 * 1 * 16) * 4 * 2
    assert LayerShape(2, 1, 16).bytes_per_token(torch.bfloat16) == 2 * 2 * 1 * 16 * 2
    tensors = [cache for pair in (*store.pairs, *store.draft_pairs) for cache in pair]
    assert [cache.shape for cache in tensors] == [(4, 4, 2, 8)] * 2 + [(4, 4, 1, 16)] * 4
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
