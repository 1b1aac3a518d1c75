"""Conversations: turns that repeat all that was said before, after one of a few system prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from raylm.sim.traces import Lengths

_OWN_TOKENS = 1 << 16
"""Token ids from here on stand for a conversation, those below for a system prompt."""


class SessionKind(NamedTuple):
    """What conversations are like: lengths in tokens, and the seconds between an answer and the next question."""

    system_prompts: int = 8
    system: Lengths = Lengths(1500, 0.5, 6000)
    question: Lengths = Lengths(120, 0.8, 2000)
    answer: Lengths = Lengths(200, 0.6, 1000)
    turns: Lengths = Lengths(6, 0.6, 20)
    think_s: float = 10.0


@dataclass(slots=True)
class Session:
    """One conversation. `turns` holds the lengths of each question and of its answer, `pauses` the seconds before each
    question but the first."""

    number: int
    at: float
    history: list[int]
    turns: list[tuple[int, int]]
    pauses: list[float]
    turn: int = 0
    answered: list[int] = field(default_factory=list)

    def ask(self) -> tuple[list[int], int]:
        """The next prompt, and how long its answer will be."""
        question, answer = self.turns[self.turn]
        own = _OWN_TOKENS + self.number
        self.history = [*self.history, *self.answered, *[own] * question]
        self.turn += 1
        self.answered = []
        return self.history, answer

    @property
    def is_over(self) -> bool:
        return self.turn == len(self.turns)


def make_sessions(kind: SessionKind, *, rate: float, sessions: int, seed: int) -> list[Session]:
    """So many conversations in the order in which they begin, `rate` a second on average. The first system prompts are
    the more popular ones, as 1 / rank."""
    rng = random.Random(f"sessions:{seed}")
    systems = [[number] * kind.system.draw(rng) for number in range(kind.system_prompts)]
    weights = [1 / (rank + 1) for rank in range(kind.system_prompts)]
    made = []
    at = 0.0
    for number in range(sessions):
        at += rng.expovariate(1.0) / rate
        count = kind.turns.draw(rng)
        turns = [(kind.question.draw(rng), kind.answer.draw(rng)) for _ in range(count)]
        pauses = [rng.expovariate(1 / kind.think_s) for _ in range(count - 1)]
        made.append(Session(number, at, rng.choices(systems, weights)[0], turns, pauses))
    return made
