"""Attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from raylm.layers.attention_backends import AttentionBackend

KVCache = tuple[Tensor, ...]
"""Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which tokens of a step belong to which sequence, and where the cache holds them. T tokens, S sequences.

    Layers of one cache group share it. Blocks that lie before a layer's window may be anybody's: they are not read.
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


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What a layer has of a step beside the hidden states."""

    positions: Tensor
    """int64 [T]"""
    cache: KVCache
    """Where the step's keys and values are written."""
    meta: AttentionMetadata


class Attention:
    """Attends causally over all cached keys and values, those of the step among them. It holds no parameters.

    `window` > 0 hides keys that many positions back or more; `soft_cap` > 0 bounds the scores; `alibi_slopes` (float32
    [num_heads], those of this rank's heads) give the scores linear biases; `sinks`
    (the same) are logits without values.
    """

    __slots__ = ("_alibi_slopes", "_attend", "_scale", "_sinks", "_soft_cap", "_window")

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        scale: float,
        window: int,
        soft_cap: float,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._attend = backend.attend
        self._scale = scale
        self._window = window
        self._soft_cap = soft_cap
        self._alibi_slopes = alibi_slopes
        self._sinks = sinks

    def __call__(self, q: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """q [T, num_heads, head_dim] -> [T, num_heads, head_dim]."""
        k_cache, v_cache = cache
        return self._attend(
            q,
            k_cache,
            v_cache,
            meta.block_table,
            meta.query_start,
            meta.seq_lens,
            max_query_len=meta.max_query_len,
            max_seq_len=meta.max_seq_len,
            scale=self._scale,
            window=self._window,
            soft_cap=self._soft_cap,
            alibi_slopes=self._alibi_slopes,
            arrivals=meta.arrivals,
            sinks=self._sinks,
        )
