"""presence_penalty, frequency_penalty, repetition_penalty."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from raylm import ops
from raylm.core.step import RowSampling
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling.stages import LogitRows


class Penalties:
    """Lower logits for tokens that a row has already. Nothing is kept of steps before: every step counts the row's
    tokens anew, in the table on the device, where those are too that the host does not know yet."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._num_prompt = np.zeros(table.num_rows, dtype=np.int64)
        self._repetition = np.ones(table.num_rows, dtype=np.float32)
        self._frequency = np.zeros(table.num_rows, dtype=np.float32)
        self._presence = np.zeros(table.num_rows, dtype=np.float32)

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        params = sampling.params
        self._num_prompt[row] = sampling.num_prompt
        self._repetition[row] = params.repetition_penalty
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty
        return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        num_prompt, *factors = self._table.upload(
            self._num_prompt[of.rows], self._repetition[of.rows], self._frequency[of.rows], self._presence[of.rows]
        )
        return ops.penalize(logits, self._table.token_ids, of.table_rows, num_prompt, of.positions, *factors)
