"""How likely drafts are accepted, by what was seen."""

from __future__ import annotations

from raylm.core.speculation.proposer import NUM_EVIDENCE

_COMMON_MEMORY = 0.998
"""Weight of a draft when the next one of its class and position comes, for the shares of all requests together."""
_OWN_MEMORY = 0.9
"""The same for the shares of one request: it remembers some ten verified drafts of a class."""
_PRIORS = (0.15, 0.25, 0.35, 0.5, 0.65, 0.75, 0.85, 0.9, 0.95)
"""Expected shares of each class of evidence before anything was seen."""
_PRIOR_WEIGHT = 4.0
"""The common share counts like so many drafts of the request itself; the prior like so many of all."""


class OwnShares:
    """Accepted and verified drafts of one request, of a class's first drafts and of its later ones, forgotten
    exponentially."""

    __slots__ = ("accepted", "verified")

    def __init__(self) -> None:
        self.accepted = [0.0] * (2 * NUM_EVIDENCE)
        self.verified = [0.0] * (2 * NUM_EVIDENCE)


class Acceptance:
    """Measured shares of accepted drafts, by class of evidence, by position in the draft and by request.

    The share of a position counts drafts that were reached, those before them having been accepted. A request's own
    share is drawn towards the common one of its class and position, which new requests begin with.
    """

    def __init__(self, num_drafts: int) -> None:
        self._accepted = [[prior * _PRIOR_WEIGHT] * num_drafts for prior in _PRIORS]
        self._verified = [[_PRIOR_WEIGHT] * num_drafts for _ in _PRIORS]

    def values(self, own: OwnShares, evidence: int, count: int) -> list[float]:
        """For each of `count` drafts the probability that it and all before it are accepted."""
        accepted, verified = self._accepted[evidence], self._verified[evidence]
        slot = 2 * evidence
        values = []
        value = 1.0
        for position in range(count):
            common = accepted[position] / verified[position]
            value *= (own.accepted[slot] + _PRIOR_WEIGHT * common) / (own.verified[slot] + _PRIOR_WEIGHT)
            values.append(value)
            slot = 2 * evidence + 1
        return values

    def observe(self, own: OwnShares, evidence: int, num_drafted: int, num_accepted: int) -> None:
        """Of `num_drafted` drafts the first `num_accepted` were accepted."""
        accepted, verified = self._accepted[evidence], self._verified[evidence]
        for position in range(min(num_drafted, num_accepted + 1)):
            right = position < num_accepted
            slot = 2 * evidence + (position > 0)
            verified[position] = _COMMON_MEMORY * verified[position] + 1
            accepted[position] = _COMMON_MEMORY * accepted[position] + right
            own.verified[slot] = _OWN_MEMORY * own.verified[slot] + 1
            own.accepted[slot] = _OWN_MEMORY * own.accepted[slot] + right
