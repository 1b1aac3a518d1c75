"""The operator `shared_prefixes` on the host: which sequences of a step begin with the same blocks of the cache."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

MOST_SHARERS = 16
"""Members of a prefix; more sequences with the same blocks are several prefixes."""
LEAST_SHARED = 256
"""Keys: with fewer in common, sequences are by themselves."""
MOST_PREFIX_SEQS = 4096
"""Sequences that shared_prefixes looks at together."""
PREFIX_HEAD_DIM = 128
"""The largest head size whose attention reads prefixes once: kernels of others take long to compile."""


def shared_prefixes(block_table: Tensor, query_start: Tensor, seq_lens: Tensor, block_size: int) -> Tensor:
    tables, lens, starts = block_table.tolist(), seq_lens.tolist(), query_start.tolist()
    least = -(-LEAST_SHARED // block_size)
    # The blocks of a sequence that may be a prefix: full ones before its only query.
    blocks = [
        max(length - 1, 0) // block_size if end - start == 1 else 0
        for length, start, end in zip(lens, starts[:-1], starts[1:], strict=True)
    ]
    alike: dict[int, list[int]] = defaultdict(list)
    for s, count in enumerate(blocks):
        if count >= least:
            alike[tables[s][least - 1]].append(s)
    members = [s for block in sorted(alike) for s in alike[block]]
    members += [s for s, count in enumerate(blocks) if count < least]
    counts, lengths = [0] * len(lens), [0] * len(lens)
    first = 0
    for block in sorted(alike):
        sharers = alike[block]
        size = -(-len(sharers) // -(-len(sharers) // MOST_SHARERS))
        for at in range(0, len(sharers), size):
            prefix = sharers[at : at + size]
            common = _common([tables[s][: blocks[s]] for s in prefix])
            if len(prefix) > 1 and common >= least:
                counts[first + at] = len(prefix)
                for s in prefix:
                    lengths[s] = common * block_size
        first += len(sharers)
    return torch.tensor([members, counts, lengths], dtype=torch.int32, device=seq_lens.device)


def _common(tables: list[list[int]]) -> int:
    """How many of their first cells all have in common."""
    return next(
        (at for at, cells in enumerate(zip(*tables, strict=False)) if len(set(cells)) > 1),
        min(len(table) for table in tables),
    )
