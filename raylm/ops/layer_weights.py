"""All layers of a decode step of few rows as one operator, for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raylm.ops import extension, library  # noqa: F401  (registers the schemas)
from raylm.ops.patches import NUMBERS, PATCH_ROWS, Numbers

_few_layers: Callable[..., None] = torch.ops.raylm.few_layers.default
_few_layers_rows: Callable[..., int] = torch.ops.raylm.few_layers_rows.default

FEW_ROWS = 4
"""Rows that the operator's memory between steps has room for."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """How a layer's token comes by its experts, as ops.route has it."""

    per_token: int
    sigmoid: bool
    normalized: bool
    scale: float


_DENSE = Mixture(per_token=0, sigmoid=False, normalized=False, scale=1.0)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What L layers are made of: norm, attention with rotary embedding, norm, gated MLP or a mixture of such as
    experts. Contiguous, of one dtype but for products that are codes."""

    products: list[Tensor]
    """4 L: of each layer q, k and v [(Hq + 2 Hk) * D, H], o [H, Hq * D], gate and up [2 * W, H], down [H, W]; or these
    in patches. Of a mixture of E experts 5 L: behind o the router [E, H], which is numbers, then the experts' gate and
    up [E, 2 * W, H] and down [E, H, W], or these in patches."""
    scales: list[Tensor]
    """4 L, float32, of products that are float8_e4m3fn codes: a scale a row; or none. Of a mixture 2 L, of q, k and v
    and of o: its experts are patches."""
    norms: list[Tensor]
    """2 L, [H]: before attention and before the MLP."""
    head_norms: list[Tensor]
    """2 L, [D]: of queries and of keys; or none."""
    biases: list[Tensor]
    """L, [(Hq + 2 Hk) * D]: of q, k and v; or none."""
    numbers: Numbers | None
    """What patches hold, of which `group` columns share a scale; None where there are none."""
    group: int
    mixture: Mixture | None
    num_heads: int
    """Hq."""
    width: int
    """W, of a mixture an expert's."""
    eps: float
    """Of the norms."""
    scale: float
    """Of attention's scores."""
    gelu_tanh: bool
    """The MLP's activation: silu otherwise."""

    def outputs(self, num_kv_heads: int) -> int:
        """What the phases of a layer hand to the next of a row: heads, attention, residual stream, the router's logits,
        activations, and residual stream again."""
        qkv = self.products[0].shape[0] * (PATCH_ROWS if self.products[0].dtype == torch.uint8 else 1)
        attended = qkv * self.num_heads // (self.num_heads + 2 * num_kv_heads)
        activated = self.width * (self.mixture.per_token if self.mixture else 1)
        return qkv + attended + 2 * self.norms[0].shape[0] + self.num_experts + activated

    @property
    def num_experts(self) -> int:
        """0 where there is no mixture."""
        return self.products[2].shape[0] if self.mixture else 0

    @property
    def settings(self) -> tuple[int, int, int, bool, bool, float]:
        """What operators are given of patches and the mixture."""
        mixture = self.mixture or _DENSE
        numbers = -1 if self.numbers is None else NUMBERS.index(self.numbers)
        return numbers, self.group, mixture.per_token, mixture.sigmoid, mixture.normalized, mixture.scale


class PeerCells(NamedTuple):
    """Where the tensor ranks of one host hand each other their parts of the residual stream: windows of peer memory, as
    peer_all_reduce has them, with slots of `peer_cells_bytes`. Several models may share them."""

    windows: Tensor
    """The ranks' addresses of them, int64 on the CPU."""
    rank: int
    capacity: int
    """Bytes of a slot."""
    limit_s: float
    """How long a rank waits for another one before it fails."""


def peer_cells_bytes(hidden_size: int, ranks: int) -> int:
    """Of each rank FEW_ROWS rows, with 8 bytes for two elements."""
    return ranks * FEW_ROWS * hidden_size // 2 * 8


def few_layers(
    residual: Tensor,
    weights: LayerWeights,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    cos_sin: Tensor,
    cells: Tensor,
    counters: Tensor,
    peers: PeerCells | None = None,
) -> None:
    """Runs the residual stream [S, H] of S sequences with one token each through all layers, in place, and writes the
    tokens' keys and values into the caches, one pair a layer. At most few_layers_rows sequences. Where products are
    codes with a scale a row, a 16th of each number of their rows is rounded to float16, and no more. An expert's
    activations are multiplied by its weight before they are rounded.

    positions, slot_mapping (int64 [S]), seq_lens, block_table and cos_sin are as for rope_store and paged_attention;
    every token is the last one of its sequence. `cells` (int64) and `counters` (int32) are what few_layers_memory gave
    for these weights: the operator's own between calls, of which only one may run at a time.

    With `peers`, the weights are one tensor rank's share, and so are the caches; the residual stream is the same on all
    ranks, which call this with as many rows and layers, in the same order. The kernel has all of the GPU until those of
    the other ranks have come: no other kernel that waits for a rank may run beside it.
    """
    _few_layers(
        residual,
        weights.products,
        weights.scales,
        weights.norms,
        weights.head_norms,
        weights.biases,
        *weights.settings,
        k_caches,
        v_caches,
        positions,
        slot_mapping,
        seq_lens,
        block_table,
        cos_sin,
        weights.eps,
        weights.scale,
        weights.gelu_tanh,
        cells,
        counters,
        *(peers or (None, 0, 0, 0.0)),
    )


def few_layers_rows(weights: LayerWeights, *, num_kv_heads: int, head_dim: int) -> int:
    """How many rows few_layers takes of a model with a compiled kernel; 0 where there is none for it."""
    norms, scaled = weights.norms, bool(weights.scales)
    numbers, group, per_token, *_ = weights.settings
    return _few_layers_rows(
        *(norms[0].unsqueeze(0), weights.width, weights.num_heads, num_kv_heads, head_dim, len(norms) // 2),
        *(scaled, numbers, group, weights.num_experts, per_token),
    )


def few_layers_memory(weights: LayerWeights, *, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """The cells and counters that few_layers keeps for a model."""
    device = weights.norms[0].device
    return (
        torch.zeros(FEW_ROWS * weights.outputs(num_kv_heads) // 2, dtype=torch.int64, device=device),
        torch.zeros(FEW_ROWS * num_kv_heads + 2, dtype=torch.int32, device=device),
    )
