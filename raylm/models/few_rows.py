"""All layers of a decode step of few rows as one operator: at so few rows the time between kernels is what is felt."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor, nn

from raylm import ops
from raylm.layers.attention import LayerInput
from raylm.layers.dtypes import dtype_name
from raylm.models.arch import ArchConfig, MLPSpec
from raylm.models.blocks import Build
from raylm.parallel.context import ParallelContext

_log = logging.getLogger(__name__)

_FASTER_UP_TO = 2
"""Rows, as measured on an H200. Four rows of Llama-3.1-8B made 914 tokens/s in one kernel and 933 layer by layer, of
Qwen3-0.6B 4,479 and 4,501."""


class FewRows:
    """Runs all layers of a stage, where there is an operator for that: it takes steps of up to `most_rows` rows."""

    def __init__(self, build: Build, layers: Sequence[nn.Module], *, block_size: int) -> None:
        """The layers are a DecoderModel's; `block_size` is the cache's."""
        arch, context = build.arch, build.context
        self.most_rows = 0
        reason = why_not(arch, context, block_size)
        if reason is None and not build.scheme.is_plain:
            reason = f"it reads weights of {dtype_name(build.dtype)} alone, and some are kept in another form"
        if reason is None:
            assert arch.layers[0].rope is not None
            self._table = build.rotary_table(arch.layers[0].rope)
            self._weights = _weights(arch, layers)
            taken = ops.few_layers_rows(self._weights, num_kv_heads=arch.num_kv_heads, head_dim=arch.head_dim)
            self.most_rows = min(taken, _FASTER_UP_TO)
            reason = f"there is no such kernel for these sizes on {context.device}"
        if self.most_rows == 0:
            _log.info("Decode steps of few rows run layer by layer, not all layers in one kernel: %s.", reason)
            return
        _log.info("Decode steps of up to %d rows run all layers in one kernel.", self.most_rows)
        self._cells, self._counters = ops.few_layers_memory(self._weights, num_kv_heads=arch.num_kv_heads)

    def __call__(self, residual: Tensor, step: Sequence[LayerInput]) -> None:
        """All layers, on the residual stream [S, hidden_size] in place, for a token of each of S sequences, whose keys
        and values are written into the caches."""
        positions, meta = step[0].positions, step[0].meta
        ops.few_layers(
            residual,
            self._weights,
            [layer.cache[0] for layer in step],
            [layer.cache[1] for layer in step],
            positions,
            meta.slot_mapping,
            meta.seq_lens,
            meta.block_table,
            self._table,
            self._cells,
            self._counters,
        )


def why_not(arch: ArchConfig, context: ParallelContext, block_size: int) -> str | None:
    """What of a model the operator does not do; None where there is nothing."""
    mlp, rope = arch.layers[0].mlp, arch.layers[0].rope
    if not isinstance(mlp, MLPSpec):
        return "layers have experts"
    if context.tensor_size > 1 or context.pipeline_size > 1:
        # The kernel's blocks must all be resident at once. A kernel that waits for another GPU could keep one of them
        # out, and the others would wait for that one for ever.
        return "the model is split over GPUs"
    if arch.norm != "rms" or arch.alibi or arch.o_bias or mlp.bias or arch.attention_soft_cap:
        return "it knows RMS norms, rotary embeddings and plain scores only, and no bias of o_proj and the MLP"
    if arch.sinks:
        return "its attention has no sinks"
    if arch.residual_multiplier != 1.0:
        return "it has no multiplier of the residual stream"
    if arch.norm_place != "pre" or not mlp.gated or arch.qk_norm not in (None, "head"):
        return "it knows pre-norm layers with a gated MLP only, and norms queries and keys head by head or not at all"
    if block_size < 16 or block_size & (block_size - 1):
        return f"cache.block_size is {block_size}; allowed: powers of two from 16 on"
    if any(layer.window for layer in arch.layers):
        return "layers have sliding windows"
    if any(layer != arch.layers[0] for layer in arch.layers):
        return "layers differ"
    if rope is None or rope.size(arch.head_dim) < arch.head_dim:
        return "it rotates all of queries and keys"
    return None


def _weights(arch: ArchConfig, layers: Sequence[nn.Module]) -> ops.LayerWeights:
    def each(*names: str) -> list[Tensor]:
        return [layer.get_parameter(name) for layer in layers for name in names]

    return ops.LayerWeights(
        products=each(
            *("self_attn.qkv_proj.weight.values", "self_attn.o_proj.weight.values"),
            *("mlp.gate_up_proj.weight.values", "mlp.down_proj.weight.values"),
        ),
        norms=each("input_layernorm.weight", "post_attention_layernorm.weight"),
        head_norms=each("self_attn.q_norm.weight", "self_attn.k_norm.weight") if arch.qk_norm else [],
        biases=each("self_attn.qkv_proj.bias") if arch.qkv_bias else [],
        eps=arch.norm_eps,
        scale=arch.attention_scale,
        gelu_tanh=arch.layers[0].mlp.activation == "gelu_tanh",
    )
