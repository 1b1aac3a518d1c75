"""Which of the running requests a plan is for."""

from __future__ import annotations

from enum import Enum, auto
from operator import attrgetter

from raylm.core.request import Request

_last_turn = attrgetter("last_turn")


class Turn(Enum):
    """Who is to be in a plan."""

    EVERYBODY = auto()
    """All requests whose turn it is."""
    EARLY = auto()
    """All requests, even if their last token is still on its way: with pipeline stages the first stage waits for it,
    which is better than a stage without a plan."""
    PROMPTS = auto()
    """Only requests with more than one token to compute."""


def take_turn(running: list[Request], number: int, num_stages: int, turn: Turn) -> list[Request]:
    """The running requests that plan `number` is for, in their order.

    A token reaches the first stage when its plan has passed all stages, so with several a request decodes in every
    num_stages-th plan at most, and of all that decode a plan has an equal share: that keeps the stages equally busy.
    """
    if turn is Turn.PROMPTS:
        taken = [request for request in running if request.num_to_compute > 1]
    elif num_stages == 1:
        return running
    else:
        decoding = [request for request in running if request.num_to_compute == 1]
        early = turn is Turn.EARLY
        ready = [request for request in decoding if early or request.last_turn <= number - num_stages]
        share = -(-len(decoding) // num_stages)
        waiting = {request.row for request in decoding} - {
            request.row for request in sorted(ready, key=_last_turn)[:share]
        }
        taken = [request for request in running if request.row not in waiting]
    for request in taken:
        if request.num_to_compute:  # A beam that waits for its next token has no turn to lose.
            request.last_turn = number
    return taken
