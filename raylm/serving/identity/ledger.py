"""The ledger: how much of each limit the ingresses of an endpoint have taken together.

An ingress spends of what it holds, without asking anyone. Once a second, and when it holds too little, it says what it
has used and still holds, and asks for more. What all have used and hold is never more than the limit, whatever the
order in which they come.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from raylm.serving.identity.window import WINDOW_S

Kind = Literal["requests", "tokens", "running"]
_FORGET_S = {"requests": WINDOW_S + 2.0, "tokens": WINDOW_S + 2.0, "running": 10.0}
"""How long an ingress that is silent counts: what it used counts for a minute, what it runs ends with it."""


class Claim(NamedTuple):
    """One limit of one tenant at one ingress: what it has used, what it may still use, and how much more it wants."""

    tenant: str
    kind: Kind
    limit: int
    used: int
    held: int
    more: int


class Grant(NamedTuple):
    """The answer to a claim: how much more it may use, and what the other ingresses have used and hold."""

    extra: int
    others: int


class Reply(NamedTuple):
    """A grant for each claim, and how many ingresses there are."""

    grants: list[Grant]
    num_ingresses: int


_Key = tuple[str, Kind]


class Ledger:
    """Sums of what each ingress last said. It needs no history: after a loss the next claims say all of it again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._taken: dict[str, dict[_Key, int]] = {}
        self._seen: dict[str, float] = {}
        self._sums: Counter[_Key] = Counter()

    def exchange(self, ingress: str, claims: Sequence[Claim], *, all_of_them: bool) -> Reply:
        """`ingress`: its own name, whichever it is. `all_of_them`: the ingress has taken nothing of other limits."""
        now = self._clock()
        self._seen[ingress] = now
        self._forget(now)
        mine = self._taken.setdefault(ingress, {})
        if all_of_them:
            claimed = {(claim.tenant, claim.kind) for claim in claims}
            for key in [key for key in mine if key not in claimed]:
                self._set(mine, key, 0)
        grants = [self._grant(mine, claim) for claim in claims]
        return Reply(grants, len(self._seen))

    def _grant(self, mine: dict[_Key, int], claim: Claim) -> Grant:
        key = (claim.tenant, claim.kind)
        others = self._sums[key] - mine.get(key, 0)
        taken = claim.used + claim.held
        extra = max(0, min(claim.more, claim.limit - others - taken))
        self._set(mine, key, taken + extra)
        return Grant(extra, others)

    def _set(self, mine: dict[_Key, int], key: _Key, amount: int) -> None:
        self._sums[key] += amount - mine.pop(key, 0)
        if amount:
            mine[key] = amount
        if not self._sums[key]:
            del self._sums[key]

    def _forget(self, now: float) -> None:
        """What ingresses have taken that are silent."""
        for ingress in [name for name, seen in self._seen.items() if now - seen > min(_FORGET_S.values())]:
            silent, taken = now - self._seen[ingress], self._taken[ingress]
            for key in [key for key in taken if silent > _FORGET_S[key[1]]]:
                self._set(taken, key, 0)
            if not taken:
                del self._taken[ingress], self._seen[ingress]
