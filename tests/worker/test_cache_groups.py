"""Which layers share blocks, and what that saves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from raylm.config.engine import CacheConfig
from raylm.core.step import CacheLayout
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.worker import memory
from raylm.worker.cache_groups import CacheGroups
from tests.support import checkpoints


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> ArchConfig:
    return ArchConfig.from_source(locate(str(checkpoints.gemma3(tmp_path_factory.mktemp("gemma")))))


def shaped(arch: ArchConfig, kinds: str, *, window: int = 512) -> ArchConfig:
    """The model with one layer a letter: s for sliding, f for full attention."""
    layer, windows = arch.layers[0], {"s": window, "f": 0}
    return dataclasses.replace(arch, layers=tuple(dataclasses.replace(layer, window=windows[kind]) for kind in kinds))


GEMMA_270M = "sssssf" * 3
GEMMA_1B = "sssssf" * 4 + "ss"
GEMMA_27B = "sssssf" * 10 + "ss"


@pytest.mark.parametrize(
    ("kinds", "size", "num_full", "num_sliding"),
    [
        ("ffff", 4, 1, 0),
        ("sssss", 5, 0, 1),
        ("fss", 1, 1, 2),
        (GEMMA_270M, 3, 1, 5),
        # 22 sliding and 4 full layers: two of 28 places stay empty, better than twice as many groups.
        (GEMMA_1B, 4, 1, 6),
        (GEMMA_27B, 10, 1, 6),
        # Groups of 9 would leave 8 of 27 places empty, those of 5 leave one of 20.
        ("s" * 10 + "f" * 9, 5, 2, 2),
        ("sssssfff", 3, 1, 2),
        ("sssff", 1, 2, 3),
    ],
)
def test_groups_are_large_and_waste_little(gemma, kinds, size, num_full, num_sliding):
    groups = CacheGroups.choose(shaped(gemma, kinds), block_size=16, max_len=8192)
    assert groups.size == size
    assert groups.layout == CacheLayout(16, [0] * num_full + [512] * num_sliding)
    assert sorted(layer for layers in groups.layers for layer in layers) == list(range(len(kinds)))
    for layers, window in zip(groups.layers, groups.layout.windows, strict=True):
        assert {kinds[layer] for layer in layers} == {"s" if window else "f"} and len(layers) <= size
    for layer, group in enumerate(group for group, _ in groups.places()):
        assert layer in groups.layers[group]


@pytest.mark.parametrize(("max_len", "windows"), [(512, [0]), (513, [0, 512, 512, 512, 512, 512])])
def test_a_window_that_no_request_outgrows_is_full_attention(gemma, max_len, windows):
    groups = CacheGroups.choose(shaped(gemma, GEMMA_270M), block_size=16, max_len=max_len)
    assert groups.layout.windows == windows


def test_memory_of_a_gemma_with_groups_and_without(gemma):
    groups = CacheGroups.choose(shaped(gemma, GEMMA_270M), block_size=16, max_len=32768)
    one = CacheLayout(16, [0])
    layers_of_blocks = groups.size * groups.layout.blocks_for(8192, chunk=512)
    assert layers_of_blocks == 3 * (512 + 5 * 66)
    assert 18 * one.blocks_for(8192, chunk=512) == 18 * 512
    assert layers_of_blocks / (18 * 512) < 0.28
    # A step of more tokens needs more beside the window.
    assert groups.size * groups.layout.blocks_for(8192, chunk=2048) / (18 * 512) < 0.44
    # With twice the tokens, the rest of the window's groups stays what it is.
    more = groups.size * groups.layout.blocks_for(16384, chunk=512)
    assert more - layers_of_blocks == 3 * 512


def test_the_longest_request_is_the_one_that_just_fits(gemma):
    layout = CacheGroups.choose(shaped(gemma, GEMMA_270M), block_size=16, max_len=32768).layout
    longest = layout.longest(842, chunk=512, limit=32768)
    assert longest == 8192
    assert layout.blocks_for(longest + 1, chunk=512) > 842
    assert layout.longest(100_000, chunk=512, limit=32768) == 32768


def test_bytes_of_a_block(gemma):
    assert (
        memory.block_bytes(gemma, group_size=2, block_size=16, num_kv_heads=2, dtype=torch.bfloat16)
        == 2 * 2 * 16 * 2 * 16 * 2
    )


def test_a_swap_pool_of_less_than_a_block_is_refused():
    assert memory.num_host_blocks(CacheConfig(swap_gib=0), bytes_per_block=1 << 20) == 0
    assert memory.num_host_blocks(CacheConfig(swap_gib=0.5), bytes_per_block=1 << 20) == 512
    with pytest.raises(ConfigError, match=r"cache.swap_gib 0.0001 holds no block of the KV cache: one needs 0.000977"):
        memory.num_host_blocks(CacheConfig(swap_gib=0.0001), bytes_per_block=1 << 20)


@pytest.mark.parametrize(
    ("num_blocks", "wanted", "expected"), [(101, None, 200), (101, 100, 100), (11, None, 40), (11, 40, 40)]
)
def test_the_length_of_requests(num_blocks, wanted, expected):
    found = memory.max_model_len(CacheLayout(4, [0]), num_blocks, chunk=64, wanted=wanted, limit=200)
    assert found == expected


def test_lengths_that_do_not_fit():
    with pytest.raises(ConfigError, match="model.max_model_len 41 does not fit in the KV cache of 40 tokens"):
        memory.max_model_len(CacheLayout(4, [0]), 11, chunk=64, wanted=41, limit=200)
    with pytest.raises(ConfigError, match="the KV cache has 3 blocks, and a request of 2 tokens needs 3 beside"):
        memory.max_model_len(CacheLayout(4, [0, 8, 8]), 3, chunk=64, wanted=None, limit=200)


def test_what_the_cache_holds_in_words():
    line = memory.describe(CacheLayout(16, [0]), 769, chunk=64, max_len=2048)
    assert line == "KV cache: 12,288 tokens in 768 blocks; 6.0 requests of 2,048 tokens at once"


def test_a_model_of_one_kind_has_one_group(tmp_path: Path):
    arch = ArchConfig.from_source(locate(str(checkpoints.mistral(tmp_path))))
    assert CacheGroups.choose(arch, block_size=4, max_len=64).layout == CacheLayout(4, [8])
    assert CacheGroups.choose(arch, block_size=4, max_len=8).layout == CacheLayout(4, [0])
