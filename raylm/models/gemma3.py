"""Gemma 3, text only: norms before and after attention and MLP, local and global layers, scaled embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from raylm.layers.attention import AttentionMetadata, KVCache
from raylm.layers.attention_backends import AttentionBackend
from raylm.models.arch import ArchConfig
from raylm.models.decoder import DecoderLayer, DecoderModel, layer_norm
from raylm.models.names import GGUF_WEIGHTS
from raylm.parallel.context import ParallelContext


class Gemma3Layer(DecoderLayer):
    """A layer that also norms what attention and MLP return, before it joins the residual stream."""

    NORMS_SUM = False

    def __init__(
        self,
        arch: ArchConfig,
        layer: int,
        position_table: Tensor,
        attention: AttentionBackend,
        *,
        context: ParallelContext,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(arch, layer, position_table, attention, context=context, dtype=dtype)
        self.pre_feedforward_layernorm = layer_norm(arch, context, dtype)
        self.post_feedforward_layernorm = layer_norm(arch, context, dtype)

    def forward(
        self, delta: Tensor | None, residual: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata
    ) -> Tensor:
        x = self.self_attn(self.input_layernorm(residual, delta), positions, cache, meta)
        x = self.pre_feedforward_layernorm(residual, self.post_attention_layernorm(x))
        added: Tensor = self.post_feedforward_layernorm(self.mlp(x))
        return added


class Gemma3ForCausalLM(DecoderModel):
    """The text model."""

    GGUF_WEIGHTS = {
        **GGUF_WEIGHTS,
        "post_attention_norm": ("post_attention_layernorm", None),
        "ffn_norm": ("pre_feedforward_layernorm", None),
        "post_ffw_norm": ("post_feedforward_layernorm", None),
    }
    LAYER = Gemma3Layer


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model inside a checkpoint that also sees images: its vision weights are not loaded."""

    PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
    IGNORED = ("model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector.")
