"""One fixed row a request for as long as it runs; the inputs of a step are gathered from the rows on the device."""

from __future__ import annotations

import numpy as np
import torch

from raylm.core.step import NewBlocks, NewRow, StepPlan


class RequestTable:
    """Rows of the running requests.

    On the device: token_ids [max_rows, max_model_len] int64 and block_table [groups, max_rows, max_blocks] int32. A
    sampled token goes straight into its row, so the next step needs nothing from the host. On the host: how many
    tokens of a row are known and computed, how it samples and what it reports, each [max_rows].
    """

    def __init__(
        self, *, max_rows: int, max_model_len: int, block_size: int, num_groups: int, device: torch.device
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.device = device
        self.token_ids = torch.zeros(max_rows, max_model_len, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(num_groups, max_rows, max_blocks, dtype=torch.int32, device=device)
        self.num_known = np.zeros(max_rows, dtype=np.int64)
        self.num_computed = np.zeros(max_rows, dtype=np.int64)
        self.temperature = np.zeros(max_rows, dtype=np.float32)
        self.top_p = np.ones(max_rows, dtype=np.float32)
        self.top_k = np.zeros(max_rows, dtype=np.int64)
        self.min_p = np.zeros(max_rows, dtype=np.float32)
        self.seed = np.zeros(max_rows, dtype=np.int64)
        self.logprob = np.zeros(max_rows, dtype=np.bool_)
        self.num_candidates = np.zeros(max_rows, dtype=np.int64)
        self.reports = np.zeros(max_rows, dtype=np.bool_)
        """Rows that want log probabilities or candidates: everything but a token."""

    def apply(self, plan: StepPlan) -> None:
        """Take in what the plan brings: new requests first, then new blocks and chosen tokens."""
        for new in plan.new_rows:
            self._set_row(new)
        if plan.new_blocks:
            self._set_blocks(plan.new_blocks)
        if plan.chosen:
            rows, token_ids = np.array(plan.chosen, dtype=np.int64).T.copy()
            self.append_tokens(rows, torch.from_numpy(token_ids).to(self.device))

    def append_tokens(self, rows: np.ndarray, token_ids: torch.Tensor) -> None:
        """Write one token [len(rows)] behind the known tokens of each row; no row may be there twice."""
        columns = self.num_known[rows]
        self.token_ids[torch.from_numpy(rows).to(self.device), torch.from_numpy(columns).to(self.device)] = token_ids
        self.num_known[rows] += 1

    def _set_row(self, new: NewRow) -> None:
        row, tokens, sampling = new.row, new.token_ids, new.sampling
        self.token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        self.num_known[row] = len(tokens)
        self.num_computed[row] = new.num_computed
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.logprob[row] = sampling.logprob
        self.num_candidates[row] = sampling.num_candidates
        self.reports[row] = sampling.logprob or sampling.num_candidates > 0

    def _set_blocks(self, new_blocks: list[NewBlocks]) -> None:
        _, max_rows, max_blocks = self.block_table.shape
        # A cell may be written twice in one plan, and the last block stands: hence a dictionary.
        cells: dict[int, int] = {}
        for new in new_blocks:
            first = (new.group * max_rows + new.row) * max_blocks + new.first_column
            cells.update(zip(range(first, first + len(new.block_ids)), new.block_ids, strict=True))
        packed = torch.tensor([list(cells), list(cells.values())], dtype=torch.int64).to(self.device)
        self.block_table.view(-1)[packed[0]] = packed[1].to(torch.int32)
