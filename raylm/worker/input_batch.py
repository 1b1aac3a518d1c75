"""The inputs of one step, gathered from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor, add

from raylm.layers.attention import AttentionMetadata
from raylm.worker.request_table import RequestTable


class StepArrays(NamedTuple):
    """What the host says of a step: T tokens, S sequences, R of them sample. All int64 but for the lengths, int32."""

    token_cells: np.ndarray
    positions: np.ndarray
    block_cells: np.ndarray
    offsets: np.ndarray
    """Of each token: its cell in token_ids, its position, its block's cell in block_table and its offset in the block.
    Each [T]."""
    rows: np.ndarray
    query_start: np.ndarray
    seq_lens: np.ndarray
    """[S], [S + 1] and [S]."""
    sample_index: np.ndarray
    sample_cells: np.ndarray
    """Tokens of the step whose logits are wanted, and the cells that the sampled tokens go to. Each [R]."""

    @classmethod
    def build(cls, rows: np.ndarray, query_lens: np.ndarray, table: RequestTable) -> tuple[StepArrays, np.ndarray]:
        """The arrays of a step in which rows[i] computes query_lens[i] tokens, and the rows [R] that sample.

        The table's rows count their tokens as computed from here on.
        """
        first = table.num_computed[rows]
        seq_lens = first + query_lens
        query_start = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=query_start[1:])
        token_rows = np.repeat(rows, query_lens)
        positions = np.arange(query_start[-1]) + np.repeat(first - query_start[:-1], query_lens)
        known = table.num_known[rows]
        samples = np.flatnonzero(seq_lens == known)
        sample_rows = rows[samples]
        arrays = cls(
            token_cells=table.token_cells(token_rows, positions),
            positions=positions,
            block_cells=table.block_cells(token_rows, positions),
            offsets=positions % table.block_size,
            rows=rows,
            query_start=query_start.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            sample_index=query_start[1:][samples] - 1,
            sample_cells=table.token_cells(sample_rows, known[samples]),
        )
        table.compute(rows, seq_lens)
        return arrays, sample_rows


class InputBatch(NamedTuple):
    """What one forward pass reads, on the device.

    token_ids, positions: [T] int64. attention: one for each cache group. sample_index, sample_cells: [R] int64, as in
    StepArrays.
    """

    token_ids: Tensor
    positions: Tensor
    attention: list[AttentionMetadata]
    sample_index: Tensor
    sample_cells: Tensor

    @classmethod
    def gather(
        cls, tensors: Sequence[Tensor], table: RequestTable, *, max_query_len: int, max_seq_len: int
    ) -> InputBatch:
        """Gather a step's inputs from the rows. `tensors` are the StepArrays on the device, the limits those of its
        lengths. Nothing here depends on values, so it can be captured."""
        token_cells, positions, block_cells, offsets, rows, query_start, seq_lens, sample_index, sample_cells = tensors
        num_columns = -(-max_seq_len // table.block_size)
        # [groups, S, num_columns] and [groups, T]
        block_tables = table.block_table[:, :, :num_columns].index_select(1, rows)
        block_ids = table.block_table.flatten(1).index_select(1, block_cells)
        slot_mappings = add(offsets, block_ids, alpha=table.block_size)
        attention = [
            AttentionMetadata(query_start, seq_lens, block_table, slot_mapping, max_query_len, max_seq_len)
            for block_table, slot_mapping in zip(block_tables, slot_mappings, strict=True)
        ]
        token_ids = table.token_ids.view(-1).index_select(0, token_cells)
        return cls(token_ids, positions, attention, sample_index, sample_cells)
