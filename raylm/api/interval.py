"""stream_interval: events of a stream that hold several tokens."""

from __future__ import annotations

from raylm.generation.choices import ChoiceDelta
from raylm.generation.listing import joined as joined_entries


class Interval:
    """Collects a choice's deltas until they have so many tokens. The first of a choice goes at once, the last too."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._held: dict[int, ChoiceDelta | None] = {}

    def push(self, delta: ChoiceDelta) -> ChoiceDelta | None:
        """What is to be sent now."""
        if self._num_tokens == 1:
            return delta
        is_first = delta.choice not in self._held
        held = self._held.get(delta.choice)
        if held is not None:
            delta = _joined(held, delta)
        waits = not is_first and delta.finish_reason is None and delta.num_tokens < self._num_tokens
        self._held[delta.choice] = delta if waits else None
        return None if waits else delta

    def rest(self) -> list[ChoiceDelta]:
        """What was held back, for a stream that ends early."""
        return [delta for delta in self._held.values() if delta is not None]


def _joined(first: ChoiceDelta, second: ChoiceDelta) -> ChoiceDelta:
    """Two deltas of one choice as one."""
    parts = [delta.entries for delta in (first, second) if delta.entries is not None]
    return second._replace(
        text=first.text + second.text,
        num_tokens=first.num_tokens + second.num_tokens,
        logprob=first.logprob + second.logprob,
        num_cached=first.num_cached + second.num_cached,
        token_ids=first.token_ids + second.token_ids,
        entries=joined_entries(parts) if parts else None,
        pieces=None if first.pieces is None or second.pieces is None else first.pieces + second.pieces,
        num_reasoning=first.num_reasoning + second.num_reasoning,
    )
