"""How busy an engine is, as one of its clients knows it."""

from __future__ import annotations

from typing import NamedTuple

from raylm.core.load import Load


class _Sent(NamedTuple):
    tokens: int
    sequences: int


class Backlog:
    """What the engine last said of its load, and what this client has sent that is not in it yet.

    An engine says of every request that it has taken it, and every load that it tells afterwards holds the request. So
    nothing counts twice, and nothing is overlooked between two reports.
    """

    def __init__(self) -> None:
        self.load = Load(0, 0, 0.0)
        self._sent: dict[str, _Sent] = {}
        self._taken: dict[str, _Sent] = {}
        self._tokens = 0
        self._sequences = 0

    @property
    def num_sequences(self) -> int:
        """Sequences that run or wait in the engine, or are on their way there."""
        return self.load.running + self.load.waiting + self._sequences

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait for their first step there, or are on their way."""
        return self.load.waiting_tokens + self._tokens

    def send(self, name: str, num_tokens: int, num_sequences: int) -> None:
        """A request is on its way, whose prompt leaves so many tokens to compute."""
        self._sent[name] = _Sent(num_tokens, num_sequences)
        self._tokens += num_tokens
        self._sequences += num_sequences

    def take(self, name: str) -> None:
        """The engine has the request."""
        if (sent := self._sent.pop(name, None)) is not None:
            self._taken[name] = sent

    def drop(self, name: str) -> None:
        """The request is not on its way any more. Nothing where it arrived before."""
        if (sent := self._sent.pop(name, None)) is not None:
            self._tokens -= sent.tokens
            self._sequences -= sent.sequences

    def report(self, load: Load) -> None:
        """The engine says how busy it is."""
        self.load = load
        for sent in self._taken.values():
            self._tokens -= sent.tokens
            self._sequences -= sent.sequences
        self._taken.clear()

    def lose(self) -> None:
        """The connection was lost, and all that was on its way."""
        self._sent.clear()
        self._taken.clear()
        self._tokens = self._sequences = 0
