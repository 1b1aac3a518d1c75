"""Requests that wait for their grammar to be compiled by the workers, so that no step does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from raylm.core.sampling import SamplingParams
from raylm.core.structure import StructuredOutput
from raylm.executor.base import Preparation

_IDLE_WAIT_S = 0.02
"""How long an engine with nothing else to do looks at one grammar; new requests wait so long to be read."""
_Key = tuple[str, str]


class Preparing(NamedTuple):
    """A grammar that the workers compile, and the requests that are held for it, each by its first id."""

    key: _Key
    work: Preparation
    request_ids: list[str]


class HeldForGrammars:
    """Requests that are held until the workers have compiled their grammars.

    The workers are asked for every request: only they know which grammars they still keep, which depends on the sizes
    of the compiled grammars. Requests that are held for equal grammars share one question.
    """

    def __init__(self, prepare: Callable[[StructuredOutput], Preparation | None]) -> None:
        self._prepare = prepare
        self._held: dict[_Key, Preparing] = {}

    def begin(self, params: SamplingParams) -> Preparing | None:
        """Have the grammar of a request compiled; None where there is nothing to wait for."""
        structure = params.structure
        if structure is None:
            return None
        key = structure.kind, structure.value
        if key in self._held:
            return self._held[key]
        work = self._prepare(structure)
        if work is None or work.wait(0):
            return None
        return Preparing(key, work, [])

    def hold(self, request_id: str, preparing: Preparing) -> None:
        preparing.request_ids.append(request_id)
        self._held[preparing.key] = preparing

    def take_ready(self) -> list[str]:
        """Ids that need not be held any more."""
        if not self._held:
            return []
        ready = [preparing for preparing in self._held.values() if preparing.work.wait(0)]
        for preparing in ready:
            del self._held[preparing.key]
        return [request_id for preparing in ready for request_id in preparing.request_ids]

    def wait(self) -> bool:
        """Wait a moment for the oldest; False where none is held."""
        if not self._held:
            return False
        next(iter(self._held.values())).work.wait(_IDLE_WAIT_S)
        return True
