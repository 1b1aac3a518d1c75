"""Requests that wait for their grammar to be compiled by the workers, so that no step does."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from raylm.core.sampling import SamplingParams
from raylm.core.structure import StructuredOutput
from raylm.executor.base import Preparation

_IDLE_WAIT_S = 0.02
"""How long an engine with nothing else to do looks at one grammar; new requests wait so long to be read."""
_MAX_KNOWN = 256
_Key = bytes


class Preparing(NamedTuple):
    """A grammar that the workers compile."""

    key: _Key
    work: Preparation


class HeldForGrammars:
    """The first ids of requests, each with the grammar that it waits for."""

    def __init__(self, prepare: Callable[[StructuredOutput], Preparation | None]) -> None:
        self._prepare = prepare
        self._held: list[tuple[str, Preparing]] = []
        self._known: OrderedDict[_Key, None] = OrderedDict()
        """Grammars that the workers have compiled lately: they keep them for a while."""

    def begin(self, params: SamplingParams) -> Preparing | None:
        """Have the grammar of a request compiled; None where there is nothing to wait for."""
        structure = params.structure
        if structure is None:
            return None
        key = hashlib.blake2b(f"{structure.kind} {structure.value}".encode(), digest_size=16).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return None
        work = self._prepare(structure)
        if work is not None and not work.wait(0):
            return Preparing(key, work)
        self._know(key)
        return None

    def hold(self, request_id: str, preparing: Preparing) -> None:
        self._held.append((request_id, preparing))

    def take_ready(self) -> list[str]:
        """Ids that need not be held any more."""
        if not self._held:
            return []
        ready = [one for one in self._held if one[1].work.wait(0)]
        if ready:
            self._held = [one for one in self._held if one not in ready]
        for _, preparing in ready:
            self._know(preparing.key)
        return [request_id for request_id, _ in ready]

    def wait(self) -> None:
        """Wait a moment for the oldest; not at all where none is held."""
        if self._held:
            self._held[0][1].work.wait(_IDLE_WAIT_S)

    def _know(self, key: _Key) -> None:
        self._known[key] = None
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
