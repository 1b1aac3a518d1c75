"""Which blocks hold which request's keys and values."""

from __future__ import annotations

from raylm.core.block_pool import BlockPool
from raylm.core.request import Request


class KVCacheManager:
    """Gives requests the blocks that their tokens need, and takes them back."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)

    @property
    def capacity(self) -> int:
        """Tokens that fit in the whole cache."""
        return self._pool.num_usable * self.block_size

    @property
    def usage(self) -> float:
        """Share of the cache in use, 0 to 1."""
        return 1 - self._pool.num_free / self._pool.num_usable

    def allocate(self, request: Request, num_tokens: int, *, reserve: int = 0) -> list[int] | None:
        """Blocks to add so that the request's next `num_tokens` have slots, or None when they are not there.

        `reserve` blocks must stay free beyond them.
        """
        needed = -(-(request.num_computed + num_tokens) // self.block_size) - len(request.block_ids)
        if needed <= 0:
            return []
        if needed + reserve > self._pool.num_free:
            return None
        added = self._pool.take(needed)
        request.block_ids += added
        return added

    def free(self, request: Request) -> None:
        """Take back every block of a request."""
        self._pool.give_back(request.block_ids)
        request.block_ids = []
