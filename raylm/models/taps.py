"""Hidden states from inside a model, for what drafts from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from raylm.models.decoder import DecoderModel


class HiddenTaps:
    """Keeps the residual stream of a step before some layers; a model without taps pays nothing.

    It lies in one buffer of fixed place, so a step may be captured in a CUDA graph. Every row of the residual must be
    on this rank: the model's context must not split norms between tensor ranks.
    """

    def __init__(self, model: DecoderModel, layers: Sequence[int], *, max_tokens: int) -> None:
        """`layers` count from 0; the model's num_layers stands for its last norm. The model must have one stage."""
        arch = model.arch
        self._buffer = torch.zeros(
            max_tokens, len(layers), arch.hidden_size, dtype=model.dtype, device=model.context.device
        )
        if any(layer < arch.num_layers for layer in layers):
            model.runs_layers_together = False
        for place, layer in enumerate(layers):
            norm = model.norm if layer == arch.num_layers else model.layers[str(layer)].get_submodule("input_layernorm")
            # The norm adds the layer before to the residual stream in place, and reads it next.
            norm.register_forward_hook(partial(self._keep, place))

    def take(self, num_tokens: int) -> Tensor:
        """What the step of `num_tokens` tokens left, [num_tokens, len(layers) * hidden_size]: valid until the model
        runs again."""
        return self._buffer[:num_tokens].flatten(1)

    def _keep(self, place: int, norm: nn.Module, args: tuple[Tensor, ...], normed: Tensor) -> None:
        residual = args[0]
        self._buffer[: len(residual), place].copy_(residual)
