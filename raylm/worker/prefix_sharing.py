"""Whether attention in a step reads keys and values that its rows have in common only once."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from raylm import ops
from raylm.core.step import StepPlan

LEAST_SAVED = 192 << 20
"""Bytes of keys and values. A step shares prefixes if that spares each layer the reading of at least so many. A prefix
is in the GPU's L2 cache after its first row, and reading less than this from there is faster than a second launch."""


class PrefixSharing:
    """What the host knows of rows that share blocks: of each, the blocks that end at ops.SHARED_DEPTHS. Exactly what
    they share is found on the device (ops.shared_prefixes)."""

    def __init__(self, *, num_rows: int, block_size: int, group: int, key_bytes: int) -> None:
        """`group` is a cache group whose blocks keep all tokens; other such groups share alike. `key_bytes`: a token's
        keys and values in a layer."""
        self._group = group
        self._least_keys = LEAST_SAVED / key_bytes
        self._columns = [-(-depth // block_size) - 1 for depth in ops.SHARED_DEPTHS]
        self._nobodys = -1 - np.arange(num_rows)
        self._blocks = np.tile(self._nobodys, (len(self._columns), 1))
        self._asked: tuple[bytes, bool] | None = None
        """The rows that were asked about last, and the answer, as long as it stands."""

    def apply(self, plan: StepPlan) -> None:
        """Take in what a plan brings."""
        if plan.new_rows:
            rows = [new.row for new in plan.new_rows]
            self._blocks[:, rows] = self._nobodys[rows]
            self._asked = None
        for row, group, first, block_ids in plan.new_blocks:
            if group != self._group:
                continue
            for depth in range(bisect_left(self._columns, first), bisect_left(self._columns, first + len(block_ids))):
                self._blocks[depth, row] = block_ids[self._columns[depth] - first]
                self._asked = None

    def pays(self, rows: np.ndarray) -> bool:
        """Whether a step of the rows, int64 [S], is faster if attention reads once what they share."""
        if not 1 < len(rows) <= ops.MOST_PREFIX_SEQS:
            return False
        asked = rows.tobytes()
        if self._asked is None or self._asked[0] != asked:
            self._asked = asked, self._spared_keys(rows) >= self._least_keys
        return self._asked[1]

    def _spared_keys(self, rows: np.ndarray) -> float:
        """How many keys need not be read for each row, at least: each row counts at the depth where it shares most."""
        spared = np.zeros(len(rows))
        for depth, blocks in zip(ops.SHARED_DEPTHS, self._blocks, strict=True):
            _, family, sizes = np.unique(blocks[rows], return_inverse=True, return_counts=True)
            if sizes.max() == 1:
                break
            share = 1 - -(-sizes // ops.MOST_SHARERS) / sizes
            np.maximum(spared, depth * share[family], out=spared)
        return float(spared.sum())
