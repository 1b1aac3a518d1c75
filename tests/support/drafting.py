"""Models that draft on the device for small random targets, and a drafter that always wants drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from raylm.core.drafting import NOTHING_DRAFTED, DraftCounters, Proposal
from raylm.core.request import Request
from raylm.core.speculation.speculation import Speculation
from tests.support import checkpoints

METHODS = ("draft_model", "eagle3", "mtp")


class Fixed:
    """Always drafts the same number of tokens for each request, but for every third step."""

    def __init__(self, num_drafts: int) -> None:
        self.accepted: list[tuple[int, int]] = []
        self._num_drafts = num_drafts
        self._num_steps = 0

    @property
    def counters(self) -> DraftCounters:
        return NOTHING_DRAFTED

    def begin(self, request: Request) -> None:
        pass

    def is_on(self, num_rows: int) -> bool:
        self._num_steps += 1
        return self._num_steps % 3 > 0

    def plan(self, requests: Sequence[Request]) -> dict[Request, Proposal]:
        # Not all of them the same number.
        return {request: Proposal(1 + i % self._num_drafts, []) for i, request in enumerate(requests)}

    def settle(self, request: Request, proposal: Proposal, num_accepted: int) -> None:
        self.accepted.append((proposal.num_drafts, num_accepted))

    def observe(self, num_rows: int, num_tokens: int, num_sampled: int, seconds: float) -> None:
        pass

    def end(self, request: Request) -> None:
        pass


def steps_in_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """What drafts may cost is counted as if each step took as long: steps that take long by chance, on a busy machine,
    would end the drafts."""
    observe = Speculation.observe

    def observe_a_millisecond(own: Speculation, rows: int, tokens: int, sampled: int, seconds: float) -> None:
        observe(own, rows, tokens, sampled, 1e-3)

    monkeypatch.setattr(Speculation, "observe", observe_a_millisecond)


class Models(NamedTuple):
    """Targets, and what drafts for them."""

    llama: Path
    mimo: Path
    draft: Path
    head: Path

    def target(self, method: str) -> Path:
        return self.mimo if method == "mtp" else self.llama

    def speculation(self, method: str) -> dict[str, object]:
        path = {"draft_model": self.draft, "eagle3": self.head}.get(method)
        return {"method": method, "num_drafts": 3, "model": str(path) if path else None}

    @classmethod
    def make(cls, folder: Path) -> Models:
        llama = checkpoints.llama(folder / "llama")
        return cls(
            llama,
            checkpoints.mimo(folder / "mimo"),
            checkpoints.qwen3(folder / "draft", num_hidden_layers=2),
            checkpoints.eagle3(folder / "head", llama),
        )
