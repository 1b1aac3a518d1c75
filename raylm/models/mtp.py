"""A layer for multi-token prediction (MTP) in the form of MiMo-7B, which speculative decoding drafts with."""

from __future__ import annotations

import torch
from torch import Tensor

from raylm.layers.attention import LayerInput
from raylm.layers.linear import ReplicatedLinear
from raylm.models.arch import LayerSpec
from raylm.models.blocks import Build
from raylm.models.decoder import DecoderModel
from raylm.models.layers import DecoderLayer


class MtpLayer(DecoderLayer):
    """Predicts the token after next: a decoder layer over the hidden state at a position and the token behind it."""

    def __init__(self, build: Build, spec: LayerSpec) -> None:
        super().__init__(build, spec)
        self._build = build
        size = build.arch.hidden_size
        self.token_layernorm = build.norm()
        self.hidden_layernorm = build.norm()
        self.input_proj = ReplicatedLinear(2 * size, size, context=build.context, dtype=build.dtype)
        self.final_layernorm = build.norm(sums=build.arch.norms_sum)

    def predict(self, embedded: Tensor, hidden: Tensor, step: LayerInput) -> Tensor:
        """hidden: the residual stream at the step's positions before the base's last norm, or what this layer returned
        there for the position before; embedded: the embeddings of the tokens one position on. All are [T, hidden_size].
        Returns normed hidden states, ready for the base's head over the vocabulary."""
        stream = self._build.stream(self._joined(embedded, hidden))
        self(stream, step)
        return stream.normed(self.final_layernorm)

    def remember(self, embedded: Tensor, hidden: Tensor, step: LayerInput) -> None:
        """Write the keys and values that predict() would, and compute nothing else."""
        self.self_attn.store(self.input_layernorm(self._joined(embedded, hidden)), step)

    def _joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        joined: Tensor = self.input_proj(
            torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedded)), dim=-1)
        )
        return joined


class MtpDecoder(DecoderModel):
    """The base, and on the last stage its MTP layers where `arch.uses_mtp`; else the checkpoint's are left out."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        if build.arch.uses_mtp and build.context.is_last_stage:
            # It is as the base's last layer is.
            self.mtp_layers = torch.nn.ModuleDict({"0": MtpLayer(build, build.arch.layers[-1])})
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
