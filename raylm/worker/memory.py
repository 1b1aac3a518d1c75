"""How many KV blocks fit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raylm.config.engine import CacheConfig
from raylm.errors import ConfigError
from raylm.models.arch import ArchConfig

_GIB = 1 << 30


def block_bytes(arch: ArchConfig, *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in every layer."""
    return 2 * arch.num_layers * block_size * arch.num_kv_heads * arch.head_dim * dtype.itemsize


def make_caches(
    arch: ArchConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One (keys, values) pair a layer, each [num_blocks, block_size, kv heads, head size]."""
    shape = (num_blocks, block_size, arch.num_kv_heads, arch.head_dim)
    return [
        (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
        for _ in range(arch.num_layers)
    ]


def num_blocks(config: CacheConfig, *, bytes_per_block: int, device: torch.device, profile: Callable[[], None]) -> int:
    """Blocks of the cache: as configured, or as many as the memory left by a worst-case step holds.

    `profile` runs that step. Raises ConfigError with the numbers when not even two blocks fit.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if device.type == "cuda":
        available = _cuda_bytes_left(config.gpu_memory_utilization, device, profile)
        limit = f"cache.gpu_memory_utilization {config.gpu_memory_utilization:g}"
    else:
        available = int(config.cpu_memory_gib * _GIB)
        limit = f"cache.cpu_memory_gib {config.cpu_memory_gib:g}"
    count = available // bytes_per_block
    if count < 2:
        raise ConfigError(
            f"{limit} leaves {available / _GIB:.2f} GiB for the KV cache, but two blocks of it "
            f"need {2 * bytes_per_block / _GIB:.2f} GiB"
        )
    return count


def _cuda_bytes_left(utilization: float, device: torch.device, profile: Callable[[], None]) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # What others hold on this GPU is neither free nor ours.
    foreign = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - peak - foreign
