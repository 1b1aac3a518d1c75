"""The operator `shared_prefixes` on the host: which sequences of a step begin with the same blocks of the cache."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
from torch import Tensor

MOST_SHARERS = 16
"""Members of a prefix; more sequences with the same blocks are several prefixes."""
SHARED_DEPTHS = tuple(256 << depth for depth in range(8))
"""Keys: where sequences are compared. With fewer than the first in common, they are by themselves."""
MOST_PREFIX_SEQS = 1024
"""Sequences that shared_prefixes looks at together."""
PREFIX_HEAD_DIM = 128
"""The largest head size whose attention reads prefixes once: kernels of others take long to compile."""


def shared_prefixes(block_table: Tensor, query_start: Tensor, seq_lens: Tensor, block_size: int) -> Tensor:
    tables, lens, starts = block_table.tolist(), seq_lens.tolist(), query_start.tolist()
    # The blocks of a sequence that may be a prefix: full ones before its only query.
    blocks = [
        max(length - 1, 0) // block_size if end - start == 1 else 0
        for length, start, end in zip(lens, starts[:-1], starts[1:], strict=True)
    ]
    own = [cells[:count] for cells, count in zip(tables, blocks, strict=True)]
    alike = _side_by_side(own, block_size)
    members = [s for block in sorted(alike) for s in alike[block]]
    members += sorted(set(range(len(lens))) - set(members))
    counts, lengths = [0] * len(lens), [0] * len(lens)
    first = 0
    for block in sorted(alike):
        sharers = alike[block]
        size = -(-len(sharers) // -(-len(sharers) // MOST_SHARERS))
        for at in range(0, len(sharers), size):
            prefix = sharers[at : at + size]
            common = _common([own[s] for s in prefix])
            if len(prefix) > 1 and common >= -(-SHARED_DEPTHS[0] // block_size):
                counts[first + at] = len(prefix)
                for s in prefix:
                    lengths[s] = common * block_size
        first += len(sharers)
    return torch.tensor([members, counts, lengths], dtype=torch.int32, device=seq_lens.device)


def _side_by_side(tables: list[list[int]], block_size: int) -> dict[int, list[int]]:
    """Sequences by the block at the depth where most keys are spared, of those where others have the same."""
    alike: dict[int, list[int]] = defaultdict(list)
    columns = [-(-depth // block_size) - 1 for depth in SHARED_DEPTHS]
    sharers = [Counter(table[column] for table in tables if len(table) > column) for column in columns]
    for s, table in enumerate(tables):
        best = spared = 0
        for depth, column, of_depth in zip(SHARED_DEPTHS, columns, sharers, strict=True):
            count = of_depth[table[column]] if len(table) > column else 0
            if count < 2:
                break
            here = depth // count * (count - -(-count // MOST_SHARERS))
            if here >= spared:
                best, spared = table[column], here
        if spared:
            alike[best].append(s)
    return alike


def _common(tables: list[list[int]]) -> int:
    """How many of their first cells all have in common."""
    return next(
        (at for at, cells in enumerate(zip(*tables, strict=False)) if len(set(cells)) > 1),
        min(len(table) for table in tables),
    )
