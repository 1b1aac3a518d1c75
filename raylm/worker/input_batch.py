"""The inputs of one step, gathered from the rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from raylm import ops
from raylm.layers.attention import AttentionMetadata
from raylm.worker.request_table import RequestTable


class StepRows(NamedTuple):
    """What the host says of a step of S rows."""

    rows: np.ndarray
    query_lens: np.ndarray
    """int64 [S]: the row, and how many tokens it computes."""
    num_sampled: np.ndarray
    """int64 [S]: 1 and its drafts for a row that samples, else 0."""
    reports: np.ndarray
    """bool [S]: rows that report candidates."""
    first: np.ndarray
    """int64 [S]: the position that the row's tokens begin at, at most."""

    @classmethod
    def of(cls, rows: np.ndarray, query_lens: np.ndarray, table: RequestTable) -> StepRows:
        """Rows that compute so many tokens, which the table's counts on the host have computed from here on."""
        left = table.known_bound[rows] - table.computed_bound[rows]
        is_last = query_lens >= left
        reports = is_last & (table.num_candidates[rows] > 0)
        samples = is_last & ~reports
        first = table.computed_bound[rows]
        table.count(rows, query_lens, samples)
        return cls(rows, query_lens, np.where(samples, 1 + query_lens - left, 0), reports, first)

    @property
    def max_seq_len(self) -> int:
        return int((self.first + self.query_lens).max(initial=0))

    @property
    def is_wide(self) -> bool:
        """Whether any row computes several tokens."""
        return bool(self.query_lens.max(initial=0) > 1)

    @property
    def verifies(self) -> bool:
        """Whether any row has drafts."""
        return bool(self.num_sampled.max(initial=0) > 1)

    @property
    def num_drafts(self) -> np.ndarray:
        """int64 [S]: the drafts of each row."""
        return np.maximum(self.num_sampled - 1, 0)

    @property
    def is_chunk(self) -> np.ndarray:
        """bool [S]: rows that compute more than their last known token and drafts behind it, or less."""
        return (self.query_lens != self.num_sampled) & ~(self.reports & (self.query_lens == 1))

    @property
    def sampled_rows(self) -> np.ndarray:
        """The row of each sampled token."""
        return np.repeat(self.rows, self.num_sampled)

    def logit_index(self) -> np.ndarray:
        """Tokens of the step whose logits are wanted, int64: those that are sampled after, then the last ones of rows
        that report."""
        ends, lens = np.cumsum(self.query_lens), self.num_sampled
        # A row samples after the last of its tokens.
        sampled = np.arange(lens.sum()) + np.repeat(ends - np.cumsum(lens), lens)
        return np.concatenate([sampled, ends[self.reports] - 1])


class StepArrays(NamedTuple):
    """What the device needs to know of a step of T tokens and S rows."""

    token_rows: np.ndarray
    offsets: np.ndarray
    """int64 [T]: a token's row, and how many of the row's tokens in this step come before it."""
    rows: np.ndarray
    """int64 [S]."""
    query_start: np.ndarray
    """int32 [S + 1]: row s computes the tokens query_start[s] to query_start[s + 1]."""

    @classmethod
    def build(cls, rows: np.ndarray, query_lens: np.ndarray) -> StepArrays:
        query_start = starts(query_lens)
        offsets = np.arange(query_start[-1], dtype=np.int64) - np.repeat(query_start[:-1], query_lens)
        return cls(np.repeat(rows, query_lens), offsets, rows, query_start)


class DeviceArrays(NamedTuple):
    """StepArrays on the device."""

    token_rows: Tensor
    offsets: Tensor
    rows: Tensor
    query_start: Tensor


class InputBatch(NamedTuple):
    """What one forward pass reads, on the device: int64 [T] token ids, positions and the positions that follow them;
    attention a cache group."""

    token_ids: Tensor
    positions: Tensor
    following: Tensor
    attention: list[AttentionMetadata]

    @classmethod
    def gather(
        cls, arrays: DeviceArrays, table: RequestTable, *, max_query_len: int, max_seq_len: int, shares: bool
    ) -> InputBatch:
        """Gather a step's inputs from the rows; the limits are those of its lengths, and `shares` has it look for
        prefixes that its rows share. Nothing here depends on values, so it can be captured."""
        num_columns = -(-max_seq_len // table.block_size)
        placed = ops.place(
            table.num_computed, table.token_ids, table.block_table[:, :, :num_columns], *arrays, table.block_size
        )
        lens, limits = (arrays.query_start, placed.seq_lens), (max_query_len, max_seq_len)
        attention = []
        for group, (block_table, slots) in enumerate(zip(placed.block_tables, placed.slots, strict=True)):
            looks = shares and group in table.shares_in
            prefixes = ops.shared_prefixes(block_table, *lens, table.block_size) if looks else None
            attention.append(AttentionMetadata(*lens, block_table, slots, *limits, table.arrivals, prefixes))
        return cls(placed.token_ids, placed.positions, placed.following, attention)


def starts(lens: np.ndarray) -> np.ndarray:
    """Where each of some pieces starts, and the end of the last one: int32."""
    found = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=found[1:])
    return found
