"""The order of a head's dimensions in the rows of queries and keys.

Rotary embeddings here turn a dimension of a head's first half with that of its second half. Some formats pair
neighbouring dimensions; their rows come in our order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from raylm.models.checkpoint import CheckpointTensor


def from_neighbours(tensor: CheckpointTensor, head_dim: int) -> CheckpointTensor:
    """A tensor of whole heads that pairs neighbouring rows (or elements of a bias), read in our order."""
    return replace(tensor, row_unit=head_dim, rearrange=partial(_pair_halves, head_dim=head_dim))


def _pair_halves(piece: Tensor, head_dim: int) -> Tensor:
    heads = piece.unflatten(0, (-1, head_dim // 2, 2))
    return heads.transpose(1, 2).flatten(0, 2)
