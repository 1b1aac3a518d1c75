"""Runs a proposer beside the steps of its target: before those that verify drafts, and after all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from raylm.layers.attention import AttentionMetadata
from raylm.worker.graph_runner import MOST_WIDE_GRAPHS, ROW_SIZES, Capture, Run
from raylm.worker.input_batch import DeviceArrays, StepArrays
from raylm.worker.proposers import DeviceProposer, Rows, StepTokens
from raylm.worker.transfer import Uploader, unpack

_WARM_UP_DRAFTS = 2
"""More of them take no more memory: each is made in that of the one before."""


_MISSED = 8
"""Tokens that a request computes anew of what it finds in the cache, where the proposer is lazy."""


class DraftTable(Rows, Protocol):
    """The requests' rows, on the device and on the host: RequestTable."""

    max_rows: int
    max_model_len: int
    padding_row: int
    num_computed: Tensor
    """int64 [rows]."""
    device: torch.device
    upload: Uploader


class DraftRunner:
    """Calls a proposer with what it needs of a step. Nothing waits for the device.

    A lazy proposer costs nothing where no row verifies drafts: steps of decodes are absorbed when a row's drafts are
    wanted. (What such a row leaves to the prefix cache, or to the swap pool, misses the proposer's keys and values of
    its last tokens. A request that comes upon it makes up for a few tokens; after more its drafts are worse.)

    With `capture`, drafts are made by CUDA graphs, one for each padded number of rows and number of drafts: made as
    GraphRunner makes its own, when a shape comes a second time. `absorb` may be captured with the step that it follows,
    unless the proposer is lazy.
    """

    def __init__(
        self,
        proposer: DeviceProposer,
        table: DraftTable,
        *,
        group: int,
        max_tokens: int,
        capture: Capture | None = None,
    ) -> None:
        """`group`: the cache group of the proposer's blocks; `max_tokens`: those of the largest step."""
        self.is_lazy = proposer.IS_LAZY
        self._proposer = proposer
        self._table = table
        self._group = group
        self._max_tokens = max_tokens
        self._capture = capture
        self._sizes = [*(size for size in ROW_SIZES if size < table.max_rows), table.max_rows]
        self._graphs: dict[_Shape, _Graph] = {}
        self._num_captured = 0
        self._behind = np.zeros(table.max_rows + 1, dtype=np.int64)
        """Tokens before the next one that each row computes that are not absorbed, at most."""
        self._absorbs = False
        """Whether a lazy proposer, too, absorbs the step: of a row it computes more than one token that counts."""

    def warm_up(self) -> None:
        """Capture the graph that takes the most memory; nothing without graphs."""
        if self._capture is not None:
            nothing = np.empty(0, dtype=np.int64)
            for _ in range(2):
                self._replay(nothing, nothing, _WARM_UP_DRAFTS, self._capture, size=self._sizes[-1])

    def begin(self, rows: list[int], num_computed: list[int]) -> None:
        """New requests take these rows, with so many tokens in the cache, of which the last ones may not be absorbed:
        whoever computed them may have ended, or left its row, before."""
        self._behind[rows] = np.minimum(num_computed, _MISSED)

    def prepare(
        self,
        rows: np.ndarray,
        num_drafts: np.ndarray,
        chunks: np.ndarray,
        *,
        given: Sequence[int] = (),
        max_seq_len: int,
    ) -> None:
        """Begin a step: put num_drafts[i] drafts behind the known tokens of rows[i], both int64 [S]. The table must
        have the blocks of the step; its sequences have `max_seq_len` tokens at most. chunks[i], bool [S]: the row
        computes known tokens beside the last one. `given`: rows whose drafts came with the plan."""
        keeps = np.isin(rows, given) if given else np.zeros(len(rows), dtype=np.bool_)
        drafted = (num_drafts > 0) & ~keeps
        self._absorbs = bool((chunks | keeps).any())
        if self.is_lazy:
            # The token before the last known one is left to draft().
            behind = self._behind[rows]
            self._catch_up(rows[(drafted & (behind > 1)) | ((chunks | keeps) & (behind > 0))], max_seq_len)
        if drafted.any():
            self._draft(rows[drafted], num_drafts[drafted], max_seq_len)

    def _draft(self, rows: np.ndarray, counts: np.ndarray, max_seq_len: int) -> None:
        self._behind[rows] = 0
        most = int(counts.max())
        if self._capture is None:
            on_device = self._table.upload(rows, counts)
            self._proposer.draft(on_device[0], on_device[1], most, max_seq_len=max_seq_len)
        else:
            self._replay(rows, counts, most, self._capture)

    def postpones(self, rows: np.ndarray, query_lens: np.ndarray, num_drafts: np.ndarray) -> bool:
        """Whether the step that was prepared need not be absorbed. rows[i] has computed query_lens[i] tokens,
        num_drafts[i] of them drafts, all int64 [S]."""
        if self.is_lazy and not self._absorbs:
            # Drafts that were made for this step are computed, all but the last one.
            self._behind[rows] = np.where(num_drafts > 0, 1, self._behind[rows] + query_lens)
            return True
        # What was postponed before stays so, and what comes behind it counts with it.
        self._behind[rows] += np.where(self._behind[rows] > 0, query_lens, 0)
        return False

    def absorb(self, arrays: DeviceArrays, positions: Tensor, *, max_query_len: int, max_seq_len: int) -> None:
        """Compute the tokens of a step that the table has accepted; positions: int64 [T]. Nothing here depends on
        values."""
        table, size = self._table, self._table.block_size
        token_rows, _, rows, query_start = arrays
        of_group = table.block_table[self._group]
        blocks = of_group[token_rows, positions // size].long()
        ends = positions.index_select(0, query_start[1:].long() - 1)
        meta = AttentionMetadata(
            query_start=query_start,
            seq_lens=(ends + 1).int(),
            block_table=of_group[:, : -(-max_seq_len // size)].index_select(0, rows),
            slot_mapping=blocks * size + positions % size,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            arrivals=table.arrivals,
        )
        token_ids = table.token_ids[token_rows, positions].long()
        self._proposer.absorb(StepTokens(token_ids, token_rows, positions, rows, meta))

    def _catch_up(self, rows: np.ndarray, max_seq_len: int) -> None:
        """Absorb what was postponed, before the next token that each row computes."""
        left = self._behind[rows]
        self._behind[rows] = 0
        while rows.size:
            lens = np.minimum(left, max(self._max_tokens // len(rows), 1))[: self._max_tokens]
            some = rows[: len(lens)]
            host = StepArrays.build(some, lens)
            # How far each token is before the next one of its row.
            distance = np.repeat(left[: len(lens)], lens) - host.offsets
            before, *on_device = self._table.upload(distance, *host)
            arrays = DeviceArrays(*on_device)
            positions = self._table.num_computed.index_select(0, arrays.token_rows) - before
            self.absorb(arrays, positions, max_query_len=int(lens.max()), max_seq_len=max_seq_len)
            left[: len(lens)] -= lens
            rows, left = rows[left > 0], left[left > 0]

    def _replay(
        self, rows: np.ndarray, counts: np.ndarray, most: int, capture: Capture, *, size: int | None = None
    ) -> None:
        """Drafts by a graph, of `size` rows at least. A row that is missing is the padding row, and wants none."""
        size = size or self._sizes[bisect_left(self._sizes, len(rows))]
        arrays = [np.full(size, self._table.padding_row), np.zeros(size, dtype=np.int64)]
        arrays[0][: len(rows)], arrays[1][: len(rows)] = rows, counts
        packed = self._table.upload.pack(arrays)
        shape = _Shape(size, most)
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._graphs[shape] = _Graph(packed, arrays, self._table.device)
        graph.buffer.copy_(packed, non_blocking=True)
        if graph.replay is None and graph.has_run and self._num_captured < MOST_WIDE_GRAPHS:
            graph.replay = capture(lambda: self._compute(graph, most))
            self._num_captured += 1
        if graph.replay is not None:
            graph.replay()
        else:
            self._compute(graph, most)
            graph.has_run = True

    def _compute(self, graph: _Graph, most: int) -> None:
        self._proposer.draft(graph.rows, graph.counts, most, max_seq_len=self._table.max_model_len)


class _Shape(NamedTuple):
    num_rows: int
    num_drafts: int


class _Graph:
    """One shape: where its inputs lie, and how it is launched."""

    def __init__(self, packed: Tensor, arrays: list[np.ndarray], device: torch.device) -> None:
        """`packed` is what its inputs look like, made of `arrays`."""
        self.buffer = torch.empty_like(packed, device=device)
        self.rows, self.counts = unpack(self.buffer, arrays)
        self.has_run = False
        self.replay: Run | None = None
