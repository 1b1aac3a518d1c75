"""What happens to the cached blocks, for routers that send a request to where its prefix is."""

from __future__ import annotations

from typing import Literal, NamedTuple

from raylm.core.block_hash import BlockKey


class BlockEvent(NamedTuple):
    """A block became findable ("stored"), or stopped being so ("removed"), or all did ("cleared", with empty hashes).

    `block_hash` covers all tokens up to the block's end, `parent_hash` those up to its beginning: the parent of a
    sequence's first block is the root of its model, adapter and salt. `num_tokens` counts the tokens of the block.
    """

    kind: Literal["stored", "removed", "cleared"]
    block_hash: bytes
    parent_hash: bytes
    num_tokens: int
    group: int


class EventBatch(NamedTuple):
    """Consecutive events: the first has the sequence number `first`, and none is missing between two batches."""

    first: int
    events: list[BlockEvent]


class EventSnapshot(NamedTuple):
    """Every block that can be found now, as "stored" events. It holds what all events before number `next` did; `epoch`
    counts the "cleared" among them, and is what the root hash of newcomers has."""

    next: int
    stored: list[BlockEvent]
    epoch: int = 0


class StoredTokens(NamedTuple):
    """The tokens of a block that was stored, four bytes each, and whether it is a sequence's first."""

    data: bytes
    is_first: bool


class EventLog:
    """Collects events until they are taken. What is findable now is kept too, so that a follower may begin at any
    time."""

    def __init__(self, *, with_tokens: bool = False) -> None:
        """`with_tokens`: keep the tokens of stored blocks too, until they are taken with the events."""
        self._with_tokens = with_tokens
        self._tokens: list[StoredTokens] = []
        self._next = 0
        self._epoch = 0
        self._pending: list[BlockEvent] = []
        self._stored: dict[tuple[bytes, int], BlockEvent] = {}

    def stored(self, key: BlockKey, group: int, *, is_first: bool = False) -> None:
        event = BlockEvent("stored", key.hash, key.parent, key.num_tokens, group)
        self._stored[key.hash, group] = event
        self._pending.append(event)
        if self._with_tokens:
            self._tokens.append(StoredTokens(key.tokens, is_first))

    def removed(self, block_hash: bytes, group: int) -> None:
        gone = self._stored.pop((block_hash, group))
        self._pending.append(gone._replace(kind="removed"))

    def cleared(self) -> None:
        self._stored.clear()
        self._epoch += 1
        self._pending.append(BlockEvent("cleared", b"", b"", 0, 0))

    def take(self) -> EventBatch | None:
        """What happened since the last call; None when nothing did."""
        if not self._pending:
            return None
        batch = EventBatch(self._next, self._pending)
        self._next += len(batch.events)
        self._pending = []
        return batch

    def take_tokens(self) -> list[StoredTokens]:
        """Those of the "stored" events that were taken last, in their order."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def snapshot(self) -> EventSnapshot:
        """What is findable now. The next batch may begin with events that it holds already, by their numbers."""
        return EventSnapshot(self._next + len(self._pending), list(self._stored.values()), self._epoch)
