"""What a layer of the shared decoder is made of, as an ArchConfig says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm import ops
from raylm.layers.attention import Attention, AttentionMetadata, KVCache
from raylm.layers.attention_backends import AttentionBackend
from raylm.layers.linear import ColumnParallelLinear, GatedParallelLinear, QKVParallelLinear, RowParallelLinear
from raylm.layers.norm import LayerNorm, RMSNorm
from raylm.models.arch import Activation, ArchConfig
from raylm.parallel.context import ParallelContext

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Build:
    """What all parts of a model are made with, on one rank."""

    arch: ArchConfig
    context: ParallelContext
    dtype: torch.dtype
    attention: AttentionBackend

    def norm(self, *, sums: bool = False) -> RMSNorm | LayerNorm:
        """A norm over the hidden size; `sums` as RMSNorm takes it."""
        arch = self.arch
        if arch.norm == "layer":
            return LayerNorm(arch.hidden_size, arch.norm_eps, context=self.context, dtype=self.dtype)
        return self._rms_norm(arch.hidden_size, sums=sums)

    def head_norm(self) -> RMSNorm:
        """A norm over each head."""
        return self._rms_norm(self.arch.head_dim)

    def _rms_norm(self, size: int, *, sums: bool = False) -> RMSNorm:
        arch = self.arch
        return RMSNorm(size, arch.norm_eps, context=self.context, dtype=self.dtype, offset=arch.norm_offset, sums=sums)


class SelfAttention(nn.Module):
    """Attention of one layer: project, norm heads where the family does, rotate, attend, project back.

    `position_table` is the layer's rotary table, or the slopes of its heads' linear biases.
    """

    def __init__(
        self,
        build: Build,
        layer: int,
        position_table: Tensor,
        *,
        norm_follows: bool,
        in_size: int | None = None,
    ) -> None:
        """`in_size`: columns of the input, where they are not hidden_size."""
        super().__init__()
        arch = build.arch
        self.qkv_proj, num_heads, num_kv_heads = _qkv(build, in_size or arch.hidden_size)
        self.o_proj = RowParallelLinear(
            arch.num_heads * arch.head_dim,
            arch.hidden_size,
            bias=arch.o_bias,
            context=build.context,
            dtype=build.dtype,
            norm_follows=norm_follows,
        )
        self.q_norm = build.head_norm() if arch.qk_norm else None
        self.k_norm = build.head_norm() if arch.qk_norm else None
        self._heads = (num_heads, num_kv_heads, arch.head_dim)
        self._by_heads = arch.qkv_by_heads
        self._norm_eps = arch.norm_eps
        self._rotary = None if arch.alibi or layer in arch.nope_layers else position_table
        self._attention = Attention(
            build.attention,
            scale=arch.attention_scale,
            window=arch.window(layer),
            soft_cap=arch.attention_soft_cap,
            alibi_slopes=position_table if arch.alibi else None,
        )

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        residual: Tensor | None = None,
    ) -> Tensor | None:
        """What is to be added to the residual stream; None where `residual` has it already."""
        out = self._attention(self.store(x, positions, cache, meta), cache, meta)
        added: Tensor | None = self.o_proj(out.view(len(x), -1), residual)
        return added

    def store(self, x: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """Write keys and values into the cache. Returns the queries, [T, num_heads, head_dim]."""
        q, k, v = self._project(x)
        if self._rotary is None:
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
            ops.store_kv(k, v, *cache, meta.slot_mapping)
            return q
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        # `positions` and the slots were written before the embedding or the previous stage gave x.
        ops.rope_store(
            *(q, k, v, q_weight, k_weight, self._norm_eps, positions, self._rotary, *cache, meta.slot_mapping),
            frozen=True,
        )
        return q

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the fused output, [T, heads, head_dim] each: the operators take strides."""
        num_heads, num_kv_heads, head_dim = self._heads
        fused: Tensor = self.qkv_proj(x)
        if self._by_heads:
            q, k, v = fused.view(len(x), num_heads, 3, head_dim).unbind(2)
        else:
            heads = [num_heads, num_kv_heads, num_kv_heads]
            q, k, v = fused.view(len(x), sum(heads), head_dim).split(heads, dim=1)
        return q, k, v


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, build: Build, *, norm_follows: bool) -> None:
        super().__init__()
        arch, context, dtype = build.arch, build.context, build.dtype
        size, bias = arch.intermediate_size, arch.mlp_bias
        self.gate_up_proj = GatedParallelLinear(
            arch.hidden_size, size, arch.activation, bias=bias, context=context, dtype=dtype
        )
        self.down_proj = RowParallelLinear(
            size, arch.hidden_size, bias=bias, context=context, dtype=dtype, norm_follows=norm_follows
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | None:
        """As SelfAttention.forward."""
        added: Tensor | None = self.down_proj(self.gate_up_proj(x), residual)
        return added


class PlainMLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, build: Build, *, norm_follows: bool) -> None:
        super().__init__()
        arch, context, dtype = build.arch, build.context, build.dtype
        size, bias = arch.intermediate_size, arch.mlp_bias
        self.up_proj = ColumnParallelLinear(arch.hidden_size, size, bias=bias, context=context, dtype=dtype)
        self.down_proj = RowParallelLinear(
            size, arch.hidden_size, bias=bias, context=context, dtype=dtype, norm_follows=norm_follows
        )
        self._activate = _ACTIVATIONS[arch.activation]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | None:
        """As SelfAttention.forward."""
        added: Tensor | None = self.down_proj(self._activate(self.up_proj(x)), residual)
        return added


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm. The residual stream is one tensor that the norms add to in place.

    `ATTENTION` is made as SelfAttention is.
    """

    ATTENTION: ClassVar[type[nn.Module]] = SelfAttention

    def __init__(self, build: Build, layer: int, position_table: Tensor) -> None:
        super().__init__()
        sums = build.arch.norms_sum
        self.self_attn = self.ATTENTION(build, layer, position_table, norm_follows=sums)
        self.mlp = _mlp(build, norm_follows=sums)
        self.input_layernorm = build.norm(sums=sums)
        self.post_attention_layernorm = build.norm(sums=sums)

    def forward(
        self, delta: Tensor | None, residual: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata
    ) -> Tensor | None:
        """Adds delta (what the layer below has left to add, if anything) and the attention's output to residual in
        place; returns the MLP's output, which the layer above adds, or None where it is added. All are [T,
        hidden_size]."""
        x = self.input_layernorm(residual, delta)
        delta = self.self_attn(x, positions, cache, meta, residual)
        added: Tensor | None = self.mlp(self.post_attention_layernorm(residual, delta), residual)
        return added


class SandwichNormLayer(DecoderLayer):
    """A layer that also norms what attention and MLP return, before it joins the residual stream."""

    def __init__(self, build: Build, layer: int, position_table: Tensor) -> None:
        super().__init__(build, layer, position_table)
        self.pre_feedforward_layernorm = build.norm()
        self.post_feedforward_layernorm = build.norm()

    def forward(
        self, delta: Tensor | None, residual: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata
    ) -> Tensor:
        x = self.self_attn(self.input_layernorm(residual, delta), positions, cache, meta)
        x = self.pre_feedforward_layernorm(residual, self.post_attention_layernorm(x))
        added: Tensor = self.post_feedforward_layernorm(self.mlp(x))
        return added


class ScaledLayer(DecoderLayer):
    """A layer that multiplies what attention and MLP return, before it joins the residual stream."""

    def __init__(self, build: Build, layer: int, position_table: Tensor) -> None:
        super().__init__(build, layer, position_table)
        self._multiplier = build.arch.residual_multiplier

    def forward(
        self, delta: Tensor | None, residual: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata
    ) -> Tensor:
        x = self.self_attn(self.input_layernorm(residual, delta), positions, cache, meta).mul_(self._multiplier)
        added: Tensor = self.mlp(self.post_attention_layernorm(residual, x)).mul_(self._multiplier)
        return added


class PostNormLayer(nn.Module):
    """Attention and MLP read the residual stream as it is; what they return is normed before it joins."""

    def __init__(self, build: Build, layer: int, position_table: Tensor) -> None:
        super().__init__()
        self.self_attn = SelfAttention(build, layer, position_table, norm_follows=False)
        self.mlp = _mlp(build, norm_follows=False)
        self.post_attention_layernorm = build.norm()
        self.post_feedforward_layernorm = build.norm()

    def forward(
        self, delta: Tensor | None, residual: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata
    ) -> Tensor:
        """As DecoderLayer.forward."""
        if delta is not None:
            residual.add_(delta)
        residual.add_(self.post_attention_layernorm(self.self_attn(residual, positions, cache, meta)))
        added: Tensor = self.post_feedforward_layernorm(self.mlp(residual))
        return added


def layer_class(arch: ArchConfig) -> type[DecoderLayer] | type[PostNormLayer]:
    """What the layers of a model are."""
    if arch.norm_place == "post":
        return PostNormLayer
    if arch.norm_place == "sandwich":
        return SandwichNormLayer
    return DecoderLayer if arch.residual_multiplier == 1.0 else ScaledLayer


def _mlp(build: Build, *, norm_follows: bool) -> GatedMLP | PlainMLP:
    return (GatedMLP if build.arch.gated_mlp else PlainMLP)(build, norm_follows=norm_follows)


def _qkv(build: Build, in_size: int) -> tuple[nn.Module, int, int]:
    """The projection to queries, keys and values, and how many heads of queries and of keys this rank has."""
    arch, context, dtype = build.arch, build.context, build.dtype
    if arch.qkv_by_heads:
        # Ranks split it by heads as it is.
        size = 3 * arch.num_heads * arch.head_dim
        linear = ColumnParallelLinear(in_size, size, bias=arch.qkv_bias, context=context, dtype=dtype)
        heads = context.split(arch.num_heads, "num_attention_heads")
        return linear, heads, heads
    qkv = QKVParallelLinear(
        in_size,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        bias=arch.qkv_bias,
        context=context,
        dtype=dtype,
    )
    return qkv, qkv.num_heads, qkv.num_kv_heads
