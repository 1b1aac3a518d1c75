"""How many KV blocks fit, and how long a request they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from raylm.config.engine import CacheConfig
from raylm.core.step import CacheLayout
from raylm.errors import ConfigError
from raylm.log import get_logger
from raylm.worker.request_table import TableSizes

logger = get_logger(__name__)

_GIB = 1 << 30
_GRAPH_LAYER_BYTES = 48 << 10
"""What the driver keeps of one CUDA graph for each layer, beside the pool that all share. A layer of eight
kernels was measured to take 28 KiB; a layer with experts has more kernels."""


class Profile(NamedTuple):
    """Bytes that a trial of the largest steps took on the GPU."""

    resident: int
    """Weights, and what the runner keeps beside the request table."""
    step: int
    """What the largest step takes beside these and the cache."""
    graphs: int
    """The pool that all graphs share, and what each of them takes of its own."""


def num_host_blocks(config: CacheConfig, *, bytes_per_block: int, num_workers: int = 1) -> int:
    """Blocks of one worker's swap pool; 0 where it is off. Raises ConfigError when it would hold none."""
    count = int(config.swap_gib / num_workers * _GIB) // bytes_per_block
    if config.swap_gib and not count:
        raise ConfigError(
            f"cache.swap_gib {config.swap_gib:g} holds no block of the KV cache: one needs "
            f"{bytes_per_block / _GIB:.6f} GiB; 0 turns swapping off"
        )
    return count


def num_blocks(
    config: CacheConfig,
    *,
    bytes_per_block: int,
    num_workers: int,
    device: torch.device,
    profile: Callable[[], Profile],
    tables: TableSizes,
) -> int:
    """Blocks of one worker's cache: as configured, or as many as the memory left by a worst-case step holds beside the
    request table.

    `profile` runs that step. Raises ConfigError with the numbers when not even two blocks fit.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if device.type == "cuda":
        available, limit = _cuda_bytes_left(config.gpu_memory_utilization, device, profile())
        count = tables.blocks_beside(available, bytes_per_block=bytes_per_block)
        table = tables.bytes_for(count)
        available -= table
        logger.info("%s; %.2f GiB hold the request table", limit, table / _GIB)
    else:
        available = int(config.cpu_memory_gib / num_workers * _GIB)
        limit = f"cache.cpu_memory_gib {config.cpu_memory_gib:g}"
        if num_workers > 1:
            limit += f", shared by {num_workers} workers,"
        count = available // bytes_per_block
    if count < 2:
        raise ConfigError(
            f"{limit} leaves {available / _GIB:.2f} GiB for the KV cache, but two blocks of it "
            f"need {2 * bytes_per_block / _GIB:.2f} GiB"
        )
    return count


def bytes_left(config: CacheConfig, device: torch.device) -> int:
    """What cache.gpu_memory_utilization leaves of a GPU as it is now."""
    foreign, total = _foreign_bytes(device)
    return int(config.gpu_memory_utilization * total) - foreign - torch.cuda.memory_allocated(device)


def max_model_len(layout: CacheLayout, num_blocks: int, *, chunk: int, wanted: int | None, limit: int) -> int:
    """Tokens of the longest request: `wanted`, or as many up to the model's `limit` as the cache holds.

    `chunk` is the most that one step computes. Raises ConfigError when `wanted` is more than the cache or the model
    takes, or the cache holds no request at all.
    """
    capacity = layout.longest(num_blocks - 1, chunk=chunk, limit=limit)
    if wanted is not None and wanted > capacity:
        raise ConfigError(
            f"model.max_model_len {wanted} does not fit in the KV cache of {capacity} tokens: "
            "lower it or give the cache more memory (cache.cpu_memory_gib, cache.gpu_memory_utilization)"
        )
    if capacity < 2:
        raise ConfigError(
            f"the KV cache has {num_blocks} blocks, and a request of 2 tokens needs "
            f"{layout.blocks_for(2, chunk=chunk)} beside the one for padding: give the cache more memory "
            "(cache.num_blocks, cache.cpu_memory_gib, cache.gpu_memory_utilization)"
        )
    if wanted is None and capacity < limit:
        logger.warning("max_model_len is %d, not the model's %d: the KV cache holds no more", capacity, limit)
    return wanted or capacity


def describe(layout: CacheLayout, num_blocks: int, *, chunk: int, max_len: int) -> str:
    """What the cache holds, in requests of `max_len` tokens."""
    at_once = (num_blocks - 1) / layout.blocks_for(max_len, chunk=chunk)
    return (
        f"KV cache: {int(at_once * max_len):,} tokens in {num_blocks - 1:,} blocks; "
        f"{at_once:.1f} requests of {max_len:,} tokens at once"
    )


def profile_steps(
    device: torch.device, *, step: Callable[[], object], graphs: Callable[[], None], graph_layers: int, beside: int
) -> Profile:
    """Measure the largest step and the largest graphs on a GPU. A trial's cache and request table take `beside` bytes.

    `step` runs the one, `graphs` captures the others, and `graph_layers` says how many layers all graphs that there may
    be have together.
    """
    resident = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    graphs()
    torch.cuda.synchronize(device)
    pool = max(free - torch.cuda.mem_get_info(device)[0], 0)
    return Profile(resident - beside, peak - resident, pool + graph_layers * _GRAPH_LAYER_BYTES)


@contextmanager
def out_of_memory(device: torch.device, advice: str) -> Iterator[None]:
    """Turn running out of the GPU's memory into a ConfigError that has the numbers and the advice."""
    try:
        yield
    except RuntimeError as error:
        # The extension calls torch for memory and for library products only. Its RuntimeError names the failed call and
        # not the reason, so every such call counts as out of memory; `from error` keeps the call's name.
        if not isinstance(error, torch.OutOfMemoryError) and "torch_call_dispatcher(" not in str(error):
            raise
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"the GPU has {total / _GIB:.1f} GiB of memory, of which {free / _GIB:.1f} GiB were free when {advice}"
        ) from error


def _cuda_bytes_left(utilization: float, device: torch.device, profile: Profile) -> tuple[int, str]:
    """Bytes for the cache, and what limits them."""
    torch.cuda.empty_cache()
    foreign, total = _foreign_bytes(device)
    limit = (
        f"cache.gpu_memory_utilization {utilization:g} of {total / _GIB:.1f} GiB "
        f"({profile.resident / _GIB:.2f} GiB hold the weights, {profile.step / _GIB:.2f} the largest step, "
        f"{profile.graphs / _GIB:.2f} CUDA graphs, {foreign / _GIB:.2f} CUDA itself and other processes)"
    )
    return int(total * utilization) - sum(profile) - foreign, limit


def _foreign_bytes(device: torch.device) -> tuple[int, int]:
    """Of a GPU's memory what is neither free nor torch's, and all of it."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device), total
