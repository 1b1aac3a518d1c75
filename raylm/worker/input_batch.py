"""The tensors of one step, gathered from the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from raylm.core.step import StepPlan
from raylm.layers.attention import AttentionMetadata
from raylm.worker.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What one forward pass reads.

    token_ids, positions: [num_tokens] int64. attention: one for each cache group. sample_index: [num_sampled] positions
    in the batch whose logits are wanted. sample_rows: [num_sampled] their rows, on the host.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: list[AttentionMetadata]
    sample_index: torch.Tensor
    sample_rows: np.ndarray

    @classmethod
    def build(cls, plan: StepPlan, table: RequestTable) -> InputBatch:
        """Gather a step's inputs and advance the rows' computed tokens."""
        rows = np.array(plan.rows, dtype=np.int64)
        query_lens = np.array(plan.num_tokens, dtype=np.int64)
        first = table.num_computed[rows]
        seq_lens = first + query_lens
        query_start = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=query_start[1:])
        token_rows = np.repeat(rows, query_lens)
        positions = np.arange(query_start[-1]) + np.repeat(first - query_start[:-1], query_lens)
        table.num_computed[rows] = seq_lens
        samples = np.flatnonzero(seq_lens == table.num_known[rows])

        to_device = _Mover(table.device)
        row_index = to_device(token_rows)
        position_index = to_device(positions)
        num_columns = -(-int(seq_lens.max()) // table.block_size)
        # [groups, num_seqs, num_columns] and [groups, num_tokens]
        block_tables = table.block_table[:, to_device(rows), :num_columns]
        block_ids = table.block_table[:, row_index, position_index // table.block_size]
        slot_mappings = block_ids.to(torch.int64) * table.block_size + position_index % table.block_size
        starts, lens = to_device(query_start.astype(np.int32)), to_device(seq_lens.astype(np.int32))
        max_query_len, max_seq_len = int(query_lens.max()), int(seq_lens.max())
        return cls(
            token_ids=table.token_ids[row_index, position_index],
            positions=position_index,
            attention=[
                AttentionMetadata(
                    query_start=starts,
                    seq_lens=lens,
                    block_table=block_table,
                    slot_mapping=slot_mapping,
                    max_query_len=max_query_len,
                    max_seq_len=max_seq_len,
                )
                for block_table, slot_mapping in zip(block_tables, slot_mappings, strict=True)
            ],
            sample_index=to_device(query_start[1:][samples] - 1),
            sample_rows=rows[samples],
        )


class _Mover:
    """Moves host arrays to the device; on a CPU the tensor shares the array's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
