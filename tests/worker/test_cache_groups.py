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
from raylm.models.cache_spec import BlockPart, CacheSpec, cache_specs
from raylm.parallel.context import ParallelContext
from raylm.worker import memory
from raylm.worker.cache_groups import CacheGroups
from raylm.worker.request_table import RequestTable, TableSizes
from tests.support import checkpoints


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> ArchConfig:
    return ArchConfig.from_source(locate(str(checkpoints.gemma3(tmp_path_factory.mktemp("gemma")))))


def shaped(arch: ArchConfig, kinds: str, *, window: int = 512) -> ArchConfig:
    """The model with one layer a letter: s for sliding, f for full attention."""
    layer, windows = arch.layers[0], {"s": window, "f": 0}
    return dataclasses.replace(arch, layers=tuple(dataclasses.replace(layer, window=windows[kind]) for kind in kinds))


def rank_of(*, tensor: int = 1) -> ParallelContext:
    """The first of so many tensor ranks."""
    return ParallelContext(0, 0, tensor, 0, 1, torch.device("cpu"))


def groups_of(
    arch: ArchConfig,
    *,
    block_size: int = 16,
    max_len: int = 8192,
    dtype: torch.dtype = torch.bfloat16,
    context: ParallelContext | None = None,
) -> CacheGroups:
    specs = cache_specs(arch, context or rank_of(), block_size=block_size, dtype=dtype)
    return CacheGroups.choose(specs, block_size=block_size, max_len=max_len)


LAYER_BYTES = 2 * 16 * 2 * 16 * 2
"""Of one layer of the checkpoint in one block: keys and values of 16 tokens, 2 heads of 16 numbers of 2 bytes."""
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
    groups = groups_of(shaped(gemma, kinds), max_len=8192)
    assert max(map(len, groups.layers)) == size
    assert groups.block_bytes == size * LAYER_BYTES
    assert groups.layout == CacheLayout(16, [0] * num_full + [512] * num_sliding)
    assert sorted(layer for layers in groups.layers for layer in layers) == list(range(len(kinds)))
    for layers, window in zip(groups.layers, groups.layout.windows, strict=True):
        assert {kinds[layer] for layer in layers} == {"s" if window else "f"} and len(layers) <= size
    for layer, group in enumerate(groups.of_layers()):
        assert layer in groups.layers[group]


@pytest.mark.parametrize(("max_len", "windows"), [(512, [0]), (513, [0, 512, 512, 512, 512, 512])])
def test_a_window_that_no_request_outgrows_is_full_attention(gemma, max_len, windows):
    groups = groups_of(shaped(gemma, GEMMA_270M), max_len=max_len)
    assert groups.layout.windows == windows


def test_memory_of_a_gemma_with_groups_and_without(gemma):
    groups = groups_of(shaped(gemma, GEMMA_270M), max_len=32768)
    size = groups.block_bytes // LAYER_BYTES
    one = CacheLayout(16, [0])
    layers_of_blocks = size * groups.layout.blocks_for(8192, chunk=512)
    assert layers_of_blocks == 3 * (512 + 5 * 66)
    assert 18 * one.blocks_for(8192, chunk=512) == 18 * 512
    assert layers_of_blocks / (18 * 512) < 0.28
    # A step of more tokens needs more beside the window.
    assert size * groups.layout.blocks_for(8192, chunk=2048) / (18 * 512) < 0.44
    # With twice the tokens, the rest of the window's groups stays what it is.
    more = size * groups.layout.blocks_for(16384, chunk=512)
    assert more - layers_of_blocks == 3 * 512


def test_the_longest_request_is_the_one_that_just_fits(gemma):
    layout = groups_of(shaped(gemma, GEMMA_270M), max_len=32768).layout
    longest = layout.longest(842, chunk=512, limit=32768)
    assert longest == 8192
    assert layout.blocks_for(longest + 1, chunk=512) > 842
    assert layout.longest(100_000, chunk=512, limit=32768) == 32768


@pytest.mark.parametrize("limit", [64, 4096, 1 << 20])
@pytest.mark.parametrize("windows", [[0], [0, 512, 512]])
@pytest.mark.parametrize("available", [-5, 0, 40_000, 3_000_000, 900_000_000])
def test_blocks_and_tables_fill_what_there_is(limit, windows, available):
    sizes = TableSizes(63, CacheLayout(16, windows), 512, limit)

    def taken(blocks):
        return 4096 * blocks + sizes.bytes(sizes.longest(blocks))

    found = sizes.blocks_beside(available, bytes_per_block=4096)
    assert found == 0 or taken(found) <= available
    assert taken(found + 1) > available


@pytest.mark.parametrize(("free", "num_blocks"), [(10 << 20, 1853), (5 << 19, None)])
def test_a_gpus_cache_leaves_room_for_tables(free, num_blocks, monkeypatch):
    """Of 10 MiB nine tenths may be used, of which weights, the largest step and graphs take 1.5 and others what is not
    free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10 << 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    sizes = TableSizes(63, CacheLayout(16, [0]), 512, 1000)

    def found():
        return memory.num_blocks(
            CacheConfig(gpu_memory_utilization=0.9),
            bytes_per_block=4096,
            num_workers=1,
            device=torch.device("cuda"),
            profile=lambda: memory.Profile(1 << 20, 1 << 19, 0),
            tables=sizes,
        )

    if num_blocks is None:
        with pytest.raises(ConfigError, match="leaves 0.00 GiB for the KV cache, but two blocks of it need"):
            found()
    else:
        assert found() == num_blocks


def test_a_table_takes_what_is_planned():
    sizes = TableSizes(63, CacheLayout(16, [0, 512]), 512, 1000)
    device = torch.device("cpu")
    table = RequestTable(max_rows=63, max_model_len=500, block_size=16, num_groups=2, device=device)
    assert sizes.bytes(500) == table.token_ids.nbytes + table.block_table.nbytes


def test_bytes_of_a_block(gemma):
    assert groups_of(shaped(gemma, "ff")).block_bytes == 2 * 2 * 16 * 2 * 16 * 2
    assert groups_of(shaped(gemma, "ff"), dtype=torch.float32).block_bytes == 2 * 2 * 16 * 2 * 16 * 4
    assert groups_of(shaped(gemma, "ff"), context=rank_of(tensor=2)).block_bytes == 2 * 2 * 16 * 1 * 16 * 2
    # More ranks than heads: each has a copy.
    assert groups_of(shaped(gemma, "ff"), context=rank_of(tensor=4)).block_bytes == 2 * 2 * 16 * 1 * 16 * 2
    with pytest.raises(ConfigError, match="num_key_value_heads is 2, which tensor parallelism over 3 ranks can"):
        groups_of(gemma, context=rank_of(tensor=3))


def test_a_layer_says_what_it_keeps(gemma):
    full, sliding = cache_specs(shaped(gemma, "fs"), rank_of(tensor=2), block_size=16, dtype=torch.bfloat16)
    assert (full.kind, full.window, sliding.kind, sliding.window) == ("full", 0, "sliding", 512)
    assert full.parts == sliding.parts == (BlockPart((16, 1, 16), torch.bfloat16),) * 2
    assert full.block_bytes == sliding.block_bytes == 2 * 16 * 1 * 16 * 2


def test_a_stage_has_the_bytes_of_its_own_layers(gemma):
    groups = groups_of(shaped(gemma, GEMMA_1B))
    assert len(groups.layers) == 7 and groups.block_bytes == 4 * LAYER_BYTES
    stages = [groups.of_stage(range(0, 10)), groups.of_stage(range(10, 24)), groups.of_stage(range(24, 26))]
    for stage in stages:
        assert stage.layout == groups.layout and stage.full_groups == groups.full_groups == [0]
        assert len(stage.layers) == 7
    assert sorted(layer for stage in stages for group in stage.layers for layer in group) == list(range(26))
    # The group with most of the stage's layers counts. The last stage's two slide both, and are of one group.
    assert [stage.block_bytes for stage in stages] == [4 * LAYER_BYTES, 4 * LAYER_BYTES, 2 * LAYER_BYTES]
    assert stages[2].of_layers() == [6, 6] and groups.of_layers()[24:] == [6, 6]


def test_layers_that_draft_add_their_bytes_to_every_block(gemma):
    groups = groups_of(shaped(gemma, GEMMA_270M))
    draft = cache_specs(shaped(gemma, "sf"), rank_of(), block_size=16, dtype=torch.bfloat16)
    with_drafts = groups._replace(drafts=draft)
    assert with_drafts.block_bytes == groups.block_bytes + 2 * LAYER_BYTES
    assert with_drafts.layout == groups.layout and with_drafts.layers == groups.layers
    assert with_drafts.of_stage(range(6, 18)).block_bytes == groups.of_stage(range(6, 18)).block_bytes + 2 * LAYER_BYTES
    others = CacheSpec.of_attention(window=0, block_size=16, num_kv_heads=3, head_dim=8, dtype=torch.bfloat16)
    assert groups._replace(drafts=[others]).block_bytes == groups.block_bytes + 2 * 16 * 3 * 8 * 2


def test_layers_of_other_parts_are_other_groups():
    """As with caches of eight bits in some layers, or one tensor for keys and values."""
    half = CacheSpec.of_attention(window=0, block_size=16, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    eight = CacheSpec.of_attention(window=0, block_size=16, num_kv_heads=2, head_dim=16, dtype=torch.float8_e4m3fn)
    scaled = CacheSpec(0, (*eight.parts, *[BlockPart((16, 2), torch.float32)] * 2))
    latent = CacheSpec(0, (BlockPart((16, 576), torch.bfloat16),))
    assert (half.block_bytes, eight.block_bytes, scaled.block_bytes, latent.block_bytes) == (2048, 1024, 1280, 18432)
    alone = CacheGroups.choose([scaled] * 4, block_size=16, max_len=64)
    assert alone.layers == [[0, 1, 2, 3]] and alone.block_bytes == 4 * 1280
    mixed = CacheGroups.choose([half, scaled, half, scaled], block_size=16, max_len=64)
    assert mixed.layers == [[0, 2], [1, 3]] and mixed.layout == CacheLayout(16, [0, 0])
    # A block has the tensors of either group.
    assert mixed.block_bytes == 2 * 2048 + 2 * 1280
    # A window that is outgrown by nothing is no difference.
    sliding = dataclasses.replace(latent, window=64)
    assert CacheGroups.choose([latent, sliding], block_size=16, max_len=64).layers == [[0, 1]]
    assert CacheGroups.choose([sliding, latent], block_size=16, max_len=65).layout == CacheLayout(16, [0, 64])


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
    assert groups_of(arch, block_size=4, max_len=64).layout == CacheLayout(4, [8])
    assert groups_of(arch, block_size=4, max_len=8).layout == CacheLayout(4, [0])
