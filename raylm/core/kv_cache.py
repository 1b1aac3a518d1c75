"""Which blocks hold which request's keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from raylm.core.block_ages import BlockAges
from raylm.core.block_hash import Hash, extend_keys, root_hash
from raylm.core.block_pool import PADDING_BLOCK, BlockPool
from raylm.core.events import EventLog
from raylm.core.request import Request
from raylm.core.step import CacheLayout, NewBlocks

Pairs = list[tuple[int, int]]


class SwapCosts(NamedTuple):
    """What a preempted request costs either way. 0 tokens a second: not known, so nothing is swapped."""

    block_bytes: int = 0
    prefill_tokens_per_s: float = 0.0
    swap_bytes_per_s: float = 0.0

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether copying the blocks out and in again takes less time than computing the tokens again."""
        if not self.prefill_tokens_per_s or not self.swap_bytes_per_s:
            return False
        copy_s = 2 * num_blocks * self.block_bytes / self.swap_bytes_per_s
        return copy_s < num_tokens / self.prefill_tokens_per_s


class KVCacheManager:
    """Gives requests the blocks that their tokens need, shares the blocks of equal prefixes, and takes blocks back.

    A request's `block_ids` has one list a cache group, all of equal length: column c holds the positions from
    c * block_size on. Columns that have left a group's sliding window are given back and become block 0.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_blocks: int,
        hash_of: Hash | None = None,
        model: str = "",
        num_host_blocks: int = 0,
        swap_costs: SwapCosts | None = None,
        events: EventLog | None = None,
    ) -> None:
        """`hash_of` switches prefix caching on; `num_host_blocks` is the size of the swap pool."""
        self.layout = layout
        self.block_size = layout.block_size
        self.num_queries = 0
        self.num_hits = 0
        self._hash_of = hash_of
        self._epoch = 0
        self._model = model
        self._costs = swap_costs or SwapCosts()
        self._groups = range(len(layout.windows))
        self._full = [group for group in self._groups if not layout.windows[group]]
        self._sliding = [group for group in self._groups if layout.windows[group]]
        self._pool = BlockPool(num_blocks, num_groups=len(layout.windows), events=events)
        self._num_host = num_host_blocks
        self._host_free = list(range(num_host_blocks))

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold together."""
        return self._pool.num_usable

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def ages(self) -> BlockAges:
        return self._pool.ages

    @property
    def usage(self) -> float:
        """Share of the cache in use, 0 to 1; what is only kept in case it is asked for again does not count."""
        return 1 - self._pool.num_free / self._pool.num_usable

    def attach_prefix(self, request: Request) -> None:
        """Give a request that holds nothing the longest prefix of its tokens, but the last, that is cached."""
        if self._hash_of is None:
            return
        self._extend_keys(request)
        num_columns = self._longest_prefix(request, (len(request.token_ids) - 1) // self.block_size)
        unfollowed = self.ages.mask
        for group in self._groups:
            first = self._first_read(group, num_columns * self.block_size)
            blocks = [PADDING_BLOCK] * first
            for column in range(first, num_columns):
                block = self._pool.find(group, request.keys[column])
                assert block is not None
                if not block & unfollowed:
                    self.ages.found(block)
                self._pool.share(block)
                blocks.append(block)
            request.block_ids[group] = blocks
        request.num_stored = num_columns * self.block_size
        request.begin_at(request.num_stored)
        request.num_slots = request.num_computed

    def num_cached(self, request: Request) -> int:
        """Tokens of the prefix that attach_prefix() would give the request now."""
        if self._hash_of is None:
            return 0
        self._extend_keys(request)
        return self._longest_prefix(request, (len(request.token_ids) - 1) // self.block_size) * self.block_size

    def count_hits(self, request: Request) -> None:
        """Count an admitted request's lookup."""
        if self._hash_of is not None:
            self.num_queries += len(request.token_ids)
            self.num_hits += request.num_computed

    def allocate(self, request: Request, num_tokens: int, *, reserve: int = 0) -> Pairs | None:
        """Make room for the request's next `num_tokens`: device blocks to copy first, or None if there is no room.

        `reserve` blocks stay free beyond them. Blocks before the window are given back at once, so that the kernel
        still reads what this step needs.
        """
        if self._sliding:
            self.store_full(request)
            self._drop_unread(request)
        # A fork writes into a block that others read: from its first position on it needs one of its own.
        forked = self._shared_tail(request) if request.is_fork else []
        columns = len(request.block_ids[0])
        added = -(-(request.num_computed + num_tokens) // self.block_size) - columns
        needed = len(self._groups) * max(added, 0) + len(forked)
        if needed + reserve > self._pool.num_free:
            return None
        copies = self._copy_tail(request, forked) if forked else []
        request.is_fork = False
        if added > 0:
            for group in self._groups:
                request.block_ids[group] += self._pool.take(added)
            request.num_slots = (columns + added) * self.block_size
        return copies

    def append_block(self, request: Request) -> NewBlocks | None:
        """Give a request whose blocks are full one more, and say it as a plan does: what allocate() does for a plain
        decode, in a third of its time, as a step may do it a thousand times. None where allocate() must do it: with
        several cache groups or a window, after a fork, and without a free block."""
        if len(self._groups) > 1 or self._sliding or request.is_fork or not self._pool.num_free:
            return None
        blocks, added = request.block_ids[0], self._pool.take(1)
        column = len(blocks)
        blocks += added
        request.num_slots = (column + 1) * self.block_size
        return NewBlocks(request.row, 0, column, added)

    def blocks_from(self, request: Request, first_column: int) -> list[NewBlocks]:
        """The request's block table from a column on, as a plan says it."""
        return [
            NewBlocks(request.row, group, first_column, request.block_ids[group][first_column:])
            for group in self._groups
        ]

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Let a request that holds nothing share what the parent has of its first `num_tokens` tokens."""
        num_columns = -(-num_tokens // self.block_size)
        for group in self._groups:
            first = self._first_read(group, num_tokens)
            blocks = parent.block_ids[group][first:num_columns]
            for block in blocks:
                self._pool.share(block)
            child.block_ids[group] = [PADDING_BLOCK] * first + blocks
        child.begin_at(num_tokens)
        child.num_slots = num_columns * self.block_size
        child.num_stored = num_tokens // self.block_size * self.block_size
        child.keys = parent.keys[: num_tokens // self.block_size]
        child.root_hash = parent.root_hash
        child.is_fork = True

    def store_full(self, request: Request) -> None:
        """Let the request's full blocks whose tokens are known be found by others."""
        if self._hash_of is None:
            return
        last = min(request.num_computed, len(request.token_ids)) // self.block_size
        if last * self.block_size <= request.num_stored:
            return
        self._extend_keys(request)
        for column in range(request.num_stored // self.block_size, last):
            for group in self._groups:
                if block := request.block_ids[group][column]:
                    self._pool.store(group, block, request.keys[column], is_first=column == 0)
        request.num_stored = last * self.block_size

    def free(self, request: Request) -> None:
        """Take back everything that a request holds, on the device and on the host."""
        for group in self._groups:
            # Groups differ in columns that are block 0.
            self._pool.give_back([block for block in request.block_ids[group] if block])
            request.block_ids[group] = []
        for held in request.host_blocks:
            self._host_free += [block for block in held if block >= 0]
        request.host_blocks = []
        request.num_slots = request.num_stored = 0

    def swap_out(self, request: Request) -> Pairs | None:
        """Move a request's blocks to the host where that is the cheaper way: (device, host) pairs, else None."""
        self._drop_unread(request)
        num_columns = -(-request.num_computed // self.block_size)
        num_blocks = sum(1 for group in self._groups for block in request.block_ids[group][:num_columns] if block)
        if num_blocks > len(self._host_free) or not self._costs.prefers_swap(request.num_computed, num_blocks):
            return None
        pairs: Pairs = []
        host_blocks = []
        for group in self._groups:
            held = []
            for block in request.block_ids[group][:num_columns]:
                held.append(self._host_free.pop() if block else -1)
                if block:
                    pairs.append((block, held[-1]))
            host_blocks.append(held)
        self.free(request)
        request.host_blocks = host_blocks
        return pairs

    def swap_in(self, request: Request, num_tokens: int, *, reserve: int) -> Pairs | None:
        """Bring a request's blocks back, with room for its next `num_tokens`: (host, device) pairs, or None."""
        held = len(request.host_blocks[0])
        # It may hold more than it needs: what it had computed of drafts that were rejected while it was away.
        added = max(-(-(request.num_computed + num_tokens) // self.block_size) - held, 0)
        moved = sum(1 for blocks in request.host_blocks for block in blocks if block >= 0)
        if moved + len(self._groups) * added + reserve > self._pool.num_free:
            return None
        pairs: Pairs = []
        for group in self._groups:
            blocks = []
            for host in request.host_blocks[group]:
                blocks += self._pool.take(1) if host >= 0 else [PADDING_BLOCK]
                if host >= 0:
                    pairs.append((host, blocks[-1]))
                    self._host_free.append(host)
            request.block_ids[group] = blocks + self._pool.take(added)
        request.host_blocks = []
        request.num_slots = (held + added) * self.block_size
        return pairs

    def forget_prefixes(self) -> None:
        """Let nothing be found any more that was computed until now, as after a change of weights. What running
        requests go on to store is found by nobody: newcomers look for it under another root."""
        self._epoch += 1
        self._pool.forget_all()

    def check(self, requests: Iterable[Request]) -> None:
        """Assert what is true between two calls, where these are all requests that may hold anything: every block is
        free or held as often as they hold it, on the device and on the host."""
        held: Counter[int] = Counter()
        hosts: list[int] = []
        for request in requests:
            assert len({len(blocks) for blocks in request.block_ids}) == 1, request.id
            for blocks in request.block_ids:
                held.update(block for block in blocks if block)
            hosts += [block for blocks in request.host_blocks for block in blocks if block >= 0]
        self._pool.check(held)
        assert sorted(hosts + self._host_free) == list(range(self._num_host)), "blocks of the host"

    def _extend_keys(self, request: Request) -> None:
        assert self._hash_of is not None
        if not request.root_hash:
            salt = request.options.cache_salt
            request.root_hash = root_hash(self._hash_of, model=self._model, adapter="", salt=salt, epoch=self._epoch)
        extend_keys(
            request.keys,
            request.token_ids,
            block_size=self.block_size,
            root=request.root_hash,
            hash_of=self._hash_of,
        )

    def _longest_prefix(self, request: Request, limit: int) -> int:
        """Columns of the longest prefix that every group holds as far as it will be read."""
        find, keys = self._pool.find, request.keys
        count = limit
        for group in self._full:
            for column in range(count):
                if find(group, keys[column]) is None:
                    count = column
                    break
        # Shorten until the window before the prefix's end is whole in every sliding group.
        missing = True
        while missing and count > 0:
            missing = False
            for group in self._sliding:
                for column in range(count - 1, self._first_read(group, count * self.block_size) - 1, -1):
                    if find(group, keys[column]) is None:
                        count, missing = column, True
                        break
        return count

    def _first_read(self, group: int, position: int) -> int:
        """The first column that a query at `position` or later reads in this group."""
        window = self.layout.windows[group]
        return max(position - window + 1, 0) // self.block_size if window else 0

    def _drop_unread(self, request: Request) -> None:
        for group in self._sliding:
            blocks = request.block_ids[group]
            column = min(self._first_read(group, request.num_computed - request.num_unsure), len(blocks)) - 1
            unread = []
            while column >= 0 and blocks[column]:
                unread.append(blocks[column])
                blocks[column] = PADDING_BLOCK
                column -= 1
            self._pool.give_back(unread[::-1])

    def _shared_tail(self, request: Request) -> list[int]:
        """Groups in which the block of a fork's next position is not its alone to write."""
        if request.num_computed >= request.num_slots:
            return []
        return [group for group in self._groups if not self._pool.is_private(request.block_ids[group][-1])]

    def _copy_tail(self, request: Request, groups: list[int]) -> Pairs:
        copies = []
        for group in groups:
            blocks = request.block_ids[group]
            source = blocks[-1]
            blocks[-1:] = self._pool.take(1)
            copies.append((source, blocks[-1]))
            self._pool.give_back([source])
        return copies
