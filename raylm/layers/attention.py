"""Attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from raylm.layers.attention_backends import AttentionBackend

KVCache = tuple[Tensor, ...]
"""The parts of one layer's cache. Attention has keys and values, each [num_blocks, block_size, num_kv_heads,
head_dim], of the model's dtype or as ops.CODES."""


class CacheScales(NamedTuple):
    """Of a layer's cache that holds codes: a key is `keys` times its code, a value `values` times."""

    keys: float = 1.0
    values: float = 1.0


UNSCALED = CacheScales()
"""Of a cache of numbers, too."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which tokens of a step belong to which sequence, and where the cache holds them. T tokens, S sequences.

    Layers of one cache group share it, as their backend's `plan` returns it. Blocks that lie before a layer's window
    may be anybody's: they are not read.
    """

    query_start: Tensor
    """int32 [S + 1]: sequence s has the tokens query_start[s] to query_start[s + 1] of the step."""
    seq_lens: Tensor
    """int32 [S]: cached tokens of each sequence, those of this step included."""
    block_table: Tensor
    """int32 [S, max_blocks]: the blocks of each sequence, in order."""
    slot_mapping: Tensor
    """int64 [T]: block * block_size + offset of each token of the step."""
    max_query_len: int
    max_seq_len: int
    arrivals: Tensor | None = None
    """int32 [ops.MAX_ARRIVALS]: counters for ops.paged_attention; without them it makes some."""
    prefixes: Tensor | None = None
    """int32 [3, S], of ops.shared_prefixes: what attention may read once for several sequences."""


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What a layer has of a step beside the hidden states."""

    positions: Tensor
    """int64 [T]"""
    cache: KVCache
    """Where the step's keys and values are written."""
    meta: AttentionMetadata
    """As the backend of the layer's attention has planned it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How the attention of one layer makes its scores."""

    scale: float
    window: int = 0
    """> 0 hides keys that many positions back or more."""
    soft_cap: float = 0.0
    """> 0 bounds the scores."""
    alibi_slopes: Tensor | None = None
    """Linear biases: float32 [num_heads], those of this rank's heads."""
    sinks: Tensor | None = None
    """The same; logits without values."""
    cache: CacheScales = UNSCALED


class Attention:
    """Attends causally over all cached keys and values, those of the step among them. It holds no parameters.

    The keywords are those of Scores.
    """

    __slots__ = ("_attend", "_scores")

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        scale: float,
        window: int,
        soft_cap: float,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        cache: CacheScales = UNSCALED,
    ) -> None:
        self._attend = backend.attend
        self._scores = Scores(
            scale=scale, window=window, soft_cap=soft_cap, alibi_slopes=alibi_slopes, sinks=sinks, cache=cache
        )

    @property
    def cache_scales(self) -> CacheScales:
        """What keys and values must be stored with."""
        return self._scores.cache

    def scale_cache(self, scales: CacheScales) -> None:
        """Read the cache by these scales from now on. Nothing may be stored yet, and no CUDA graph hold the layer."""
        self._scores = replace(self._scores, cache=scales)

    def __call__(self, q: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """q [T, num_heads, head_dim] -> [T, num_heads, head_dim]. `meta` is what the backend has planned."""
        return self._attend(q, cache, meta, self._scores)
