"""The operators `place` and `accept` in terms of torch's own: where a step's tokens stand, and what sampling adds.

Neither waits for the device, and both can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Placed(NamedTuple):
    """What `place` gives of a step of T tokens and S sequences, with G cache groups."""

    token_ids: Tensor
    positions: Tensor
    following: Tensor
    """int64 [T]; following: positions + 1."""
    slots: Tensor
    """int64 [G, T]."""
    seq_lens: Tensor
    """int32 [S]."""
    block_tables: Tensor
    """int32 [G, S, C]."""


def place(
    num_computed: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    token_rows: Tensor,
    offsets: Tensor,
    rows: Tensor,
    query_start: Tensor,
    block_size: int,
) -> Placed:
    width, columns = token_ids.shape[1], block_table.shape[2]
    positions = (num_computed[token_rows] + offsets).clamp_(0, width - 1)
    block_ids = block_table[:, token_rows, (positions // block_size).clamp_(max=columns - 1)]
    slots = block_ids.long() * block_size + positions % block_size
    seq_lens = (num_computed[rows] + query_start.diff()).clamp_(max=width)
    block_tables = block_table.index_select(1, rows)
    ids = token_ids[token_rows, positions].long()
    return Placed(ids, positions, positions + 1, slots, seq_lens.int(), block_tables)


def accept(
    token_ids: Tensor,
    num_known: Tensor,
    num_computed: Tensor,
    rows: Tensor,
    query_start: Tensor,
    sample_start: Tensor,
    sampled: Tensor,
) -> Tensor:
    padding_row, width, num_sampled = token_ids.shape[0] - 1, token_ids.shape[1], sampled.shape[0]
    if not rows.shape[0]:
        return torch.empty_like(rows)
    first = sample_start[:-1].long()
    lengths = sample_start.diff().long()
    counts = lengths
    is_padding = rows == padding_row
    if num_sampled:
        counts = torch.where(
            is_padding, lengths.clamp(max=1), _accepted(token_ids, num_known, rows, first, sampled, lengths)
        )
        # Accepted drafts stand in their cells already: only the token after them is new. A sequence without one writes
        # what the padding row's first cell holds to that very cell.
        last = counts - 1
        cells = num_known[rows] + last
        writes = ~is_padding & (counts > 0) & (cells < width)
        tokens = sampled[(first + last).clamp_(0, num_sampled - 1)].int()
        tokens = torch.where(writes, tokens, token_ids[padding_row, 0])
        target = torch.where(writes, rows, padding_row), torch.where(writes, cells, 0)
        token_ids.index_put_(target, tokens)
    num_known.index_add_(0, rows, torch.where(is_padding, 0, counts))
    num_computed.index_add_(0, rows, torch.where(is_padding, 0, query_start.diff() - (lengths - counts)))
    return counts


def _accepted(
    token_ids: Tensor, num_known: Tensor, rows: Tensor, first: Tensor, sampled: Tensor, lengths: Tensor
) -> Tensor:
    """How many of its sampled tokens each sequence [S] keeps: up to the first that is not its draft."""
    index = torch.arange(sampled.shape[0], device=sampled.device)
    owners = (torch.searchsorted(first, index, right=True) - 1).clamp_(min=0)
    nth = index - first[owners]
    last = lengths[owners] - 1
    owner_rows = rows[owners]
    cells = num_known[owner_rows] + nth
    drafts = token_ids[owner_rows, cells.clamp(max=token_ids.shape[1] - 1)]
    # There is no draft for the last token; what comes after the last sequence belongs to none.
    differs = (drafts != sampled) | (cells >= token_ids.shape[1])
    stops = torch.where(differs & (nth >= 0) & (nth < last), nth, last)
    return (lengths - 1).scatter_reduce(0, owners, stops, "amin") + 1
