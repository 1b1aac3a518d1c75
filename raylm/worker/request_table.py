"""One fixed row a request for as long as it runs; the inputs of a step are gathered from the rows on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raylm import ops
from raylm.core.step import NewRow, RowPenalties, StepPlan
from raylm.ops.penalties import Penalties
from raylm.ops.sampling import Sampling
from raylm.worker.transfer import Uploader

_NO_CELLS = np.empty(0, dtype=np.int64)
_NO_PENALTIES = RowPenalties(0, repetition=1.0, frequency=0.0, presence=0.0)


class RequestTable:
    """Rows of the running requests.

    On the device: token_ids [max_rows + 1, max_model_len] int64 and block_table [groups, max_rows + 1, max_blocks]
    int32. A sampled token goes straight into its row, so the next step needs nothing from the host. On the host: how
    many tokens of a row are known and computed, how it samples and what it reports, each [max_rows + 1].

    The last row, `padding_row`, fills a batch up to a size. It always computes its first token, with block 0 for its
    keys and values, and samples; what it gives is dropped, and no kernel needs a mask.
    """

    def __init__(
        self, *, max_rows: int, max_model_len: int, block_size: int, num_groups: int, device: torch.device
    ) -> None:
        self.max_rows = max_rows
        self.padding_row = max_rows
        self.max_model_len = max_model_len
        self.max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.device = device
        self.upload = Uploader(device)
        num_rows = max_rows + 1
        # A model of one token still has the column that the padding row samples into.
        self._row_len = max(max_model_len, 2)
        self.token_ids = torch.zeros(num_rows, self._row_len, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(num_groups, num_rows, self.max_blocks, dtype=torch.int32, device=device)
        self.num_known = np.zeros(num_rows, dtype=np.int64)
        self.num_computed = np.zeros(num_rows, dtype=np.int64)
        self.num_known[self.padding_row] = 1
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.int64)
        self.logprob = np.zeros(num_rows, dtype=np.bool_)
        self.num_candidates = np.zeros(num_rows, dtype=np.int64)
        self.reports = np.zeros(num_rows, dtype=np.bool_)
        """Rows that want log probabilities or candidates: everything but a token."""
        self.num_prompt = np.zeros(num_rows, dtype=np.int64)
        self.repetition = np.ones(num_rows, dtype=np.float32)
        self.frequency = np.zeros(num_rows, dtype=np.float32)
        self.presence = np.zeros(num_rows, dtype=np.float32)
        self.penalizes = np.zeros(num_rows, dtype=np.bool_)
        self.needs_logits = np.zeros(num_rows, dtype=np.bool_)
        """Rows that report or penalize: it takes more than to sample from the logits as they are."""

    def apply(self, plan: StepPlan) -> None:
        """Take in what the plan brings: new requests first, then new blocks and chosen tokens."""
        if not (plan.new_rows or plan.new_blocks or plan.chosen):
            return
        for new in plan.new_rows:
            self._set_row(new)
        token_cells, token_ids = self._new_tokens(plan)
        block_cells, block_ids = self._new_blocks(plan)
        tensors = self.upload(token_cells, token_ids, block_cells, block_ids)
        if token_cells.size:
            self.token_ids.view(-1).index_copy_(0, tensors[0], tensors[1])
        if block_cells.size:
            self.block_table.view(-1).index_copy_(0, tensors[2], tensors[3])

    def token_cells(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where the tokens of rows stand in the flattened token_ids."""
        return rows * self._row_len + positions

    def block_cells(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where the blocks of rows' positions stand in one group of the flattened block_table."""
        return rows * self.max_blocks + positions // self.block_size

    def sampling(self, rows: np.ndarray) -> Sampling:
        """How rows sample, and the positions of the tokens that they sample next."""
        return Sampling(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            self.num_known[rows],
        )

    def penalize(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        """The logits [num_rows, vocab] of the rows' next tokens after the rows' penalties: the same tensor where none
        has any. Tokens whose step is not over on the host are counted too: they are in token_ids already."""
        if not self.penalizes[rows].any():
            return logits
        return ops.penalize(logits, self.token_ids, *self.upload(*self._penalties(rows)))

    def _penalties(self, rows: np.ndarray) -> Penalties:
        return Penalties(
            rows,
            self.num_prompt[rows],
            self.num_known[rows],
            self.repetition[rows],
            self.frequency[rows],
            self.presence[rows],
        )

    def compute(self, rows: np.ndarray, seq_lens: np.ndarray) -> None:
        """Note that the first seq_lens[i] tokens of rows[i] are computed."""
        self.num_computed[rows] = seq_lens
        self.num_computed[self.padding_row] = 0

    def write_tokens(self, cells: Tensor, token_ids: Tensor) -> None:
        """Put tokens into cells of token_ids, both [num_rows] on the device."""
        self.token_ids.view(-1).index_copy_(0, cells, token_ids)

    def _set_row(self, new: NewRow) -> None:
        row, sampling = new.row, new.sampling
        self.num_known[row] = len(new.token_ids)
        self.num_computed[row] = new.num_computed
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.logprob[row] = sampling.logprob
        self.num_candidates[row] = sampling.num_candidates
        self.reports[row] = sampling.logprob or sampling.num_candidates > 0
        self.penalizes[row] = sampling.penalties is not None
        self.needs_logits[row] = self.reports[row] or self.penalizes[row]
        penalties = sampling.penalties or _NO_PENALTIES
        self.num_prompt[row] = penalties.num_prompt
        self.repetition[row] = penalties.repetition
        self.frequency[row] = penalties.frequency
        self.presence[row] = penalties.presence

    def _new_tokens(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Cells of token_ids and what they are to hold; the rows of chosen tokens know one more from now on."""
        cells, values = [_NO_CELLS], [_NO_CELLS]
        for new in plan.new_rows:
            first = new.row * self._row_len
            cells.append(np.arange(first, first + len(new.token_ids)))
            values.append(np.array(new.token_ids, dtype=np.int64))
        if plan.chosen:
            rows, token_ids = np.array(plan.chosen, dtype=np.int64).T
            cells.append(self.token_cells(rows, self.num_known[rows]))
            values.append(token_ids)
            self.num_known[rows] += 1
        return np.concatenate(cells), np.concatenate(values)

    def _new_blocks(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Cells of block_table and the blocks that they are to hold."""
        _, num_rows, max_blocks = self.block_table.shape
        # A cell may be written twice in one plan, and the last block stands: hence a dictionary.
        cells: dict[int, int] = {}
        for new in plan.new_blocks:
            first = (new.group * num_rows + new.row) * max_blocks + new.first_column
            cells.update(zip(range(first, first + len(new.block_ids)), new.block_ids, strict=True))
        count = len(cells)
        return np.fromiter(cells, np.int64, count), np.fromiter(cells.values(), np.int32, count)
