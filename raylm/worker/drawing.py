"""Tokens of rows that want nothing but that, straight from hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from raylm import ops
from raylm.models.decoder import DecoderModel
from raylm.parallel import collectives


def draw(model: DecoderModel, hidden: Tensor, settings: Sequence[Tensor], positions: Tensor) -> Tensor:
    """The tokens that follow hidden [S, hidden_size]: int64 [S], on every tensor rank. `settings` and positions as
    ops.sample has them, which draws the tokens: of many rows each rank those of its share, whose logits alone it is
    given."""
    context, num_rows = model.context, len(hidden)
    if not collectives.splits_rows(num_rows, context):
        return ops.sample(model.logits(hidden), *settings, positions)
    own = collectives.share_of(num_rows, context)
    drawn = ops.sample(model.logits(hidden, split=True), *(each[own] for each in settings), positions[own])
    return collectives.all_gather(drawn.unsqueeze(0), context).squeeze(0)
