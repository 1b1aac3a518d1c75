"""What stands in transformers' modules in place of their own: attention over the paged cache, linear layers that ranks
split, and the parts that another stage has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, cast

from torch import FloatTensor, Tensor, nn
from transformers import AttentionInterface
from transformers.activations import GELUTanh, SiLUActivation
from transformers.integrations.moe import _default_apply_gate
from transformers.modeling_outputs import MoeModelOutputWithPast

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.attention import UNSCALED, Attention, CacheScales, LayerInput
from raylm.layers.attention_backends import AttentionBackend
from raylm.layers.embedding import VocabParallelEmbedding
from raylm.layers.experts import ParallelExperts
from raylm.layers.linear import ColumnParallelLinear, RowParallelLinear
from raylm.layers.slots import Slot, SlotName
from raylm.layers.weight import PLAIN
from raylm.models.blocks import Build
from raylm.parallel import collectives

ATTENTION = "raylm_paged"
"""The name that transformers knows `attend` by."""
_SPLITS = ("colwise", "rowwise")
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""What transformers calls linear layers that choose experts or weigh them; such layers are not quantised."""
_ACTIVATIONS: dict[type, Literal["silu", "gelu_tanh"]] = {
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    GELUTanh: "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What attention needs of a step, handed through transformers' modules."""

    backend: AttentionBackend
    layers: Mapping[int, LayerInput]
    """By a layer's number in the whole model."""
    windows: Sequence[int]
    """Of all layers; 0 where there is none."""
    scales: Mapping[int, CacheScales]
    """Of the caches of layers, where they are not 1."""
    attended: set[int] = field(default_factory=set)
    """Layers that have called attention."""


class AttentionModule(Protocol):
    """A layer's attention, as transformers has it."""

    layer_idx: int


def attend(
    module: AttentionModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged_step: PagedStep,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it. query [1, num_heads, T, head_dim]; key and value, of the tokens of this step
    alone, [1, num_kv_heads, T, head_dim]. Returns [1, T, num_heads, head_dim]. Raises ConfigError for what raylm's
    attention is not."""
    number = module.layer_idx
    step, window = paged_step.layers[number], paged_step.windows[number]
    if number in paged_step.attended:
        raise ConfigError(f"layer {number} attends twice, but the cache has keys and values for once a layer")
    paged_step.attended.add(number)
    q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
    heads = step.cache[0].shape[2:]
    if k.shape[1:] != heads or v.shape[1:] != heads or q.shape[-1] != heads[1]:
        raise ConfigError(
            f"layer {number}: keys are {tuple(k.shape[1:])}, values {tuple(v.shape[1:])} and queries "
            f"{tuple(q.shape[1:])} (heads, head_dim), but the cache holds {tuple(heads)}, as config.json says"
        )
    if attention_mask is not None or others.get("is_causal") is False or others.get("position_bias") is not None:
        raise ConfigError(f"layer {number} attends with a mask or biases of its own; allowed: causal attention alone")
    if (others.get("sliding_window") or 0) != window:
        raise ConfigError(
            f"layer {number} has a window of {others.get('sliding_window') or 0}, but config.json says {window}"
        )
    scales = paged_step.scales.get(number, UNSCALED)
    ops.store_kv(k, v, *step.cache, step.meta.slot_mapping, k_scale=scales.keys, v_scale=scales.values)
    attention = Attention(
        paged_step.backend,
        scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window,
        soft_cap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
        cache=scales,
    )
    return attention(q, step.cache, step.meta).unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend)


class _Column(ColumnParallelLinear):
    def forward(self, x: ops.Rows) -> Tensor:
        assert isinstance(x, Tensor)
        found = super().forward(x.flatten(0, -2))
        assert isinstance(found, Tensor)
        return found.unflatten(0, x.shape[:-1])


class _Row(RowParallelLinear):
    def forward(self, x: ops.Rows) -> Tensor:
        assert isinstance(x, Tensor)
        return super().forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


class _Experts(ParallelExperts):
    """As transformers calls them; each split between tensor ranks."""

    def __init__(self, own: nn.Module, build: Build) -> None:
        count, hidden, size = own.get_parameter("down_proj").shape
        activation = _ACTIVATIONS[type(own.get_submodule("act_fn"))]
        super().__init__(count, hidden, size, activation, context=build.context, dtype=build.dtype)
        self._context = build.context

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = hidden_states.flatten(0, -2)
        chosen = top_k_index.flatten(0, -2).long().contiguous()
        found = super().forward(rows, top_k_weights.flatten(0, -2).float().contiguous(), chosen)
        return collectives.all_reduce(found, self._context).view(hidden_states.shape)

    def slots(self) -> dict[SlotName, Slot]:
        """By transformers' names of an expert's projections."""
        names = {"gate": "gate_proj", "up": "up_proj"}
        return {
            (name.replace("gate_up_proj", names[shard]) if shard else name, None): slot
            for (name, shard), slot in super().slots().items()
        }


class Head(VocabParallelEmbedding):
    """[1, S, hidden_size] -> logits [1, S, vocab_size]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden.squeeze(0)).unsqueeze(0)


class TiedHead(nn.Module):
    """Logits by the embedding's weights: [1, S, hidden_size] -> [1, S, vocab_size]."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple: its weights are not this module's

    def forward(self, hidden: Tensor) -> Tensor:
        (embedding,) = self._embedding
        rows = hidden.squeeze(0)
        if isinstance(embedding, VocabParallelEmbedding):
            return embedding.logits(rows).unsqueeze(0)
        assert isinstance(embedding, nn.Embedding)
        return ops.linear(rows, embedding.weight, None, frozen=True).unsqueeze(0)


@dataclass
class _Hidden(MoeModelOutputWithPast):
    """With what other models' outputs have beside a mixture's."""

    cross_attentions: None = None


class Given(nn.Module):
    """Stands for the layers when transformers' code computes logits: returns the hidden states that it is given."""

    def forward(self, *others: object, inputs_embeds: Tensor, **more: object) -> _Hidden:
        return _Hidden(last_hidden_state=cast(FloatTensor, inputs_embeds))


class Elsewhere(nn.Module):
    """Stands for a part that another stage has: returns its input."""

    attention_type = "full_attention"  # some models ask their layers for the kind of mask, of which there is none here

    def forward(self, hidden_states: Tensor, *others: object, **more: object) -> Tensor:
        return hidden_states


def split_experts(backbone: nn.Module, build: Build) -> None:
    """Replace experts of transformers' common form (gated, no biases, gate's rows before up's) by raylm's. Routers
    stay the model's own, and so do experts of any other form."""
    for path, module in list(backbone.named_modules()):
        is_gated = getattr(module, "has_gate", False) and getattr(module, "is_concatenated", True)
        is_other = any(getattr(module, name, False) for name in ("has_bias", "is_transposed", "has_post_expert_norm"))
        gate = getattr(type(module), "_apply_gate", None)
        if (
            is_gated
            and not is_other
            and gate is _default_apply_gate
            and type(module.get_submodule("act_fn")) in _ACTIVATIONS
        ):
            backbone.set_submodule(path, _Experts(module, build))


def split_linears(backbone: nn.Module, plan: Mapping[str, str] | None, build: Build) -> None:
    """Replace the linear layers by raylm's, split between tensor ranks as transformers' plan says. Raises ConfigError
    where there is none, or one that raylm cannot follow."""
    context = build.context
    plan = plan or {}
    if context.tensor_size > 1:
        _check_plan(plan, build)
    whole = replace(context, tensor_rank=0, tensor_size=1)
    for path, module in list(backbone.named_modules()):
        if type(module) is not nn.Linear:
            continue
        way = plan.get(re.sub(r"\b\d+\b", "*", path))
        kind = _Row if way == "rowwise" else _Column
        backbone.set_submodule(
            path,
            kind(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                context=context if way in _SPLITS else whole,
                dtype=build.dtype,
                forms=PLAIN if set(path.split(".")) & set(_ROUTERS) else build.scheme.of_linears,
            ),
        )


def _check_plan(plan: Mapping[str, str], build: Build) -> None:
    asked = f"parallel.tensor is {build.context.tensor_size}, but this model runs through transformers, which"
    layers = {name: way for name, way in plan.items() if name.startswith("layers.") and ".experts" not in name}
    if not any(way in _SPLITS for way in layers.values()):
        raise ConfigError(f"{asked} has no plan to split it; allowed: 1")
    for name, way in layers.items():
        if way not in _SPLITS and not way.startswith("replicated"):
            raise ConfigError(
                f"{asked} splits its {name} as {way!r}; allowed: 1, or models with {' and '.join(_SPLITS)}"
            )
    build.context.split(build.arch.num_kv_heads, "num_key_value_heads")
