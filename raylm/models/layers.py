"""The layers of the shared decoder: where the norms stand, and what is summed when."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from raylm.layers.attention import LayerInput
from raylm.layers.residual import ResidualStream
from raylm.models.arch import ExpertsSpec, LayerSpec, NormPlace
from raylm.models.blocks import MLP, Build, SelfAttention
from raylm.models.experts import MoE
from raylm.parallel import collectives


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm.

    `ATTENTION` is made as SelfAttention is.
    """

    ATTENTION: ClassVar[type[SelfAttention]] = SelfAttention

    def __init__(self, build: Build, spec: LayerSpec) -> None:
        super().__init__()
        sums = build.arch.norms_sum
        self.self_attn = self.ATTENTION(build.at("self_attn"), spec, norm_follows=sums)
        self.mlp = make_mlp(build.at("mlp"), spec, norm_follows=sums)
        self.input_layernorm = build.norm(sums=sums, scales=self.self_attn.takes_scaled_rows)
        self.post_attention_layernorm = build.norm(sums=sums, scales=self.mlp.takes_scaled_rows)

    def forward(self, stream: ResidualStream, step: LayerInput) -> None:
        """Adds to the stream what the layer makes of it."""
        self.self_attn.add_to(stream, stream.rows(self.input_layernorm), step)
        self.mlp.add_to(stream, stream.rows(self.post_attention_layernorm))


class SandwichNormLayer(DecoderLayer):
    """A layer that also norms what attention and MLP return, before it joins the residual stream."""

    def __init__(self, build: Build, spec: LayerSpec) -> None:
        super().__init__(build, spec)
        self.post_attention_layernorm = build.norm()  # what reads it is a norm, no product
        self.pre_feedforward_layernorm = build.norm(scales=self.mlp.takes_scaled_rows)
        self.post_feedforward_layernorm = build.norm()

    def forward(self, stream: ResidualStream, step: LayerInput) -> None:
        attended = self.self_attn(stream.rows(self.input_layernorm), step)
        stream.add(self.post_attention_layernorm(attended))
        stream.add(self.post_feedforward_layernorm(self.mlp(stream.rows(self.pre_feedforward_layernorm))))


class PostNormLayer(nn.Module):
    """Attention and MLP read the residual stream as it is; what they return is normed before it joins."""

    def __init__(self, build: Build, spec: LayerSpec) -> None:
        super().__init__()
        self.self_attn = SelfAttention(build.at("self_attn"), spec, norm_follows=False)
        self.mlp = make_mlp(build.at("mlp"), spec, norm_follows=False)
        self.post_attention_layernorm = build.norm()
        self.post_feedforward_layernorm = build.norm()

    def forward(self, stream: ResidualStream, step: LayerInput) -> None:
        """As DecoderLayer.forward."""
        stream.add(self.post_attention_layernorm(self.self_attn(stream.total(), step)))
        stream.add(self.post_feedforward_layernorm(self.mlp(stream.total())))


class NormedSumLayer(DecoderLayer):
    """Attention and MLP read the residual stream as it is; after each of them the stream itself is normed."""

    def __init__(self, build: Build, spec: LayerSpec) -> None:
        super().__init__(build, spec)
        # Their output is the stream: numbers of the model's type, no FP8 codes.
        self.input_layernorm, self.post_attention_layernorm = build.norm(), build.norm()

    def forward(self, stream: ResidualStream, step: LayerInput) -> None:
        stream.add(self.self_attn(stream.total(), step))
        stream.norm_itself(self.input_layernorm)
        stream.add(self.mlp(stream.total()))
        stream.norm_itself(self.post_attention_layernorm)


class ParallelLayer(nn.Module):
    """Attention and MLP both read the stream as the layer before left it, and are summed over the ranks at once."""

    def __init__(self, build: Build, spec: LayerSpec) -> None:
        super().__init__()
        self.self_attn = SelfAttention(build.at("self_attn"), spec, norm_follows=False)
        self.mlp = make_mlp(build.at("mlp"), spec, norm_follows=False)
        of_attention, of_mlp = self.self_attn.takes_scaled_rows, self.mlp.takes_scaled_rows
        shared = build.arch.shared_norm
        self.input_layernorm = build.norm(scales=of_attention and (of_mlp or not shared))
        self.post_attention_layernorm = None if shared else build.norm(scales=of_mlp)
        self._context = build.context

    def forward(self, stream: ResidualStream, step: LayerInput) -> None:
        """As DecoderLayer.forward."""
        x = normed = stream.rows(self.input_layernorm)
        if self.post_attention_layernorm is not None:
            normed = stream.rows(self.post_attention_layernorm)
        added = self.self_attn.partial(x, step)
        added += self.mlp.partial(normed)
        stream.add(collectives.all_reduce(added, self._context))


Layer = DecoderLayer | PostNormLayer | ParallelLayer
_LAYERS: dict[NormPlace, type[Layer]] = {
    "pre": DecoderLayer,
    "post": PostNormLayer,
    "sandwich": SandwichNormLayer,
    "parallel": ParallelLayer,
    "after": NormedSumLayer,
}


def make_layer(build: Build, number: int) -> Layer:
    """Layer `number` of the model."""
    return _LAYERS[build.arch.norm_place](build.at(f"layers.{number}"), build.arch.layers[number])


def make_mlp(build: Build, spec: LayerSpec, *, norm_follows: bool) -> MLP | MoE:
    """What a layer has behind its attention."""
    if isinstance(spec.mlp, ExpertsSpec):
        return MoE(build, spec.mlp, norm_follows=norm_follows)
    return MLP(build, spec.mlp, norm_follows=norm_follows)
