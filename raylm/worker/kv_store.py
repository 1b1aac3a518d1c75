"""The memory of the KV cache: blocks on the device, the swap pool on the host, and copies of whole blocks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from raylm.core.step import Copies
from raylm.layers.attention import KVCache
from raylm.worker.transfer import Uploader

_CHUNK_BYTES = 64 << 20
"""Blocks gathered in device memory at a time."""

Pairs = list[tuple[int, int]]


class LayerShape(NamedTuple):
    """Layers of equal heads that keep keys and values."""

    num_layers: int
    num_kv_heads: int
    """Those of this rank."""
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one token in all of the layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


class KVStore:
    """Tensors of the cache, for groups of `group_size` layers, and for the layers of a model that drafts.

    On the device [2 * group_size, num_blocks, block_size, kv heads, head size]: keys and values of the i-th layer of
    every group at 2i and 2i + 1. On the host [num_host_blocks, 2 * group_size, ...], pinned for a GPU: there a block
    lies in one piece. Layers that draft have such tensors of their own: a block holds its tokens' keys and values in
    both, and is copied as one.
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
        draft: LayerShape | None = None,
    ) -> None:
        """`block_shape` is (block_size, kv heads, head size)."""

        def make(num_layers: int, shape: tuple[int, int, int]) -> _Tensors:
            return _Tensors(num_layers, num_blocks, num_host_blocks, shape, dtype, device)

        target = make(group_size, block_shape)
        self._tensors = [target]
        self.pairs = target.pairs
        self.draft_pairs: list[KVCache] = []
        """Keys and values of each layer that drafts."""
        if draft is not None:
            drafting = make(draft.num_layers, (block_shape[0], draft.num_kv_heads, draft.head_dim))
            self._tensors.append(drafting)
            self.draft_pairs = drafting.pairs
        self._upload = Uploader(device)
        self.block_bytes = sum(tensors.block_bytes for tensors in self._tensors)
        self._chunk = max(_CHUNK_BYTES // self.block_bytes, 1)

    @torch.inference_mode()
    def copy(self, copies: Copies) -> None:
        """Start the copies on the device's stream: all work started later sees them."""
        # In the order of host blocks, so that those in a row go in one piece.
        for pairs in self._chunks(sorted(copies.swap_out, key=itemgetter(1))):
            sources, _ = self._ids(pairs)
            for tensors in self._tensors:
                tensors.swap_out(pairs, sources)
        for pairs in self._chunks(copies.forked):
            sources, targets = self._ids(pairs)
            for tensors in self._tensors:
                tensors.fork(sources, targets)
        for pairs in self._chunks(sorted(copies.swap_in)):
            _, targets = self._ids(pairs)
            for tensors in self._tensors:
                tensors.swap_in(pairs, targets)

    def _ids(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second blocks of the pairs, [len(pairs)] int64 each, on the device."""
        first, second = np.array(pairs, dtype=np.int64).T.copy()
        moved = self._upload(first, second)
        return moved[0], moved[1]

    def _chunks(self, pairs: Pairs) -> Iterator[Pairs]:
        for start in range(0, len(pairs), self._chunk):
            yield pairs[start : start + self._chunk]


class _Tensors:
    """Blocks of layers of one shape, on the device and on the host."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_host_blocks: int,
        block_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._blocks = torch.empty((2 * num_layers, num_blocks, *block_shape), dtype=dtype, device=device)
        # Tables name block 0 where a window hides the keys. Kernels may weigh what is there with 0: it must not be NaN.
        self._blocks[:, 0] = 0
        self._host_blocks = torch.empty((num_host_blocks, 2 * num_layers, *block_shape), dtype=dtype)
        if device.type == "cuda" and num_host_blocks:
            _pin(self._host_blocks)
        self.block_bytes = self._blocks.nbytes // num_blocks
        self.pairs: list[KVCache] = [(self._blocks[2 * i], self._blocks[2 * i + 1]) for i in range(num_layers)]

    def swap_out(self, pairs: Pairs, sources: torch.Tensor) -> None:
        copied = self._blocks.index_select(1, sources).transpose(0, 1).contiguous()
        for start, first, count in _runs([host for _, host in pairs]):
            self._host_blocks[first : first + count].copy_(copied[start : start + count], non_blocking=True)

    def fork(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self._blocks.index_copy_(1, targets, self._blocks.index_select(1, sources))

    def swap_in(self, pairs: Pairs, targets: torch.Tensor) -> None:
        copied = self._blocks.new_empty((len(pairs), *self._host_blocks.shape[1:]))
        for start, first, count in _runs([host for host, _ in pairs]):
            copied[start : start + count].copy_(self._host_blocks[first : first + count], non_blocking=True)
        self._blocks.index_copy_(1, targets, copied.transpose(0, 1))


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
