"""The interface of proposers that draft on the host, from tokens alone."""

from __future__ import annotations

from typing import NamedTuple, Protocol

NUM_EVIDENCE = 9
"""Classes of evidence; see Drafts."""
FORCED = NUM_EVIDENCE - 1
"""The class of tokens that a grammar forces, the strongest."""
_CLASS_BEGINS = (2, 3, 4, 6, 10, 16, 32)
"""The shortest match of the classes 1, 2, ...; a shorter one than the first is of class 0."""
LONG_MATCHES = _CLASS_BEGINS[:1:-1]
"""The shortest matches of the stronger classes, the longest first."""
LONGEST_COUNTED = _CLASS_BEGINS[-1]
_CLASSES = [sum(length >= begin for begin in _CLASS_BEGINS) for length in range(LONGEST_COUNTED + 1)]


class Drafts(NamedTuple):
    """Guesses of a request's next tokens, in order. Where they are not `known`, the workers draft by themselves, and
    token_ids only says how many.

    `evidence` is a class from 0 (weak) to NUM_EVIDENCE - 1 (strong). The share of accepted drafts is measured for each
    class separately, so a proposer should give one class to drafts that are about equally likely to be right.
    """

    token_ids: list[int]
    evidence: int
    known: bool = True


NO_DRAFTS = Drafts([], 0)


class Proposer(Protocol):
    """Guesses the next tokens of requests.

    Indexing is apart from proposing, because a long prompt costs milliseconds to index and the scheduler's loop must
    not wait for it: prepare() indexes a bounded piece, and propose() returns nothing before all is indexed.
    """

    index_budget: int
    """Tokens that may be indexed a step, over all requests."""

    def begin(self, key: str, token_ids: list[int], space: str) -> None:
        """A request begins. `token_ids` is its own list of known tokens: it grows while the request runs, and the
        proposer reads it where it lies. Only requests of equal `space` may be drafted from each other's text."""

    def prepare(self, key: str, limit: int) -> int:
        """Index at most `limit` tokens; returns how many were indexed."""

    def propose(self, key: str, count: int) -> Drafts:
        """Up to `count` guesses of the tokens that follow the known ones."""

    def end(self, key: str) -> None:
        """The request has ended."""


def evidence_of(length: float) -> int:
    """The class of evidence of a guess that follows a match of `length` tokens."""
    return _CLASSES[min(int(length), LONGEST_COUNTED)]
