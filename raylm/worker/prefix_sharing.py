"""Whether the rows of a step have so much of their caches in common that attention reads that once."""

from __future__ import annotations

import numpy as np

from raylm import ops
from raylm.core.step import StepPlan

LEAST_SAVED = 192 << 20
"""Bytes of keys and values that a layer need not read again for other rows, at least: what they take from a GPU's L2
cache, where they are after the first row, is then longer than a second launch and the joining of its results."""


class PrefixSharing:
    """What the host knows of rows that share blocks: of each, the block that its first ops.LEAST_SHARED keys end in,
    and how many keys were there when it began. Which keys rows share is found on the device (ops.shared_prefixes)."""

    def __init__(self, *, num_rows: int, block_size: int, group: int, key_bytes: int) -> None:
        """`group` is a cache group whose blocks keep all tokens; other such groups share alike. `key_bytes`: a token's
        keys and values in a layer."""
        self._group = group
        self._least_keys = LEAST_SAVED / key_bytes
        self._column = -(-ops.LEAST_SHARED // block_size) - 1
        self._block = np.zeros(num_rows, dtype=np.int64)
        self._found = np.zeros(num_rows, dtype=np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Take in what a plan brings."""
        for new in plan.new_rows:
            self._found[new.row] = new.num_computed if new.num_computed >= ops.LEAST_SHARED else 0
        for blocks in plan.new_blocks:
            at = self._column - blocks.first_column
            if blocks.group == self._group and 0 <= at < len(blocks.block_ids):
                self._block[blocks.row] = blocks.block_ids[at]

    def pays(self, rows: np.ndarray) -> bool:
        """Whether a step of the rows, int64 [S], had better look for prefixes."""
        found = self._found[rows]
        if found.sum() < self._least_keys or len(rows) > ops.MOST_PREFIX_SEQS:
            return False
        _, family, sizes = np.unique(self._block[rows], return_inverse=True, return_counts=True)
        saved = 1 - -(-sizes // ops.MOST_SHARERS) / sizes
        return bool(np.bincount(family, weights=found) @ saved >= self._least_keys)
