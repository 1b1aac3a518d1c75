"""Which engine has how much of a prompt in its cache: an index of each engine's blocks, and the walk along a prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from raylm.core.block_hash import HASHES, PrefixForm, chain
from raylm.core.events import BlockEvent, EventBatch, EventSnapshot

_KEPT_BYTES = 8
"""Of a block's hash. Two prefixes that share them would cost a request its time to compute one, and nothing else."""
_STRIDE = 16
"""Blocks looked at together: where the last of them is there, so are the others, since an engine gives up the end of a
prefix before its beginning."""
_AHEAD = 192
"""Blocks that are named beyond those that are there: by them prompts know each other that come at the same time."""


class Naming(NamedTuple):
    """What decides how blocks are named, besides their tokens."""

    form: PrefixForm
    epoch: int


class PrefixIndex:
    """The blocks that one engine has, and those that it will soon have of prompts that were sent there."""

    def __init__(self, form: PrefixForm, *, limit: int) -> None:
        """At most `limit` blocks are kept of each kind; what finds no room is only never matched."""
        self.naming = Naming(form, 0)
        """How the blocks are named that the engine stores by now."""
        self._limit = limit
        self._stored: set[bytes] = set()
        self._expected: dict[bytes, float] = {}
        self._until: deque[tuple[float, list[bytes]]] = deque()

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_expected(self) -> int:
        return len(self._expected)

    def __contains__(self, key: bytes) -> bool:
        return key in self._stored or key in self._expected

    def apply(self, said: EventSnapshot | EventBatch) -> None:
        """Take in what the engine says of its blocks; a snapshot replaces all that was said before."""
        if isinstance(said, EventSnapshot):
            self._stored = set()
            self._set_epoch(said.epoch)
            self._add(said.stored)
            return
        self._add(said.events)

    def forget(self) -> None:
        """Nothing is known of the engine's blocks any more."""
        self._stored = set()
        self._forget_expected()

    def expect(self, keys: list[bytes], *, now: float, seconds: float) -> None:
        """A prompt with these blocks was sent to the engine: count them as there for so long, until it says so.
        The list is kept."""
        if len(self._expected) + len(keys) > self._limit:
            keys = self._that_fit(keys)
        if keys:
            self._expected.update(dict.fromkeys(keys, now + seconds))
            self._until.append((now + seconds, keys))

    def expire(self, now: float) -> None:
        """Drop what was expected until now."""
        expected = self._expected
        while self._until and self._until[0][0] <= now:
            for key in self._until.popleft()[1]:
                # Sent once more, it is expected for longer.
                if expected.get(key, now + 1) <= now:
                    del expected[key]

    def _that_fit(self, keys: list[bytes]) -> list[bytes]:
        """The first keys, up to one that would be one too many."""
        room = self._limit - len(self._expected)
        for count, key in enumerate(keys):
            if key not in self._expected:
                if room == 0:
                    return keys[:count]
                room -= 1
        return keys

    def _add(self, events: list[BlockEvent]) -> None:
        stored, group = self._stored, self.naming.form.group
        for kind, block_hash, _, _, of in events:
            if kind == "cleared":
                stored.clear()
                self._set_epoch(self.naming.epoch + 1)
            elif of != group:
                continue
            elif kind == "removed":
                stored.discard(block_hash[:_KEPT_BYTES])
            elif len(stored) < self._limit:
                stored.add(block_hash[:_KEPT_BYTES])

    def _set_epoch(self, epoch: int) -> None:
        if epoch != self.naming.epoch:
            self.naming = self.naming._replace(epoch=epoch)
            self._forget_expected()

    def _forget_expected(self) -> None:
        self._expected.clear()
        self._until.clear()


class PromptKeys:
    """The keys of a prompt's blocks, made only as far as somebody looks."""

    def __init__(self, prompt_ids: list[int], naming: Naming, *, adapter: str, salt: str, limit: int) -> None:
        """`limit`: blocks that are named at most. An engine computes the last token of a prompt always, so its block
        counts only where another token follows."""
        form = naming.form
        self.block_size = form.block_size
        self.limit = min((len(prompt_ids) - 1) // form.block_size, limit)
        self.keys: list[bytes] = []
        self._prompt_ids = prompt_ids
        self._hash_of = HASHES[form.block_hash]
        self._parent = form.root(adapter=adapter, salt=salt, epoch=naming.epoch)

    def reach(self, count: int) -> None:
        """Name the first `count` blocks, or as many as there are."""
        first, last = len(self.keys), min(count, self.limit)
        if first >= last:
            return
        size = self.block_size
        tokens = self._prompt_ids[first * size : last * size]
        hashes = chain(tokens, self._parent, block_size=size, hash_of=self._hash_of)
        self._parent = hashes[-1]
        self.keys += [block_hash[:_KEPT_BYTES] for block_hash in hashes]

    def after(self, count: int) -> bytes:
        """The key of the block that follows the first `count`; that of the last one where none does."""
        return self.keys[min(count, len(self.keys) - 1)] if self.keys else b""

    def matched(self, indexes: Sequence[PrefixIndex]) -> list[int]:
        """How many of the first blocks each engine has. Ends at the first block that none of them has, and names those
        that follow, as far as prompts that come at the same time know each other by them."""
        counts = [0] * len(indexes)
        walking = list(range(len(indexes)))
        begin = 0
        while walking and begin < self.limit:
            if len(self.keys) < begin + _STRIDE:
                self.reach(begin + _AHEAD)
            keys = self.keys[begin : begin + _STRIDE]
            ahead = []
            for each in walking:
                if keys[-1] in indexes[each]:
                    counts[each] = begin + len(keys)
                    ahead.append(each)
                else:
                    counts[each] = begin + _first_missing(keys, indexes[each])
            walking = ahead
            begin += len(keys)
        self.reach(max(counts) + _AHEAD)
        return counts


def _first_missing(keys: list[bytes], index: PrefixIndex) -> int:
    for count, key in enumerate(keys):
        if key not in index:
            return count
    return len(keys)
