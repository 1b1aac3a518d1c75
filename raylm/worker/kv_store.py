"""The memory of the KV cache: blocks on the device, the swap pool on the host, and copies of whole blocks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from operator import itemgetter

import numpy as np
import torch

from raylm.core.step import Copies
from raylm.layers.attention import KVCache
from raylm.worker.transfer import Uploader

_CHUNK_BYTES = 64 << 20
"""Blocks gathered in device memory at a time."""

Pairs = list[tuple[int, int]]


class KVStore:
    """Tensors of the cache, for groups of `group_size` layers.

    On the device [2 * group_size, num_blocks, block_size, kv heads, head size]: keys and values of the i-th layer of
    every group at 2i and 2i + 1. On the host [num_host_blocks, 2 * group_size, ...], pinned for a GPU: there a block
    lies in one piece.
    """

    def __init__(
        self,
        *,
        group_size: int,
        num_blocks: int,
        num_host_blocks: int,
        block_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`block_shape` is (block_size, kv heads, head size)."""
        self._blocks = torch.empty((2 * group_size, num_blocks, *block_shape), dtype=dtype, device=device)
        # Tables name block 0 where a window hides the keys. Kernels may weigh what is there with 0: it must not be NaN.
        self._blocks[:, 0] = 0
        self._host_blocks = torch.empty((num_host_blocks, 2 * group_size, *block_shape), dtype=dtype)
        if device.type == "cuda" and num_host_blocks:
            _pin(self._host_blocks)
        self._upload = Uploader(device)
        self.block_bytes = self._blocks.nbytes // num_blocks
        self.pairs: list[KVCache] = [(self._blocks[2 * i], self._blocks[2 * i + 1]) for i in range(group_size)]
        self._chunk = max(_CHUNK_BYTES // self.block_bytes, 1)

    @torch.inference_mode()
    def copy(self, copies: Copies) -> None:
        """Start the copies on the device's stream: all work started later sees them."""
        # In the order of host blocks, so that those in a row go in one piece.
        for pairs in self._chunks(sorted(copies.swap_out, key=itemgetter(1))):
            self._swap_out(pairs)
        for pairs in self._chunks(copies.forked):
            sources, targets = self._ids(pairs)
            self._blocks.index_copy_(1, targets, self._blocks.index_select(1, sources))
        for pairs in self._chunks(sorted(copies.swap_in)):
            self._swap_in(pairs)

    def _swap_out(self, pairs: Pairs) -> None:
        copied = self._blocks.index_select(1, self._ids(pairs)[0]).transpose(0, 1).contiguous()
        for start, first, count in _runs([host for _, host in pairs]):
            self._host_blocks[first : first + count].copy_(copied[start : start + count], non_blocking=True)

    def _swap_in(self, pairs: Pairs) -> None:
        copied = self._blocks.new_empty((len(pairs), *self._host_blocks.shape[1:]))
        for start, first, count in _runs([host for host, _ in pairs]):
            copied[start : start + count].copy_(self._host_blocks[first : first + count], non_blocking=True)
        self._blocks.index_copy_(1, self._ids(pairs)[1], copied.transpose(0, 1))

    def _ids(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second blocks of the pairs, [len(pairs)] int64 each, on the device."""
        first, second = np.array(pairs, dtype=np.int64).T.copy()
        moved = self._upload(first, second)
        return moved[0], moved[1]

    def _chunks(self, pairs: Pairs) -> Iterator[Pairs]:
        for start in range(0, len(pairs), self._chunk):
            yield pairs[start : start + self._chunk]


def _runs(ids: list[int]) -> Iterator[tuple[int, int, int]]:
    """Pieces of `ids` that count up by one: (where it starts in ids, its first id, its length)."""
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            yield start, ids[start], end - start
            start = end


def _pin(tensor: torch.Tensor) -> None:
    """Pin the tensor's memory for as long as it lives. (torch's own pinned memory is rounded up to a power of two.)"""
    runtime = torch.cuda.cudart()
    address = tensor.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, tensor.nbytes, 0)))
    weakref.finalize(tensor, runtime.cudaHostUnregister, address)
