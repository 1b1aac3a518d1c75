"""Proposers that know no tokens."""

from __future__ import annotations

from raylm.core.speculation.proposer import NO_DRAFTS, Drafts

_EVIDENCE = 5
"""Drafts of a model are all of one class; before any was verified it is expected of them what is expected of this
class of an n-gram's."""
_UNKNOWN = -1


class Silent:
    """Proposes nothing: only what grammars force is verified."""

    index_budget = 0

    def begin(self, key: str, token_ids: list[int], space: str) -> None:
        pass

    def prepare(self, key: str, limit: int) -> int:
        return 0

    def propose(self, key: str, count: int) -> Drafts:
        return NO_DRAFTS

    def end(self, key: str) -> None:
        pass


class OnDevice(Silent):
    """Says how many tokens to draft, which the workers do by a model of their own."""

    def propose(self, key: str, count: int) -> Drafts:
        return Drafts([_UNKNOWN] * count, _EVIDENCE, known=False)
