"""The memory of the KV cache: blocks on the device, the swap pool on the host, and copies of whole blocks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import numpy as np
import torch

from raylm.core.step import Copies
from raylm.layers.attention import KVCache
from raylm.models.cache_spec import BlockPart, CacheSpec
from raylm.ops import CODES
from raylm.worker.cache_groups import CacheGroups, parts_of
from raylm.worker.transfer import Uploader

_CHUNK_BYTES = 64 << 20
"""Blocks gathered in device memory at a time."""

Pairs = list[tuple[int, int]]


class KVStore:
    """Tensors of the cache, for the groups of a stage's layers and for the layers that draft.

    For each part of a block (BlockPart), on the device [tensors, num_blocks, *part's shape]: of a model with attention
    alone, keys and values of the i-th layer of every group at 2i and 2i + 1, those of layers that draft behind them. On
    the host [num_host_blocks, tensors, ...], pinned for a GPU: there all that a block has of one part lies in one
    piece. A block is copied with all of its parts.
    """

    def __init__(self, groups: CacheGroups, *, num_blocks: int, num_host_blocks: int, device: torch.device) -> None:
        made = {
            part: _Tensors(part, count, num_blocks, num_host_blocks, device) for part, count in groups.parts().items()
        }
        self._tensors = list(made.values())
        of_layers: dict[int, KVCache] = {}
        for layers in groups.layers:
            caches = _caches([groups.specs[layer] for layer in layers], made, first=Counter())
            of_layers.update(zip(layers, caches, strict=True))
        self.layers: list[KVCache] = [of_layers[layer] for layer in sorted(of_layers)]
        """Of each layer of the stage, in order."""
        self.drafts: list[KVCache] = _caches(groups.drafts, made, first=groups.parts() - parts_of(groups.drafts))
        """Of each layer that drafts."""
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
    """All tensors of one part of a block, on the device and on the host."""

    def __init__(
        self, part: BlockPart, count: int, num_blocks: int, num_host_blocks: int, device: torch.device
    ) -> None:
        self._blocks = torch.empty((count, num_blocks, *part.shape), dtype=part.dtype, device=device)
        # 8-bit floats move as bytes: torch has no index_copy_ of them everywhere.
        moved = torch.uint8 if part.dtype == CODES else part.dtype
        self._moved = self._blocks.view(moved)
        # Tables name block 0 where a window hides the keys. Kernels may weigh what is there with 0: it must not be NaN.
        self._moved[:, 0] = 0
        self._host_blocks = torch.empty((num_host_blocks, count, *part.shape), dtype=moved)
        if device.type == "cuda" and num_host_blocks:
            _pin(self._host_blocks)
        self.block_bytes = self._blocks.nbytes // num_blocks
        self.each = list(self._blocks)
        """[num_blocks, *part's shape], one for each of the tensors."""

    def swap_out(self, pairs: Pairs, sources: torch.Tensor) -> None:
        copied = self._moved.index_select(1, sources).transpose(0, 1).contiguous()
        for start, first, count in _runs([host for _, host in pairs]):
            self._host_blocks[first : first + count].copy_(copied[start : start + count], non_blocking=True)

    def fork(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self._moved.index_copy_(1, targets, self._moved.index_select(1, sources))

    def swap_in(self, pairs: Pairs, targets: torch.Tensor) -> None:
        copied = self._moved.new_empty((len(pairs), *self._host_blocks.shape[1:]))
        for start, first, count in _runs([host for host, _ in pairs]):
            copied[start : start + count].copy_(self._host_blocks[first : first + count], non_blocking=True)
        self._moved.index_copy_(1, targets, copied.transpose(0, 1))


def _caches(
    specs: Sequence[CacheSpec], made: Mapping[BlockPart, _Tensors], *, first: Counter[BlockPart]
) -> list[KVCache]:
    """The tensors of some layers, each part's in a row from the `first` one on."""
    left = {part: iter(tensors.each[first[part] :]) for part, tensors in made.items()}
    return [tuple(next(left[part]) for part in spec.parts) for spec in specs]


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
