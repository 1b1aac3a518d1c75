"""All layers of a decode step on a CPU, as one operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from raylm.ops import blocks, extension, library  # noqa: F401  (registers the schemas)
from raylm.ops.decode_layers import PLAIN

_decode_layers: Callable[..., None] = torch.ops.raylm.decode_layers.default


@dataclass(frozen=True, slots=True)
class StoredLayers:
    """The weights of L layers of norm, attention with rotary embedding, norm and gated MLP.

    A product's weight is one matrix of numbers, of kind PLAIN and any floating type, or parts in a GGUF file's blocks,
    whose kinds are those of ops.block_linear. Norms and biases are float32.
    """

    weights: list[Tensor]
    """Of each layer q, k and v [(Hq + 2 Hk) * D, H] (in blocks three parts), o [H, Hq * D], gate and up [2 * W, H] (in
    blocks two parts), down [H, W]."""
    kinds: list[int]
    """Of each of the weights."""
    norms: list[Tensor]
    """2 L, [H]: before attention and before the MLP."""
    head_norms: list[Tensor]
    """2 L, [D]: of queries and of keys; or none."""
    biases: list[Tensor]
    """L, [(Hq + 2 Hk) * D]: of q, k and v; or none."""
    eps: float
    """Of the norms."""
    scale: float
    """Of attention's scores."""
    gelu_tanh: bool
    """The MLP's activation: silu otherwise."""


def decode_layers(
    residual: Tensor,
    layers: StoredLayers,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    cos_sin: Tensor,
) -> None:
    """Runs the residual stream [S, H] of S sequences with one token each through all layers, in place, and writes the
    tokens' keys and values into the caches, one pair a layer. Everything but the weights' numbers is float32.

    positions, slot_mapping (int64 [S]), seq_lens, block_table and cos_sin are as for rope_store and paged_attention;
    every token is the last one of its sequence. The result is equal to the bit to that of the single operators.
    """
    _decode_layers(
        residual,
        layers.weights,
        layers.kinds,
        layers.norms,
        layers.head_norms,
        layers.biases,
        k_caches,
        v_caches,
        positions,
        slot_mapping,
        seq_lens,
        block_table,
        cos_sin,
        layers.eps,
        layers.scale,
        layers.gelu_tanh,
    )


def has_decode_layers(layers: StoredLayers) -> bool:
    """Whether the extension has a kernel that runs these layers, and not one operator after another."""
    first = layers.norms[0]
    if first.dtype != torch.float32 or "decode_layers" not in extension.load().ops.get(first.device.type, ()):
        return False
    return all(kind == PLAIN or blocks._has_kernels(first.device.type, kind) for kind in set(layers.kinds))
