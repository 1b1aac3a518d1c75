"""One fixed row a request for as long as it runs; the inputs of a step are gathered from the rows on the device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raylm import ops
from raylm.core.step import CacheLayout, NewRow, StepPlan
from raylm.worker.prefix_sharing import PrefixSharing
from raylm.worker.transfer import Uploader


class TableSizes(NamedTuple):
    """How much of the device's memory a RequestTable takes: its rows are as long as the longest request that the KV
    cache holds."""

    max_rows: int
    layout: CacheLayout
    chunk: int
    """Tokens that one step computes at most."""
    limit: int
    """Tokens of a request at most, however large the cache."""

    def longest(self, num_blocks: int) -> int:
        """Tokens of the longest request that a cache of `num_blocks` blocks holds."""
        return self.layout.longest(num_blocks, chunk=self.chunk, limit=self.limit)

    def bytes(self, max_model_len: int) -> int:
        """Bytes of a table for requests of `max_model_len` tokens: of token_ids and block_table, the rest is small."""
        columns = -(-max_model_len // self.layout.block_size)
        return (self.max_rows + 1) * 4 * (max_model_len + len(self.layout.windows) * columns)

    def bytes_for(self, num_blocks: int) -> int:
        """Bytes of the table that goes with a cache of `num_blocks` blocks."""
        return self.bytes(self.longest(num_blocks))

    def blocks_beside(self, available: int, *, bytes_per_block: int) -> int:
        """The most blocks that fit into `available` bytes together with their table."""

        def taken(num_blocks: int) -> int:
            return num_blocks * bytes_per_block + self.bytes_for(num_blocks)

        return bisect_right(range(1, max(available, 0) // bytes_per_block + 1), available, key=taken)


class RequestTable:
    """Rows of the running requests.

    On the device: token_ids [num_rows, max_model_len] int32; block_table [groups, num_rows, max_blocks] int32; how many
    tokens of a row are known and computed, num_known and num_computed, [num_rows] int64. A step puts what it sampled
    straight into its rows and counts there, so the next step needs nothing from the host. Cells past a row's known
    tokens hold drafts, or nothing of use.

    On the host: `known_bound` and `computed_bound` [num_rows], as if every draft were accepted. They are the counts
    themselves where a row has none on its way, and always differ by what the counts differ by.

    The last row, `padding_row`, fills a batch up to a size. It always computes its first token, with block 0 for its
    keys and values, and samples; what it gives is dropped, and no kernel needs a mask.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
        shares_in: Sequence[int] = (),
        key_bytes: int = 0,
    ) -> None:
        """`shares_in`: cache groups that keep all of a row's tokens, where attention may read once what rows share; a
        token has `key_bytes` there in a layer."""
        self.max_rows = max_rows
        self.num_rows = max_rows + 1
        self.padding_row = max_rows
        self.max_model_len = max_model_len
        self.max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.device = device
        self.upload = Uploader(device)
        # A model of one token still has the column that the padding row samples into.
        self._row_len = max(max_model_len, 2)
        self.token_ids = torch.zeros(self.num_rows, self._row_len, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(num_groups, self.num_rows, self.max_blocks, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(ops.MAX_ARRIVALS, dtype=torch.int32, device=device)
        """For the attention of steps, which come one after the other (ops.paged_attention)."""
        self.num_known = torch.zeros(self.num_rows, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(self.num_rows, dtype=torch.int64, device=device)
        self.known_bound = np.zeros(self.num_rows, dtype=np.int64)
        self.computed_bound = np.zeros(self.num_rows, dtype=np.int64)
        self.num_prompt = np.zeros(self.num_rows, dtype=np.int64)
        self.num_candidates = np.zeros(self.num_rows, dtype=np.int64)
        self.shares_in = shares_in
        self._sharing: PrefixSharing | None = None
        if shares_in:
            sizes = {"num_rows": self.num_rows, "block_size": block_size, "key_bytes": key_bytes}
            self._sharing = PrefixSharing(**sizes, group=shares_in[0])
        self.num_known[self.padding_row] = self.known_bound[self.padding_row] = 1

    def apply(self, plan: StepPlan) -> None:
        """Take in what the plan brings: bounds of rows first, then new requests, blocks, chosen tokens and drafts."""
        for row, bound in plan.bounds:
            self.computed_bound[row] -= self.known_bound[row] - bound
            self.known_bound[row] = bound
        if self._sharing is not None:
            self._sharing.apply(plan)
        if plan.new_rows:
            self._begin(plan.new_rows)
        if plan.new_blocks:
            self._add_blocks(plan)
        if plan.chosen:
            self._choose(plan.chosen)
        if plan.drafts:
            self._draft(plan)

    def share_prefixes(self, rows: np.ndarray) -> bool:
        """Whether attention is to read once what a step's rows, int64 [S], share."""
        return self._sharing is not None and self._sharing.pays(rows)

    def count(self, rows: np.ndarray, query_lens: np.ndarray, samples: np.ndarray) -> None:
        """Note on the host that rows[i] computes query_lens[i] tokens; where samples[i], it knows one more then."""
        self.computed_bound[rows] += query_lens
        self.known_bound[rows[samples]] = self.computed_bound[rows[samples]] + 1
        self.computed_bound[self.padding_row] = 0
        self.known_bound[self.padding_row] = 1

    def accept(self, rows: Tensor, query_start: Tensor, sample_start: Tensor, token_ids: Tensor) -> Tensor:
        """Count a step of the rows, int64 [S], on the device: ops.accept with this table."""
        return ops.accept(self.token_ids, self.num_known, self.num_computed, rows, query_start, sample_start, token_ids)

    def next_tokens(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The tokens behind positions of rows, int64 [count] like both of them."""
        return self.token_ids.view(-1).index_select(0, rows * self._row_len + positions + 1).long()

    def _begin(self, new_rows: list[NewRow]) -> None:
        cells, values = [], []
        for new in new_rows:
            row = new.row
            self.known_bound[row] = len(new.token_ids)
            self.computed_bound[row] = new.num_computed
            self.num_prompt[row] = new.sampling.num_prompt
            self.num_candidates[row] = new.sampling.num_candidates
            cells.append(np.arange(row * self._row_len, row * self._row_len + len(new.token_ids)))
            values.append(np.array(new.token_ids, dtype=np.int32))
        rows = np.array([new.row for new in new_rows])
        counts = self.known_bound[rows], self.computed_bound[rows]
        at, tokens, where, known, computed = self.upload(np.concatenate(cells), np.concatenate(values), rows, *counts)
        self.token_ids.view(-1).index_copy_(0, at, tokens)
        self.num_known.index_copy_(0, where, known)
        self.num_computed.index_copy_(0, where, computed)

    def _add_blocks(self, plan: StepPlan) -> None:
        # A cell may be written twice in one plan, and the last block stands: hence a dictionary.
        cells: dict[int, int] = {}
        for new in plan.new_blocks:
            row, group, column, block_ids = new
            first = (group * self.num_rows + row) * self.max_blocks + column
            if len(block_ids) == 1:  # Most have one, and there may be a thousand of them.
                cells[first] = block_ids[0]
            else:
                cells.update(zip(range(first, first + len(block_ids)), block_ids, strict=True))
        count = len(cells)
        at, block_ids = self.upload(np.fromiter(cells, np.int64, count), np.fromiter(cells.values(), np.int32, count))
        self.block_table.view(-1).index_copy_(0, at, block_ids)

    def _choose(self, chosen: list[tuple[int, int]]) -> None:
        """The rows know one token more, of which the host knows the place: they are beams, which have no drafts."""
        rows, token_ids = np.array(chosen, dtype=np.int64).T.copy()
        cells = rows * self._row_len + self.known_bound[rows]
        self.known_bound[rows] += 1
        where, at, tokens, known = self.upload(rows, cells, token_ids.astype(np.int32), self.known_bound[rows])
        self.token_ids.view(-1).index_copy_(0, at, tokens)
        self.num_known.index_copy_(0, where, known)

    def _draft(self, plan: StepPlan) -> None:
        """Put drafts into their cells, but not over what the rows know by now."""
        lens = np.array([len(draft.token_ids) for draft in plan.drafts])
        rows = np.repeat(np.array([draft.row for draft in plan.drafts]), lens)
        firsts = np.array([draft.first for draft in plan.drafts])
        positions = np.arange(lens.sum()) + np.repeat(firsts - (np.cumsum(lens) - lens), lens)
        values = np.concatenate([np.array(draft.token_ids, dtype=np.int32) for draft in plan.drafts])
        of, places, tokens = self.upload(rows, positions, values)
        # The padding row's second cell takes what must not be written.
        nowhere = self.padding_row * self._row_len + 1
        cells = torch.where(places >= self.num_known.index_select(0, of), of * self._row_len + places, nowhere)
        self.token_ids.view(-1).index_copy_(0, cells, tokens)
