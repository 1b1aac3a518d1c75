"""The blocks of the paged KV cache: who holds them, and what can be found in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from raylm.core.block_ages import BlockAges
from raylm.core.block_hash import BlockKey
from raylm.core.events import EventLog

PADDING_BLOCK = 0
"""Never handed out: padded rows of a batch write there, so that no kernel needs a mask."""


class BlockPool:
    """Blocks 1 .. num_blocks-1 with reference counts. Every call is O(1) a block.

    A full block whose tokens are known can be stored under their hash: it is found by that, and shared, while it is in
    use, and afterwards until it is handed out anew. Free blocks are handed out least recently used first, those
    in which nothing can be found before all others.
    """

    def __init__(self, num_blocks: int, *, num_groups: int = 1, events: EventLog | None = None) -> None:
        self.num_blocks = num_blocks
        self.ages = BlockAges(num_blocks)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._refs = [0] * num_blocks
        self._stored: list[tuple[int, BlockKey] | None] = [None] * num_blocks
        self._by_hash: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._events = events

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks; the caller has made sure that they are there."""
        taken = []
        unfollowed = self.ages.mask
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if self._stored[block] is not None:
                self._forget(block)
                if not block & unfollowed:
                    self.ages.evicted(block)
            if not block & unfollowed:
                self.ages.taken(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """One holder more; a free block that was found comes back into use."""
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """One holder less for each. The last block goes first: a sequence's head is the likelier to be of use again."""
        refs, free, stored, unfollowed = self._refs, self._free, self._stored, self.ages.mask
        for block in reversed(blocks):
            refs[block] = left = refs[block] - 1
            if left:
                continue
            free[block] = None
            if stored[block] is None:
                free.move_to_end(block, last=False)
            elif not block & unfollowed:
                self.ages.released(block)

    def is_private(self, block: int) -> bool:
        """Whether its one holder may write over what it has written: nobody else reads it or can find it."""
        return self._refs[block] == 1 and self._stored[block] is None

    def find(self, group: int, key: BlockKey) -> int | None:
        """The block of `group` that holds exactly these tokens after exactly this prefix."""
        block = self._by_hash[group].get(key.hash)
        if block is None:
            return None
        stored = self._stored[block]
        # Equal hashes of different tokens are no hit.
        return block if stored is not None and stored[1].content == key.content else None

    def store(self, group: int, block: int, key: BlockKey, *, is_first: bool = False) -> None:
        """Let a full block, perhaps a sequence's first, be found, unless one of equal hash can be found already."""
        by_hash = self._by_hash[group]
        if key.hash in by_hash or self._stored[block] is not None:
            return
        by_hash[key.hash] = block
        self._stored[block] = (group, key)
        if self._events is not None:
            self._events.stored(key, group, is_first=is_first)

    def forget_all(self) -> None:
        """Let no block be found any more."""
        for by_hash in self._by_hash:
            by_hash.clear()
        self._stored = [None] * self.num_blocks
        if self._events is not None:
            self._events.cleared()

    def check(self, held: Mapping[int, int]) -> None:
        """Assert what is true between two calls, where requests hold every block `held[block]` times."""
        for block in range(1, self.num_blocks):
            assert self._refs[block] == held.get(block, 0), f"block {block}"
            assert (block in self._free) == (self._refs[block] == 0), f"block {block}"
        for group, by_hash in enumerate(self._by_hash):
            for digest, block in by_hash.items():
                stored = self._stored[block]
                assert stored is not None and (stored[0], stored[1].hash) == (group, digest), f"block {block}"
        assert sum(map(len, self._by_hash)) == sum(stored is not None for stored in self._stored)

    def _forget(self, block: int) -> None:
        stored = self._stored[block]
        assert stored is not None
        group, key = stored
        self._stored[block] = None
        del self._by_hash[group][key.hash]
        if self._events is not None:
            self._events.removed(key.hash, group)
