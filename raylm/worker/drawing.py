"""Sampling from hidden states, for rows without logits processors and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from raylm import ops
from raylm.models.decoder import DecoderModel
from raylm.parallel import collectives


def draw(model: DecoderModel, hidden: Tensor, settings: Sequence[Tensor], positions: Tensor) -> Tensor:
    """Sample a token after each of hidden [S, hidden_size]: token ids, int64 [S], the same on every tensor rank.

    `settings` and `positions` are those of ops.sample. Where `collectives.splits_rows`, a rank gathers logits and
    samples for its share of the rows only, and the ranks exchange token ids.
    """
    context, num_rows = model.context, len(hidden)
    if not collectives.splits_rows(num_rows, context):
        return ops.sample(model.logits(hidden), *settings, positions)
    own = collectives.share_of(num_rows, context)
    drawn = ops.sample(model.logits(hidden, split=True), *(each[own] for each in settings), positions[own])
    return collectives.all_gather(drawn.unsqueeze(0), context).squeeze(0)
