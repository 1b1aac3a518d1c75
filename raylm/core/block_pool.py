"""The blocks of the paged KV cache."""

from __future__ import annotations

from collections import deque

PADDING_BLOCK = 0
"""Never handed out: padded rows of a batch write there, so that no kernel needs a mask."""


class BlockPool:
    """Block numbers 1 .. num_blocks-1, each free or in one hand. O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks))

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks; the caller has made sure that they are there."""
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, block_ids: list[int]) -> None:
        """Take blocks back, the tail of a sequence first: its head is the likelier to be of use again."""
        self._free.extend(reversed(block_ids))
