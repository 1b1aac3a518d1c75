"""Requests that have not begun."""

from __future__ import annotations

from raylm.core.request import Request


class Newcomers:
    """How many requests of the queue have not begun, and how many more their caller has announced. Preempted requests
    do not count."""

    def __init__(self) -> None:
        self.num = 0
        self.num_tokens = 0
        """Tokens of their prompts."""
        self.num_to_come = 0
        self.tokens_to_come = 0

    def add(self, request: Request) -> None:
        """It is in the queue."""
        request.is_new = True
        self.num += 1
        self.num_tokens += request.num_prompt

    def remove(self, request: Request) -> None:
        """It has begun, or ended before."""
        request.is_new = False
        self.num -= 1
        self.num_tokens -= request.num_prompt

    def announce(self, num: int, num_tokens: int) -> None:
        """So many are still to be added, whose prompts have so many tokens together."""
        self.num_to_come, self.tokens_to_come = num, num_tokens

    def tokens_of(self, of_one: int) -> int:
        """Tokens of the queue's that a step could compute, at most `of_one` of each."""
        return min(self.num_tokens, self.num * of_one)
