"""All layers of a decode step of few rows as one operator: at so few rows the time between kernels is what is felt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raylm import ops
from raylm.layers.attention import LayerInput
from raylm.layers.dtypes import dtype_name
from raylm.layers.expert_weights import PatchedExperts, PlainExperts
from raylm.layers.linear import QKVParallelLinear
from raylm.layers.slots import FP8_PATCHES, PatchForm
from raylm.layers.weight import BlockWeight, PatchedWeight, PlainWeight, ScaledWeight
from raylm.models.arch import ArchConfig, ExpertsSpec, MLPSpec
from raylm.models.blocks import Build
from raylm.parallel.collectives import agree_on_min
from raylm.parallel.context import ParallelContext

_log = logging.getLogger(__name__)

_FASTER_ON_GPUS = 2
"""Rows, as measured on an H200. Four rows of Llama-3.1-8B make 936 tokens/s layer by layer and 887 in one kernel, in
FP8 1,322 and 1,305."""
_FASTER_WITH_SPLIT_CODES = 4
"""The same of codes with a scale a row that tensor ranks share: on two H200s four rows of it make 1,767 tokens/s layer
by layer and 1,895 in one kernel (in bfloat16 1,442 and 1,407)."""
_FASTER_ON_CPUS = 64
"""Rows, as measured with one thread on an AMD EPYC. The layers of SmolLM2-135M in Q4_1 take 19 ms layer by layer and 12
in one operator with one row, 155 and 145 with 64; with 200 one operator gains nothing."""

_ATTENTION_PRODUCTS = ("self_attn.qkv_proj.weight", "self_attn.o_proj.weight")
_PRODUCTS = 4
"""Weights of a layer that rows are multiplied by: qkv, o, gate and up, down."""


def most_rows(device: torch.device) -> int:
    """For how many rows FewRows is worth a try on the device."""
    return _FASTER_ON_CPUS if device.type == "cpu" else ops.FEW_ROWS


class FewRows:
    """Runs all layers of a stage, where there is an operator for that: it takes steps of up to `most_rows` rows."""

    def __init__(self, build: Build, layers: Sequence[nn.Module], *, block_size: int, cache_dtype: torch.dtype) -> None:
        """The layers are a DecoderModel's; `block_size` and `cache_dtype` are the cache's."""
        arch, context = build.arch, build.context
        self.most_rows = 0
        self._run: _Run | None = None
        reason = why_not(arch, context, block_size)
        if cache_dtype != build.dtype:
            reason = f"the cache is {dtype_name(cache_dtype)}, and it reads one of {dtype_name(build.dtype)} alone"
        if reason is None:
            run = _on_cpu(build, layers) if context.device.type == "cpu" else _on_gpu(build, layers)
            if isinstance(run, str):
                reason = run
            else:
                self._run, self.most_rows = run
        if reason is not None:
            _log.info("Decode steps of few rows run layer by layer, not all layers in one kernel: %s.", reason)
            return
        _log.info("Decode steps of up to %d rows run all layers in one kernel.", self.most_rows)

    def __call__(self, residual: Tensor, step: Sequence[LayerInput]) -> None:
        """All layers, on the residual stream [S, hidden_size] in place, for a token of each of S sequences, whose keys
        and values are written into the caches."""
        assert self._run is not None, "most_rows is 0"
        keys, values = [layer.cache[0] for layer in step], [layer.cache[1] for layer in step]
        self._run(residual, keys, values, step[0])


_Run = Callable[[Tensor, list[Tensor], list[Tensor], LayerInput], None]
"""All layers over the residual stream, with their caches' keys and values, and what they share of a step."""


def _on_gpu(build: Build, layers: Sequence[nn.Module]) -> tuple[_Run, int] | str:
    """What runs the layers, and how many rows at most; or why nothing does. The same on all ranks."""
    arch, table = build.arch, _rotary_table(build)
    heads = layers[0].get_submodule("self_attn.qkv_proj")
    assert isinstance(heads, QKVParallelLinear)
    num_kv_heads = heads.num_kv_heads
    of_experts = isinstance(arch.layers[0].mlp, ExpertsSpec)
    products = _read_mixture(layers, build.dtype) if of_experts else _read(_products(layers), build.dtype)
    weights = None if products is None else _layer_weights(arch, layers, products, heads.num_heads)
    most = 0
    if weights is not None:
        split_codes = bool(weights.scales) and build.context.tensor_size > 1
        taken = ops.few_layers_rows(weights, num_kv_heads=num_kv_heads, head_dim=arch.head_dim)
        most = min(taken, _FASTER_WITH_SPLIT_CODES if split_codes else _FASTER_ON_GPUS)
    most = agree_on_min(most, build.context)  # a rank's share may be of another size, or kept in another form
    if weights is None:
        dtype = dtype_name(build.dtype)
        return f"it reads weights of {dtype} or one kind of codes, all alike, and routers of {dtype}, and not these"
    if most == 0:
        return f"there is no such kernel for these sizes on {build.context.device}, or for another rank's weights"
    cells, counters = ops.few_layers_memory(weights, num_kv_heads=num_kv_heads)
    reducer = build.context.reducer

    def run(residual: Tensor, keys: list[Tensor], values: list[Tensor], step: LayerInput) -> None:
        meta = step.meta
        ops.few_layers(
            *(residual, weights, keys, values, step.positions, meta.slot_mapping, meta.seq_lens, meta.block_table),
            *(table, cells, counters, reducer.cells if reducer else None),
        )

    return run, most


class _Read(NamedTuple):
    """Weights as ops.LayerWeights has them."""

    products: list[Tensor]
    scales: list[Tensor]
    form: PatchForm | None


def _read(found: Sequence[nn.Module], dtype: torch.dtype) -> _Read | None:
    """None where weights are not all kept alike, or in another type than `dtype`."""
    scaled = [weight for weight in found if isinstance(weight, ScaledWeight)]
    patched = [weight for weight in found if isinstance(weight, PatchedWeight) and weight.order is None]
    plain = [weight.values for weight in found if isinstance(weight, PlainWeight) and weight.values.dtype == dtype]
    if len(scaled) == len(found):
        return _Read([weight.codes for weight in scaled], [weight.scales for weight in scaled], None)
    if len(patched) == len(found):
        form, *others = {weight.form.unrounded for weight in patched}
        return None if others else _Read([weight.patches for weight in patched], [], form)
    return _Read(plain, [], None) if len(plain) == len(found) else None


def _read_mixture(layers: Sequence[nn.Module], dtype: torch.dtype) -> _Read | None:
    """The same of layers with experts, which are patches of FP8 where attention's weights have a scale a row."""
    names = _ATTENTION_PRODUCTS
    attention = _read([layer.get_submodule(name) for layer in layers for name in names], dtype)
    if attention is None:
        return None
    products: list[Tensor] = []
    form = FP8_PATCHES if attention.scales else attention.form
    for number, layer in enumerate(layers):
        matrices, router = layer.get_submodule("mlp.experts.matrices"), layer.get_parameter("mlp.gate.weight")
        if not isinstance(matrices, PlainExperts | PatchedExperts) or router.dtype != dtype:
            return None
        if (matrices.form.unrounded if matrices.form else None) != form:
            return None
        of_attention = attention.products[len(names) * number : len(names) * (number + 1)]
        products += [*of_attention, router, matrices.gate_up_proj, matrices.down_proj]
    return attention._replace(products=products, form=form)


def _on_cpu(build: Build, layers: Sequence[nn.Module]) -> tuple[_Run, int] | str:
    """As _on_gpu."""
    if isinstance(build.arch.layers[0].mlp, ExpertsSpec):
        return "layers have experts"
    table = _rotary_table(build)
    products = [weight for weight in _products(layers) if isinstance(weight, PlainWeight | BlockWeight)]
    if len(products) < _PRODUCTS * len(layers):
        return "some weights are kept in a form that it does not read"
    if build.dtype != torch.float32:
        return f"activations are {dtype_name(build.dtype)}; allowed on a CPU: float32"
    stored = _stored_layers(build.arch, layers, products)
    if not ops.has_decode_layers(stored):
        return "the compiled extension has no such kernel, or not for these weights"

    def run(residual: Tensor, keys: list[Tensor], values: list[Tensor], step: LayerInput) -> None:
        meta = step.meta
        ops.decode_layers(
            *(residual, stored, keys, values, step.positions, meta.slot_mapping, meta.seq_lens, meta.block_table),
            table,
        )

    return run, _FASTER_ON_CPUS


def why_not(arch: ArchConfig, context: ParallelContext, block_size: int) -> str | None:
    """What of a model the operator does not do; None where there is nothing."""
    mlp, rope = arch.layers[0].mlp, arch.layers[0].rope
    if isinstance(mlp, ExpertsSpec) and (reason := _why_no_mixture(mlp)) is not None:
        return reason
    if context.pipeline_size > 1:
        return "the model is split into stages"
    if context.tensor_size > 1:
        peers = context.reducer.cells if context.reducer else None
        if peers is None:
            return "its ranks share no memory (parallel.custom_all_reduce, runtime.deterministic, or other hosts)"
        if peers.capacity < ops.peer_cells_bytes(arch.hidden_size, context.tensor_size):
            return "its rows are longer than the served model's, for which its ranks share memory"
    if arch.norm != "rms" or arch.alibi or arch.o_bias or mlp.bias or arch.attention_soft_cap:
        return "it knows RMS norms, rotary embeddings and plain scores only, and no bias of o_proj and the MLP"
    if arch.sinks:
        return "its attention has no sinks"
    if arch.residual_multiplier != 1.0:
        return "it has no multiplier of the residual stream"
    is_gated = isinstance(mlp, ExpertsSpec) or mlp.gated
    if arch.norm_place != "pre" or not is_gated or arch.qk_norm not in (None, "head"):
        return "it knows pre-norm layers with a gated MLP only, and norms queries and keys head by head or not at all"
    if context.device.type != "cpu" and (block_size < 16 or block_size & (block_size - 1)):
        return f"cache.block_size is {block_size}; allowed: powers of two from 16 on"
    if any(layer.window for layer in arch.layers):
        return "layers have sliding windows"
    if any(layer != arch.layers[0] for layer in arch.layers):
        return "layers differ"
    if rope is not None and rope.stretches_queries(arch.max_position):
        return "its queries are multiplied by a factor of their positions"
    if rope is None:
        return "it rotates queries and keys"
    if context.device.type != "cpu" and rope.size(arch.head_dim) < arch.head_dim:
        return "it rotates all of queries and keys"
    return None


def _why_no_mixture(mlp: ExpertsSpec) -> str | None:
    """The same of a mixture of experts."""
    if mlp.activation == "clamped_swiglu" or mlp.shared is not None:
        return "it knows experts with silu or gelu_tanh, and none that are shared"
    if mlp.scores == "sparse_mixer" or mlp.router_bias or mlp.choice_bias or mlp.groups > 1:
        return "it knows routers without biases and groups that choose by softmax or sigmoid"
    return None


def _rotary_table(build: Build) -> Tensor:
    rope = build.arch.layers[0].rope
    assert rope is not None
    return build.rotary_table(rope)


def _layer_weights(arch: ArchConfig, layers: Sequence[nn.Module], read: _Read, num_heads: int) -> ops.LayerWeights:
    """`num_heads`: this rank's."""
    mixture = _mixture(arch.layers[0].mlp)
    gate_up = read.products[3 if mixture else 2]
    return ops.LayerWeights(
        products=read.products,
        scales=read.scales,
        numbers=read.form.numbers if read.form else None,
        group=read.form.group if read.form else 0,
        mixture=mixture,
        num_heads=num_heads,
        width=gate_up.shape[-2] * (ops.PATCH_ROWS if gate_up.dtype == torch.uint8 else 1) // 2,
        norms=_norms(layers),
        head_norms=_head_norms(arch, layers),
        biases=_biases(arch, layers),
        eps=arch.norm_eps,
        scale=arch.attention_scale,
        gelu_tanh=arch.layers[0].mlp.activation == "gelu_tanh",
    )


def _mixture(mlp: MLPSpec | ExpertsSpec) -> ops.Mixture | None:
    if isinstance(mlp, MLPSpec):
        return None
    return ops.Mixture(
        per_token=mlp.per_token, sigmoid=mlp.scores == "sigmoid", normalized=mlp.normalized, scale=mlp.scale
    )


def _stored_layers(
    arch: ArchConfig, layers: Sequence[nn.Module], products: Sequence[PlainWeight | BlockWeight]
) -> ops.StoredLayers:
    stored = [product.stored for product in products]
    return ops.StoredLayers(
        weights=[tensor for tensors, _ in stored for tensor in tensors],
        kinds=[kind for _, kinds in stored for kind in kinds],
        norms=_norms(layers),
        head_norms=_head_norms(arch, layers),
        biases=_biases(arch, layers),
        eps=arch.norm_eps,
        scale=arch.attention_scale,
        gelu_tanh=arch.layers[0].mlp.activation == "gelu_tanh",
    )


def _products(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers' weights, _PRODUCTS of each, whatever form they have."""
    names = (*_ATTENTION_PRODUCTS, "mlp.gate_up_proj.weight", "mlp.down_proj.weight")
    return [layer.get_submodule(name) for layer in layers for name in names]


def _norms(layers: Sequence[nn.Module]) -> list[Tensor]:
    return _each(layers, "input_layernorm.weight", "post_attention_layernorm.weight")


def _head_norms(arch: ArchConfig, layers: Sequence[nn.Module]) -> list[Tensor]:
    return _each(layers, "self_attn.q_norm.weight", "self_attn.k_norm.weight") if arch.qk_norm else []


def _biases(arch: ArchConfig, layers: Sequence[nn.Module]) -> list[Tensor]:
    return _each(layers, "self_attn.qkv_proj.bias") if arch.qkv_bias else []


def _each(layers: Sequence[nn.Module], *names: str) -> list[Tensor]:
    return [layer.get_parameter(name) for layer in layers for name in names]
