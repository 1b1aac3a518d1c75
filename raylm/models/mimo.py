"""MiMo-7B's layer for multi-token prediction (MTP), which speculative decoding drafts with."""

from __future__ import annotations

import torch
from torch import Tensor

from raylm.layers.attention import AttentionMetadata, KVCache
from raylm.layers.attention_backends import RAYLM, AttentionBackend
from raylm.layers.linear import ReplicatedLinear
from raylm.models.arch import ArchConfig
from raylm.models.blocks import Build, DecoderLayer, SelfAttention
from raylm.models.decoder import DecoderModel
from raylm.parallel.context import ParallelContext


class MtpLayer(DecoderLayer):
    """Predicts the token after next: a decoder layer over the hidden state at a position and the token behind it."""

    def __init__(self, build: Build, layer: int, position_table: Tensor) -> None:
        super().__init__(build, layer, position_table)
        size = build.arch.hidden_size
        self.token_layernorm = build.norm()
        self.hidden_layernorm = build.norm()
        self.input_proj = ReplicatedLinear(2 * size, size, context=build.context, dtype=build.dtype)
        self.final_layernorm = build.norm(sums=build.arch.norms_sum)

    def predict(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata
    ) -> Tensor:
        """hidden: the residual stream at `positions` before the base's last norm, or what this layer returned there
        for the position before; embedded: the embeddings of the tokens one position on. All are [T, hidden_size].
        Returns normed hidden states, ready for the base's head over the vocabulary."""
        residual = self._joined(embedded, hidden)
        delta = self(None, residual, positions, cache, meta)
        normed: Tensor = self.final_layernorm(residual, delta)
        return normed

    def remember(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata
    ) -> None:
        """Write the keys and values that predict() would, and compute nothing else."""
        assert isinstance(self.self_attn, SelfAttention)
        self.self_attn.store(self.input_layernorm(self._joined(embedded, hidden)), positions, cache, meta)

    def _joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        joined: Tensor = self.input_proj(
            torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedded)), dim=-1)
        )
        return joined


class MiMoForCausalLM(DecoderModel):
    """The base, and on the last stage its MTP layers where `arch.uses_mtp`; else the checkpoint's are left out."""

    def __init__(
        self, arch: ArchConfig, context: ParallelContext, dtype: torch.dtype, attention: AttentionBackend = RAYLM
    ) -> None:
        super().__init__(arch, context, dtype, attention)
        if arch.uses_mtp and context.is_last_stage:
            # Its attention is that of the base's last layer.
            last = arch.num_layers - 1
            layer = MtpLayer(Build(arch, context, dtype, attention), last, self._position_tables[last])
            self.mtp_layers = torch.nn.ModuleDict({"0": layer})
            self.eval()

    @property
    def mtp(self) -> MtpLayer:
        """The layer that drafts; only where `arch.uses_mtp`."""
        layer = self.mtp_layers["0"]
        assert isinstance(layer, MtpLayer)
        return layer

    def is_elsewhere(self, parameter: str) -> bool:
        left_out = parameter.startswith("mtp_layers.") and not hasattr(self, "mtp_layers")
        return left_out or super().is_elsewhere(parameter)
