"""Which engine has how much of a prompt in its cache: an index of each engine's blocks, and the walk along a prompt."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xxhash import xxh3_128

from raylm.core.block_hash import HASHES, PrefixForm, chain, token_bytes
from raylm.core.events import BlockEvent, EventBatch, EventSnapshot

_KEPT_BYTES = 8
"""Of a block's hash. Two prefixes that share them would cost a request its time to compute one, and nothing else."""
_LEAST, _MOST = 64, 256
"""Blocks of a prompt that are looked up together, a segment, at its beginning and far on: where the last of them is
there, so are the others, since an engine gives up the end of a prefix before its beginning."""


class PrefixIndex:
    """The blocks that one engine has, and those that it will soon have of prompts that were sent there."""

    def __init__(self, form: PrefixForm, *, limit: int) -> None:
        """At most `limit` blocks are kept of each kind; what finds no room is only never matched."""
        self.form = form
        self.epoch = 0
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
        """A prompt with these blocks was sent to the engine: count them as there for so long, until it says so."""
        expected = self._expected
        kept = []
        for key in keys:
            if key not in expected and len(expected) >= self._limit:
                break
            expected[key] = now + seconds
            kept.append(key)
        if kept:
            self._until.append((now + seconds, kept))

    def expire(self, now: float) -> None:
        """Drop what was expected until now."""
        while self._until and self._until[0][0] <= now:
            for key in self._until.popleft()[1]:
                # Sent once more, it is expected for longer.
                if self._expected.get(key, now + 1) <= now:
                    del self._expected[key]

    def _add(self, events: list[BlockEvent]) -> None:
        stored, group = self._stored, self.form.group
        for kind, block_hash, _, _, of in events:
            if kind == "cleared":
                stored.clear()
                self._set_epoch(self.epoch + 1)
            elif of != group:
                continue
            elif kind == "removed":
                stored.discard(block_hash[:_KEPT_BYTES])
            elif len(stored) < self._limit:
                stored.add(block_hash[:_KEPT_BYTES])

    def _set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self._forget_expected()

    def _forget_expected(self) -> None:
        self._expected.clear()
        self._until.clear()


class Naming(NamedTuple):
    """What decides how blocks are named, besides their tokens."""

    form: PrefixForm
    epoch: int


class SegmentEnds:
    """How the last blocks of prompts' segments are named, of those that were named last. A prompt that goes on where
    another one did is so named a segment at a time, which costs less than half of naming each of its blocks."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ends: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def find(self, beginning: bytes) -> bytes | None:
        """The hash of the block at the end of such a beginning of a prompt, given by a hash of its own."""
        end = self._ends.pop(beginning, None)
        if end is not None:
            self._ends[beginning] = end  # The last to go.
        return end

    def keep(self, beginning: bytes, end: bytes) -> None:
        if len(self._ends) >= self._limit:
            del self._ends[next(iter(self._ends))]
        self._ends[beginning] = end


@dataclass(slots=True)
class _Segment:
    """The blocks of a prompt from `begin` to before `stop`. `end`: the hash of the last one; `hashes`: those of all,
    where they were named."""

    begin: int
    stop: int
    data: bytes
    parent: bytes
    end: bytes = b""
    hashes: list[bytes] = field(default_factory=list)


class PromptKeys:
    """The keys of a prompt's blocks, made only as far as somebody looks, a segment at a time."""

    def __init__(
        self, prompt_ids: list[int], naming: Naming, *, adapter: str, salt: str, limit: int, ends: SegmentEnds
    ) -> None:
        """`limit`: blocks that are named at most. An engine computes the last token of a prompt always, so its block
        counts only where another token follows."""
        form = naming.form
        self.block_size = form.block_size
        self.limit = min((len(prompt_ids) - 1) // form.block_size, limit)
        self._prompt_ids = prompt_ids
        self._hash_of = HASHES[form.block_hash]
        self._known = ends
        self._root = form.root(adapter=adapter, salt=salt, epoch=naming.epoch)
        self._beginning = xxh3_128(self._root)
        self._segments: list[_Segment] = []

    def matched(self, indexes: Sequence[PrefixIndex]) -> list[int]:
        """How many of the first blocks each engine has. Ends at the first segment that none of them has whole."""
        counts = [0] * len(indexes)
        walking = list(range(len(indexes)))
        begin = 0
        while walking and begin < self.limit:
            segment = self._with(begin)
            key = segment.end[:_KEPT_BYTES]
            ahead = []
            for each in walking:
                if key in indexes[each]:
                    counts[each] = segment.stop
                    ahead.append(each)
                else:
                    counts[each] = begin + _first_missing(self._named(segment), indexes[each])
            walking = ahead
            begin = segment.stop
        return counts

    def key(self, number: int) -> bytes:
        """The key of one block; that of the last one where there are not so many."""
        number = min(number, self.limit - 1)
        if number < 0:
            return b""
        segment = self._with(number)
        return self._named(segment)[number - segment.begin][:_KEPT_BYTES]

    def marks(self, first: int, last: int) -> list[bytes]:
        """Keys of blocks from `first` to before `last`, by which a prompt that goes on alike knows them: all of the
        first segment's, then the last one's of each segment."""
        last = min(last, self.limit)
        if first >= last:
            return []
        segment = self._with(first)
        hashes = self._named(segment)[first - segment.begin : last - segment.begin]
        while segment.stop < last:
            segment = self._with(segment.stop)
            hashes.append(segment.end)
        return [block_hash[:_KEPT_BYTES] for block_hash in hashes]

    def _with(self, number: int) -> _Segment:
        """The segment of one of the blocks that there are."""
        while not self._segments or self._segments[-1].stop <= number:
            self._append()
        return self._segments[bisect_right(self._segments, number, key=lambda segment: segment.begin) - 1]

    def _append(self) -> None:
        """The next segment: its end is remembered, or its blocks are named."""
        parent, begin = (self._segments[-1].end, self._segments[-1].stop) if self._segments else (self._root, 0)
        whole = begin + min(max(begin, _LEAST), _MOST)
        stop = min(whole, self.limit)
        data = token_bytes(self._prompt_ids[begin * self.block_size : stop * self.block_size])
        segment = _Segment(begin, stop, data, parent)
        self._segments.append(segment)
        self._beginning.update(data)
        beginning = self._beginning.digest()
        segment.end = self._known.find(beginning) or self._named(segment)[-1]
        if segment.hashes and stop == whole:
            self._known.keep(beginning, segment.end)

    def _named(self, segment: _Segment) -> list[bytes]:
        """The hashes of a segment's blocks."""
        if not segment.hashes:
            segment.hashes = chain(segment.data, segment.parent, block_size=self.block_size, hash_of=self._hash_of)
        return segment.hashes


def _first_missing(hashes: list[bytes], index: PrefixIndex) -> int:
    return bisect_left(hashes, True, key=lambda block_hash: block_hash[:_KEPT_BYTES] not in index)
