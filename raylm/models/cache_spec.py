"""What a layer keeps in the KV cache: cache groups, bytes and tensors of blocks all come from here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from raylm.layers.heads import kv_heads_of_rank
from raylm.models.arch import ArchConfig
from raylm.parallel.context import ParallelContext

CacheKind = Literal["full", "sliding"]


class BlockPart(NamedTuple):
    """One tensor of a layer's cache, by what one block holds of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one layer keeps on one rank.

    `window`: the layer reads so many of the last tokens, the current one included; 0: all. `parts`: the tensors of its
    KVCache, in order. Attention has two, keys and values.

    Only `of_attention` knows what parts mean. An FP8 cache is parts of that dtype, whose scales are the model's; a
    latent cache would be one part, a state a part whose shape has no block size; groups, sizes and copies of blocks
    take any of them.
    """

    window: int
    parts: tuple[BlockPart, ...]

    @classmethod
    def of_attention(
        cls, *, window: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> CacheSpec:
        """Keys and values; `num_kv_heads` are this rank's."""
        part = BlockPart((block_size, num_kv_heads, head_dim), dtype)
        return cls(window, (part, part))

    @property
    def kind(self) -> CacheKind:
        return "sliding" if self.window else "full"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer alone."""
        return sum(part.num_bytes for part in self.parts)


def cache_specs(
    arch: ArchConfig, context: ParallelContext, *, block_size: int, dtype: torch.dtype
) -> tuple[CacheSpec, ...]:
    """What each layer of the whole model keeps on this rank, in blocks of `block_size` tokens, as numbers of `dtype`.
    Raises ConfigError where the ranks can neither divide nor copy the heads."""
    num_kv_heads = kv_heads_of_rank(arch.num_kv_heads, context)
    return tuple(
        CacheSpec.of_attention(
            window=layer.window,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=arch.head_dim,
            dtype=dtype,
        )
        for layer in arch.layers
    )
