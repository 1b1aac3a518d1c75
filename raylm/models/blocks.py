"""What a layer of the shared decoder is made of, as an ArchConfig says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm import ops
from raylm.layers.alibi import alibi_slopes_of_rank
from raylm.layers.attention import UNSCALED, Attention, CacheScales, LayerInput
from raylm.layers.attention_backends import RAYLM, AttentionBackend
from raylm.layers.linear import ColumnParallelLinear, GatedParallelLinear, QKVParallelLinear, RowParallelLinear
from raylm.layers.norm import AllHeadsNorm, EachHeadNorm, LayerNorm, RMSNorm
from raylm.layers.residual import ResidualStream
from raylm.layers.rope_settings import RopeSettings
from raylm.layers.rotary import query_stretch, rotary_table
from raylm.layers.slots import Slot, SlotName, empty_parameter
from raylm.layers.weight import Forms, column_unit
from raylm.models.arch import Activation, ArchConfig, LayerSpec, MLPSpec
from raylm.models.scheme import AS_NUMBERS, Scheme
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
    scheme: Scheme = AS_NUMBERS
    cache_scales: Mapping[int, CacheScales] = field(default_factory=dict)
    """Of layers by their numbers, where they are not 1."""
    path: str = ""
    """Of the part that is being made, in names of parameters: "layers.3.mlp."."""
    _tables: dict[RopeSettings, Tensor] = field(default_factory=dict, repr=False, compare=False)
    _stretches: dict[RopeSettings, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def at(self, name: str) -> Build:
        """For the part `name` of this part."""
        return replace(self, path=f"{self.path}{name}.")

    def forms(self, name: str) -> Forms:
        """How the checkpoint stores the matrix of the linear layer `name`."""
        return self.scheme.forms(f"{self.path}{name}.weight")

    @property
    def scales_of_layer(self) -> CacheScales:
        """Of the cache of the model's layer that this part belongs to."""
        top, _, rest = self.path.partition(".")
        number = rest.partition(".")[0]
        is_layer = top == "layers" and number.isdecimal()
        return self.cache_scales.get(int(number), UNSCALED) if is_layer else UNSCALED

    def rotary_table(self, rope: RopeSettings) -> Tensor:
        """One for all layers of equal settings: at 131,072 positions it has 64 MiB."""
        if rope not in self._tables:
            size, length = self.arch.head_dim, self.arch.max_position
            self._tables[rope] = rotary_table(rope, head_dim=size, max_position=length, device=self.context.device)
        return self._tables[rope]

    def query_stretch(self, rope: RopeSettings | None) -> Tensor | None:
        """As rotary.query_stretch, one for all layers of equal settings; None where it changes no query."""
        length = self.arch.max_position
        if rope is None or not rope.stretches_queries(length):
            return None
        if rope not in self._stretches:
            device = self.context.device
            self._stretches[rope] = query_stretch(rope, max_position=length, dtype=self.dtype, device=device)
        return self._stretches[rope]

    def stream(self, hidden: Tensor) -> ResidualStream:
        """The residual stream of a step, which begins as `hidden` and overwrites it."""
        arch = self.arch
        return ResidualStream(hidden, self.context, norms_sum=arch.norms_sum, multiplier=arch.residual_multiplier)

    def norm(self, *, sums: bool = False, scales: bool = False) -> RMSNorm | LayerNorm:
        """A norm over the hidden size; `sums` and `scales` as RMSNorm takes them."""
        arch = self.arch
        if arch.norm == "layer":
            return LayerNorm(
                arch.hidden_size,
                arch.norm_eps,
                context=self.context,
                dtype=self.dtype,
                bias=arch.norm_bias,
                offset=arch.norm_offset,
                scales=scales,
            )
        return self._rms_norm(arch.hidden_size, sums=sums, scales=scales)

    def head_norm(self, num_heads: int) -> RMSNorm | EachHeadNorm | AllHeadsNorm | None:
        """What queries or keys are normed with, of which the whole model has `num_heads`."""
        kind, size, eps = self.arch.qk_norm, self.arch.head_dim, self.arch.norm_eps
        if kind == "all_heads":
            return AllHeadsNorm(num_heads, size, eps, context=self.context, dtype=self.dtype)
        if kind in ("each_head", "heads_apart"):
            apart = kind == "heads_apart"
            return EachHeadNorm(num_heads, size, eps, context=self.context, dtype=self.dtype, apart=apart)
        return None if kind is None else self._rms_norm(size)

    def _rms_norm(self, size: int, *, sums: bool = False, scales: bool = False) -> RMSNorm:
        arch = self.arch
        return RMSNorm(
            size,
            arch.norm_eps,
            context=self.context,
            dtype=self.dtype,
            offset=arch.norm_offset,
            sums=sums,
            scales=scales,
        )


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
            forms=build.forms("qkv_proj"),
        )
        self.takes_scaled_rows = self.qkv_proj.weight.takes_scaled_rows
        self.o_proj = RowParallelLinear(
            arch.num_heads * arch.head_dim,
            arch.hidden_size,
            bias=arch.o_bias,
            context=build.context,
            dtype=build.dtype,
            norm_follows=norm_follows,
            forms=build.forms("o_proj"),
        )
        self.q_norm = build.head_norm(arch.num_heads)
        self.k_norm = build.head_norm(arch.num_kv_heads)
        self._heads, self._head_dim = [self.qkv_proj.num_heads, *[self.qkv_proj.num_kv_heads] * 2], arch.head_dim
        self._norm_eps = arch.norm_eps
        self._rotary = build.rotary_table(spec.rope) if spec.rope is not None else None
        self._stretch = build.query_stretch(spec.rope)
        self.sinks = self._sinks(build) if arch.sinks else None
        self._attention = Attention(
            build.attention,
            scale=arch.attention_scale,
            window=spec.window,
            soft_cap=arch.attention_soft_cap,
            alibi_slopes=alibi_slopes_of_rank(arch.num_heads, build.context) * arch.alibi if arch.alibi else None,
            sinks=self.sinks,
            cache=build.scales_of_layer,
        )
        self._first_head, self._num_heads = build.context.tensor_rank * self.qkv_proj.num_heads, arch.num_heads

    def _sinks(self, build: Build) -> nn.Parameter:
        """Of this rank's heads; float32, as the operator takes them."""
        return empty_parameter(self.qkv_proj.num_heads, dtype=torch.float32, device=build.context.device)

    def slots(self) -> dict[SlotName, Slot]:
        """Of its own parameter; its layers have theirs."""
        if self.sinks is None:
            return {}
        return {("sinks", None): Slot(self.sinks, (self._num_heads,), start=self._first_head)}

    def scale_cache(self, scales: CacheScales) -> None:
        """As Attention.scale_cache, for what is stored too."""
        self._attention.scale_cache(scales)

    def forward(self, x: ops.Rows, step: LayerInput) -> Tensor:
        """x, output: [T, hidden_size]. Only where it `takes_scaled_rows` x may be ScaledRows."""
        return self.o_proj.forward(self._attend(x, step))

    def partial(self, x: ops.Rows, step: LayerInput) -> Tensor:
        """This rank's share of the sum over the ranks."""
        return self.o_proj.partial(self._attend(x, step))

    def add_to(self, stream: ResidualStream, x: ops.Rows, step: LayerInput) -> None:
        """Add the output to the stream."""
        stream.add_product(self.o_proj, self._attend(x, step))

    def _attend(self, x: ops.Rows, step: LayerInput) -> Tensor:
        return self._attention(self.store(x, step), step.cache, step.meta).view(len(x), -1)

    def store(self, x: ops.Rows, step: LayerInput) -> Tensor:
        """Write keys and values into the cache. Returns the queries, [T, num_heads, head_dim]."""
        fused: Tensor = self.qkv_proj(x)
        # Views: the operators take strides.
        q, k, v = fused.view(len(x), sum(self._heads), self._head_dim).split(self._heads, dim=1)
        q_weight = k_weight = None
        if self._rotary is not None and isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        elif self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        k_scale, v_scale = self._attention.cache_scales
        if self._rotary is None:
            ops.store_kv(k, v, *step.cache, step.meta.slot_mapping, k_scale=k_scale, v_scale=v_scale)
            return q
        # Positions and slots were written before the embedding or the previous stage gave x.
        ops.rope_store(
            *(q, k, v, q_weight, k_weight, self._norm_eps, step.positions, self._rotary),
            *(*step.cache, step.meta.slot_mapping),
            frozen=True,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return q if self._stretch is None else q * self._stretch.index_select(0, step.positions)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x)))."""

    def __init__(self, build: Build, mlp: MLPSpec, *, norm_follows: bool) -> None:
        super().__init__()
        context, dtype, hidden = build.context, build.dtype, build.arch.hidden_size
        forms = build.forms("down_proj")
        unit = column_unit(forms.get(None))
        down_proj = RowParallelLinear(
            mlp.size,
            hidden,
            bias=mlp.bias,
            context=context,
            dtype=dtype,
            norm_follows=norm_follows,
            forms=forms,
            unit=unit,
        )
        if mlp.gated:
            self.gate_up_proj = GatedParallelLinear(
                *(hidden, mlp.size, mlp.activation),
                bias=mlp.bias,
                context=context,
                dtype=dtype,
                forms=build.forms("gate_up_proj"),
                scales=down_proj.weight.takes_scaled_rows,
                unit=unit,
            )
            self.takes_scaled_rows = self.gate_up_proj.weight.takes_scaled_rows
        else:
            self.up_proj = ColumnParallelLinear(
                *(hidden, mlp.size),
                bias=mlp.bias,
                context=context,
                dtype=dtype,
                forms=build.forms("up_proj"),
                unit=unit,
            )
            self.takes_scaled_rows = self.up_proj.weight.takes_scaled_rows
        self.down_proj = down_proj
        self._activate = None if mlp.gated else _ACTIVATIONS[mlp.activation]

    def forward(self, x: ops.Rows) -> Tensor:
        """x, output: [T, hidden_size]. Only where it `takes_scaled_rows` x may be ScaledRows."""
        return self.down_proj.forward(self._widen(x))

    def partial(self, x: ops.Rows) -> Tensor:
        """This rank's share of the sum over the ranks."""
        return self.down_proj.partial(self._widen(x))

    def add_to(self, stream: ResidualStream, x: ops.Rows) -> None:
        """Add the output to the stream."""
        stream.add_product(self.down_proj, self._widen(x))

    def _widen(self, x: ops.Rows) -> ops.Rows:
        widened: ops.Rows = self.gate_up_proj(x) if self._activate is None else self._activate(self.up_proj(x))
        return widened
