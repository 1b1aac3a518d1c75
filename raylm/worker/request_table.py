"""One fixed row a request for as long as it runs; the inputs of a step are gathered from the rows on the device."""

from __future__ import annotations

import numpy as np
import torch

from raylm.core.step import NewRow, StepPlan


class RequestTable:
    """Rows of the running requests.

    On the device: token_ids [max_rows, max_model_len] int64 and block_table [max_rows, max_blocks] int32. A sampled
    token goes straight into its row, so the next step needs nothing from the host. On the host: how many tokens of
    a row are known and computed, how many blocks it has, and how it samples, each [max_rows].
    """

    def __init__(self, *, max_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.device = device
        self.token_ids = torch.zeros(max_rows, max_model_len, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self.num_known = np.zeros(max_rows, dtype=np.int64)
        self.num_computed = np.zeros(max_rows, dtype=np.int64)
        self.num_blocks = np.zeros(max_rows, dtype=np.int64)
        self.temperature = np.zeros(max_rows, dtype=np.float32)
        self.top_p = np.ones(max_rows, dtype=np.float32)
        self.top_k = np.zeros(max_rows, dtype=np.int64)
        self.min_p = np.zeros(max_rows, dtype=np.float32)
        self.seed = np.zeros(max_rows, dtype=np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Take in what the plan brings: new requests first, then new blocks."""
        for new in plan.new_rows:
            self._set_row(new)
        self._append_blocks(plan)

    def record_sampled(self, rows: np.ndarray, token_ids: torch.Tensor) -> None:
        """Write each row's sampled token [len(rows)] behind its known tokens."""
        columns = self.num_known[rows]
        self.token_ids[torch.from_numpy(rows).to(self.device), torch.from_numpy(columns).to(self.device)] = token_ids
        self.num_known[rows] += 1

    def _set_row(self, new: NewRow) -> None:
        row, tokens, sampling = new.row, new.token_ids, new.sampling
        self.token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        self.num_known[row] = len(tokens)
        self.num_computed[row] = new.num_computed
        self.num_blocks[row] = 0
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed

    def _append_blocks(self, plan: StepPlan) -> None:
        rows: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for row, added in zip(plan.rows, plan.new_blocks, strict=True):
            if added:
                first = int(self.num_blocks[row])
                rows += [row] * len(added)
                columns += range(first, first + len(added))
                blocks += added
                self.num_blocks[row] = first + len(added)
        if blocks:
            packed = torch.tensor([rows, columns, blocks], dtype=torch.int64).to(self.device)
            self.block_table[packed[0], packed[1]] = packed[2].to(torch.int32)
