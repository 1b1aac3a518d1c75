"""What a layer of the shared decoder is made of, as an ArchConfig says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm import ops
from raylm.layers.alibi import alibi_slopes_of_rank
from raylm.layers.attention import Attention, LayerInput
from raylm.layers.attention_backends import RAYLM, AttentionBackend
from raylm.layers.linear import ColumnParallelLinear, GatedParallelLinear, QKVParallelLinear, RowParallelLinear
from raylm.layers.norm import AllHeadsNorm, EachHeadNorm, LayerNorm, RMSNorm
from raylm.layers.residual import ResidualStream
from raylm.layers.rope_settings import RopeSettings
from raylm.layers.rotary import rotary_table
from raylm.models.arch import Activation, ArchConfig, LayerSpec, NormPlace
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True, slots=True)
class Build:
    """What all parts of a model are made with, on one rank."""

    arch: ArchConfig
    context: ParallelContext
    dtype: torch.dtype
    attention: AttentionBackend = RAYLM
    _tables: dict[RopeSettings, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def rotary_table(self, rope: RopeSettings) -> Tensor:
        """One for all layers of equal settings: at 131,072 positions it has 64 MiB."""
        if rope not in self._tables:
            size, length = self.arch.head_dim, self.arch.max_position
            self._tables[rope] = rotary_table(rope, head_dim=size, max_position=length, device=self.context.device)
        return self._tables[rope]

    def stream(self, hidden: Tensor) -> ResidualStream:
        """The residual stream of a step, which begins as `hidden` and overwrites it."""
        arch = self.arch
        return ResidualStream(hidden, self.context, norms_sum=arch.norms_sum, multiplier=arch.residual_multiplier)

    def norm(self, *, sums: bool = False) -> RMSNorm | LayerNorm:
        """A norm over the hidden size; `sums` as RMSNorm takes it."""
        arch = self.arch
        if arch.norm == "layer":
            return LayerNorm(
                arch.hidden_size,
                arch.norm_eps,
                context=self.context,
                dtype=self.dtype,
                bias=arch.norm_bias,
                offset=arch.norm_offset,
            )
        return self._rms_norm(arch.hidden_size, sums=sums)

    def head_norm(self, num_heads: int) -> RMSNorm | EachHeadNorm | AllHeadsNorm | None:
        """What queries or keys are normed with, of which the whole model has `num_heads`."""
        kind, size, eps = self.arch.qk_norm, self.arch.head_dim, self.arch.norm_eps
        if kind in ("each_head", "all_heads"):
            norm = EachHeadNorm if kind == "each_head" else AllHeadsNorm
            return norm(num_heads, size, eps, context=self.context, dtype=self.dtype)
        return None if kind is None else self._rms_norm(size)

    def _rms_norm(self, size: int, *, sums: bool = False) -> RMSNorm:
        arch = self.arch
        return RMSNorm(size, arch.norm_eps, context=self.context, dtype=self.dtype, offset=arch.norm_offset, sums=sums)


class SelfAttention(nn.Module):
    """Attention of one layer: project, norm heads where the family does, rotate, attend, project back."""

    def __init__(self, build: Build, spec: LayerSpec, *, norm_follows: bool, in_size: int | None = None) -> None:
        """`in_size`: columns of the input, where they are not hidden_size."""
        super().__init__()
        arch = build.arch
        self.qkv_proj = QKVParallelLinear(
            in_size or arch.hidden_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            bias=arch.qkv_bias,
            context=build.context,
            dtype=build.dtype,
        )
        self.o_proj = RowParallelLinear(
            arch.num_heads * arch.head_dim,
            arch.hidden_size,
            bias=arch.o_bias,
            context=build.context,
            dtype=build.dtype,
            norm_follows=norm_follows,
        )
        self.q_norm = build.head_norm(arch.num_heads)
        self.k_norm = build.head_norm(arch.num_kv_heads)
        self._heads, self._head_dim = [self.qkv_proj.num_heads, *[self.qkv_proj.num_kv_heads] * 2], arch.head_dim
        self._norm_eps = arch.norm_eps
        self._rotary = build.rotary_table(spec.rope) if spec.rope is not None else None
        self._attention = Attention(
            build.attention,
            scale=arch.attention_scale,
            window=spec.window,
            soft_cap=arch.attention_soft_cap,
            alibi_slopes=alibi_slopes_of_rank(arch.num_heads, build.context) if arch.alibi else None,
        )

    def forward(self, x: Tensor, step: LayerInput) -> Tensor:
        """x, output: [T, hidden_size]."""
        return self.o_proj.forward(self.attend(x, step))

    def attend(self, x: Tensor, step: LayerInput) -> Tensor:
        """What o_proj takes."""
        return self._attention(self.store(x, step), step.cache, step.meta).view(len(x), -1)

    def store(self, x: Tensor, step: LayerInput) -> Tensor:
        """Write keys and values into the cache. Returns the queries, [T, num_heads, head_dim]."""
        fused: Tensor = self.qkv_proj(x)
        # Views: the operators take strides.
        q, k, v = fused.view(len(x), sum(self._heads), self._head_dim).split(self._heads, dim=1)
        q_weight = k_weight = None
        if self._rotary is not None and isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        elif self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        if self._rotary is None:
            ops.store_kv(k, v, *step.cache, step.meta.slot_mapping)
            return q
        # Positions and slots were written before the embedding or the previous stage gave x.
        ops.rope_store(
            *(q, k, v, q_weight, k_weight, self._norm_eps, step.positions, self._rotary),
            *(*step.cache, step.meta.slot_mapping),
            frozen=True,
        )
        return q


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x)))."""

    def __init__(self, build: Build, spec: LayerSpec, *, norm_follows: bool) -> None:
        super().__init__()
        mlp, context, dtype, hidden = spec.mlp, build.context, build.dtype, build.arch.hidden_size
        if mlp.gated:
            self.gate_up_proj = GatedParallelLinear(
                hidden, mlp.size, mlp.activation, bias=mlp.bias, context=context, dtype=dtype
            )
        else:
            self.up_proj = ColumnParallelLinear(hidden, mlp.size, bias=mlp.bias, context=context, dtype=dtype)
        self.down_proj = RowParallelLinear(
            mlp.size, hidden, bias=mlp.bias, context=context, dtype=dtype, norm_follows=norm_follows
        )
        self._activate = None if mlp.gated else _ACTIVATIONS[mlp.activation]

    def forward(self, x: Tensor) -> Tensor:
        """x, output: [T, hidden_size]."""
        return self.down_proj.forward(self.widen(x))

    def widen(self, x: Tensor) -> Tensor:
        """What down_proj takes."""
        widened: Tensor = self.gate_up_proj(x) if self._activate is None else self._activate(self.up_proj(x))
        return widened


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm.

    `ATTENTION` is made as SelfAttention is.
    """

    ATTENTION: ClassVar[type[SelfAttention]] = SelfAttention

    def __init__(self, build: Build, spec: LayerSpec) -> None:
        super().__init__()
        sums = build.arch.norms_sum
        self.self_attn = self.ATTENTION(build, spec, norm_follows=sums)
        self.mlp = MLP(build, spec, norm_follows=sums)
        self.input_layernorm = build.norm(sums=sums)
        self.post_attention_layernorm = build.norm(sums=sums)

    def forward(self, stream: ResidualStream, step: LayerInput) -> None:
        """Adds to the stream what the layer makes of it."""
        attended = self.self_attn.attend(stream.normed(self.input_layernorm), step)
        stream.add_product(self.self_attn.o_proj, attended)
        stream.add_product(self.mlp.down_proj, self.mlp.widen(stream.normed(self.post_attention_layernorm)))


class SandwichNormLayer(DecoderLayer):
    """A layer that also norms what attention and MLP return, before it joins the residual stream."""

    def __init__(self, build: Build, spec: LayerSpec) -> None:
        super().__init__(build, spec)
        self.pre_feedforward_layernorm = build.norm()
        self.post_feedforward_layernorm = build.norm()

    def forward(self, stream: ResidualStream, step: LayerInput) -> None:
        attended = self.self_attn(stream.normed(self.input_layernorm), step)
        stream.add(self.post_attention_layernorm(attended))
        stream.add(self.post_feedforward_layernorm(self.mlp(stream.normed(self.pre_feedforward_layernorm))))


class PostNormLayer(nn.Module):
    """Attention and MLP read the residual stream as it is; what they return is normed before it joins."""

    def __init__(self, build: Build, spec: LayerSpec) -> None:
        super().__init__()
        self.self_attn = SelfAttention(build, spec, norm_follows=False)
        self.mlp = MLP(build, spec, norm_follows=False)
        self.post_attention_layernorm = build.norm()
        self.post_feedforward_layernorm = build.norm()

    def forward(self, stream: ResidualStream, step: LayerInput) -> None:
        """As DecoderLayer.forward."""
        stream.add(self.post_attention_layernorm(self.self_attn(stream.total(), step)))
        stream.add(self.post_feedforward_layernorm(self.mlp(stream.total())))


class ParallelLayer(nn.Module):
    """Attention and MLP both read the stream as the layer before left it, and are summed over the ranks at once."""

    def __init__(self, build: Build, spec: LayerSpec) -> None:
        super().__init__()
        self.self_attn = SelfAttention(build, spec, norm_follows=False)
        self.mlp = MLP(build, spec, norm_follows=False)
        self.input_layernorm = build.norm()
        self.post_attention_layernorm = None if build.arch.shared_norm else build.norm()
        self._context = build.context

    def forward(self, stream: ResidualStream, step: LayerInput) -> None:
        """As DecoderLayer.forward."""
        x = normed = stream.normed(self.input_layernorm)
        if self.post_attention_layernorm is not None:
            normed = stream.normed(self.post_attention_layernorm)
        added = self.self_attn.o_proj.partial(self.self_attn.attend(x, step))
        added += self.mlp.down_proj.partial(self.mlp.widen(normed))
        stream.add(collectives.all_reduce(added, self._context))


Layer = DecoderLayer | PostNormLayer | ParallelLayer
_LAYERS: dict[NormPlace, type[Layer]] = {
    "pre": DecoderLayer,
    "post": PostNormLayer,
    "sandwich": SandwichNormLayer,
    "parallel": ParallelLayer,
}


def make_layer(build: Build, number: int) -> Layer:
    """Layer `number` of the model."""
    return _LAYERS[build.arch.norm_place](build, build.arch.layers[number])
