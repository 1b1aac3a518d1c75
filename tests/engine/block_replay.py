"""What a follower of block events does with them."""

from __future__ import annotations

from raylm.core.events import EventBatch, EventSnapshot


def replay(found: set[bytes], item: EventSnapshot | EventBatch) -> set[bytes]:
    """What can be found after a snapshot or a batch."""
    if isinstance(item, EventSnapshot):
        return {stored.block_hash for stored in item.stored}
    for one in item.events:
        if one.kind == "cleared":
            found = set()
        elif one.kind == "stored":
            found = found | {one.block_hash}
        else:
            found = found - {one.block_hash}
    return found
