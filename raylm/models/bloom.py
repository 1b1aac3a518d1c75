"""BLOOM: linear biases for positions, LayerNorms, one of them behind the embedding, and an MLP without gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm import ops
from raylm.layers.attention import Attention, AttentionMetadata, KVCache
from raylm.layers.attention_backends import RAYLM, AttentionBackend
from raylm.layers.linear import ColumnParallelLinear, RowParallelLinear
from raylm.models.arch import ArchConfig
from raylm.models.decoder import DecoderLayer, DecoderModel, layer_norm
from raylm.parallel.context import ParallelContext


class BloomAttention(nn.Module):
    """Attention of one layer. The projection has query, key and value of a head side by side, head after head, so that
    ranks split it by heads as it is."""

    def __init__(
        self,
        arch: ArchConfig,
        layer: int,
        slopes: Tensor,
        attention: AttentionBackend,
        *,
        context: ParallelContext,
        dtype: torch.dtype,
        norm_follows: bool,
    ) -> None:
        super().__init__()
        size = arch.num_heads * arch.head_dim
        self.qkv_proj = ColumnParallelLinear(
            arch.hidden_size, 3 * size, bias=arch.qkv_bias, context=context, dtype=dtype
        )
        self.o_proj = RowParallelLinear(
            size, arch.hidden_size, bias=arch.o_bias, context=context, dtype=dtype, norm_follows=norm_follows
        )
        self._heads = (len(slopes), 3, arch.head_dim)
        self._attention = Attention(
            attention,
            scale=arch.attention_scale,
            window=arch.window(layer),
            soft_cap=arch.attention_soft_cap,
            alibi_slopes=slopes,
        )

    def forward(
        self, x: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata, residual: Tensor | None = None
    ) -> Tensor | None:
        """As SelfAttention.forward; positions follow from the cache."""
        num_tokens = x.shape[0]
        q, k, v = self.qkv_proj(x).view(num_tokens, *self._heads).unbind(2)
        ops.store_kv(k, v, *cache, meta.slot_mapping)
        out = self._attention(q, cache, meta)
        added: Tensor | None = self.o_proj(out.view(num_tokens, -1), residual)
        return added


class BloomMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, arch: ArchConfig, *, context: ParallelContext, dtype: torch.dtype, norm_follows: bool) -> None:
        super().__init__()
        size, bias = arch.intermediate_size, arch.mlp_bias
        self.up_proj = ColumnParallelLinear(arch.hidden_size, size, bias=bias, context=context, dtype=dtype)
        self.down_proj = RowParallelLinear(
            size, arch.hidden_size, bias=bias, context=context, dtype=dtype, norm_follows=norm_follows
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | None:
        """As SelfAttention.forward."""
        added: Tensor | None = self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"), residual)
        return added


class BloomLayer(DecoderLayer):
    """A layer of these parts, whose norms sum nothing over the ranks."""

    NORMS_SUM = False
    ATTENTION = BloomAttention
    MLP = BloomMLP


class BloomForCausalLM(DecoderModel):
    """The model, which norms embeddings before the first layer."""

    WEIGHTS = {
        "word_embeddings": ("embed_tokens", None),
        "word_embeddings_layernorm": ("embed_norm", None),
        "h": ("layers", None),
        "self_attention": ("self_attn", None),
        "query_key_value": ("qkv_proj", None),
        "dense": ("o_proj", None),
        "dense_h_to_4h": ("up_proj", None),
        "dense_4h_to_h": ("down_proj", None),
        "ln_f": ("norm", None),
    }
    PREFIXES = ("transformer.",)
    LAYER = BloomLayer

    def __init__(
        self, arch: ArchConfig, context: ParallelContext, dtype: torch.dtype, attention: AttentionBackend = RAYLM
    ) -> None:
        super().__init__(arch, context, dtype, attention)
        if context.is_first_stage:
            self.embed_norm = layer_norm(arch, context, dtype)

    def _embed(self, token_ids: Tensor) -> Tensor:
        normed: Tensor = self.embed_norm(super()._embed(token_ids))
        return normed

    def is_elsewhere(self, parameter: str) -> bool:
        return super().is_elsewhere(parameter) or (
            parameter.startswith("embed_norm.") and not self.context.is_first_stage
        )
